"""Drafters that are state-space models."""
