"""The GPU benchmark: kernels, verify passes and answers in the shapes of big models."""
