"""Commands that train hybrids and their drafters."""
