"""Recurrent side of mmspec: targets with recurrent layers, their tree operations, drafters and training."""
