"""What a step costs beside the model's own matrix products: attention under a tree, verification, keeping a path.

Each operation has a plain torch form and a Triton kernel of the same signature; ``mmspec.kernels`` chooses.
"""

from mmspec.ops.attention import tree_attention
from mmspec.ops.compact import compact_kv
from mmspec.ops.verify import choose_drawn, follow, quantile

__all__ = ["choose_drawn", "compact_kv", "follow", "quantile", "tree_attention"]
