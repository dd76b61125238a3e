"""Shared by all measurements: interleaved timing, bootstrap intervals, acceptance counts, held-out prompts, output."""
