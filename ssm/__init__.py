"""State-space side of mmspec: Mamba-2 and hybrid targets, their tree operations, drafters and training."""
