"""Shared by all benchmarks: interleaved timing, bootstrap intervals, acceptance counts, held-out prompts, output."""
