"""ViSpec drafter."""
