"""Tree operations of recurrent layers: scans of Mamba-1 and Mamba-2, gated delta rules of Gated DeltaNet and KDA, gated
linear recurrence of RG-LRU, causal convolution, commits."""

from mmspec.ssm.ops.conv import commit_conv, conv_window, tree_conv
from mmspec.ssm.ops.delta import commit_delta, commit_kda, tree_delta, tree_kda
from mmspec.ssm.ops.scan import commit_scan, tree_scan
from mmspec.ssm.ops.selective import DepthIndex, commit_lru, commit_selective, tree_lru, tree_selective

__all__ = [
    "DepthIndex",
    "commit_conv",
    "commit_delta",
    "commit_kda",
    "commit_lru",
    "commit_scan",
    "commit_selective",
    "conv_window",
    "tree_conv",
    "tree_delta",
    "tree_kda",
    "tree_lru",
    "tree_scan",
    "tree_selective",
]
