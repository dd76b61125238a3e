"""Decoding state: KV cache with tree verification, and tensors with one row per sequence."""
