"""What a step costs beside the model's own matrix products: attention under a tree, verification, keeping a path,
and what a drafter's passes leave to be chosen.

Each operation has a plain torch form and a Triton kernel of the same signature; ``mmspec.ops.kernels`` chooses.
"""

from mmspec.ops.attention import tree_attention
from mmspec.ops.compact import compact_kv
from mmspec.ops.growth import keep_best, next_beam, top_log_probs
from mmspec.ops.verify import choose_drawn, follow, quantile

__all__ = [
    "choose_drawn",
    "compact_kv",
    "follow",
    "keep_best",
    "next_beam",
    "quantile",
    "top_log_probs",
    "tree_attention",
]
