"""Recurrent side of mmspec: targets with Mamba-2 or Gated DeltaNet layers, their tree operations, drafters and training."""
