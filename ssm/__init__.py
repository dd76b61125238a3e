"""Recurrent side of mmspec: Mamba-2 and Gated DeltaNet targets, their tree operations, drafters and training."""
