"""Native MTP drafter."""
