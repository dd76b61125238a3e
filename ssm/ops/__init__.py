"""The two operations that make a Mamba-2 mixer verify a tree, and what commits a path: scan and causal convolution."""

from ssm.ops.conv import commit_conv, conv_window, tree_conv
from ssm.ops.scan import commit_scan, tree_scan

__all__ = ["commit_conv", "commit_scan", "conv_window", "tree_conv", "tree_scan"]
