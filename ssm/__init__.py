"""Recurrent layers in mmspec: targets, tree operations, drafters and training."""
