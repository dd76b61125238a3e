"""Drafters that learn from verified tokens while the engine is idle (online speculative decoding, arXiv 2310.07177)."""
