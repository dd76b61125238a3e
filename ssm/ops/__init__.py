"""Tree scan and tree convolution of Mamba-2, and the commit of a path."""

from ssm.ops.conv import commit_conv, conv_window, tree_conv
from ssm.ops.scan import commit_scan, tree_scan

__all__ = ["commit_conv", "commit_scan", "conv_window", "tree_conv", "tree_scan"]
