"""Non-GEMM decode-step ops: tree attention, verification, KV compaction, tree growth.

Each op has a torch reference and a Triton kernel of the same signature; ``mmspec.ops.kernels`` selects one. The C++
kernels of ``mmspec.ops.cpu`` run decoder layers with packed weights, and rank their logits.
"""

from mmspec.ops.attention import tree_attention
from mmspec.ops.growth import keep_best, next_beam, top_log_probs
from mmspec.ops.verify import accepted_path, choose_drawn, compact_kv, greedy, quantile, sample

__all__ = [
    "accepted_path",
    "choose_drawn",
    "compact_kv",
    "greedy",
    "keep_best",
    "next_beam",
    "quantile",
    "sample",
    "top_log_probs",
    "tree_attention",
]
