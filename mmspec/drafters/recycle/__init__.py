"""Token Recycling drafter."""
