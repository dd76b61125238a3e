"""Drafters that work on every target without training."""
