"""Drafters that look at what the target sees."""
