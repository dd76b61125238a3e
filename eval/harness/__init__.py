"""Shared by all benchmarks: interleaved timing, held-out prompts, other engines, output."""
