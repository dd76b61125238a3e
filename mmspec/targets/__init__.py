"""Models whose output is kept exact: passes of transformers' decoders over trees, positions, masks, loading."""
