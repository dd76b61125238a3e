"""Micro-benchmarks of kernels and of the Mamba-2 tree operations, and the GPU benchmark."""
