"""Synthetic dataset: procedural scenes and clips, rendering, captions, questions and conversations."""
