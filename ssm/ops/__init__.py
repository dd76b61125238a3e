"""Recurrent layers on a tree: scan of Mamba-2, gated delta rule of Gated DeltaNet, causal convolution, commits."""

from ssm.ops.conv import commit_conv, conv_window, tree_conv
from ssm.ops.delta import commit_delta, tree_delta
from ssm.ops.scan import commit_scan, tree_scan

__all__ = ["commit_conv", "commit_delta", "commit_scan", "conv_window", "tree_conv", "tree_delta", "tree_scan"]
