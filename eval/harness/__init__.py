"""Shared by all benchmarks: interleaved timing, acceptance statistics, held-out prompts, other engines, output."""
