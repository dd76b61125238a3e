"""Procedural scenes and clips: sampling, rendering, captions, questions and conversations."""
