"""EAGLE-3 drafter."""
