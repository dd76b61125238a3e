"""Targets and processors: verify passes through transformers' decoders, masks, positions, loading."""
