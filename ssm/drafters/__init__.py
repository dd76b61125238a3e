"""State-space drafters."""
