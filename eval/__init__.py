"""Measurements: what the suite promises, checked and counted over many cases."""
