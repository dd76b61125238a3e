"""EAGLE drafter."""
