"""Recurrent side of mmspec: Mamba and Gated DeltaNet targets, their tree operations, drafters and training."""
