"""Non-GEMM decode-step ops: tree attention, norms and activations, verification, KV compaction, tree growth.

Each op has a torch reference and a Triton kernel with the same signature; ``mmspec.ops.kernels`` selects the
implementation. The C++ kernels of ``mmspec.ops.cpu`` run decoder layers with packed weights and compute top-k logits.
"""

from mmspec.ops.attention import tree_attention
from mmspec.ops.elementwise import act_and_mul, add_norm, rotate_and_cache
from mmspec.ops.growth import (
    Beam,
    extend_reach,
    keep_best,
    next_beam,
    node_inputs,
    top_log_probs,
    tree_ancestors,
    write_last,
)
from mmspec.ops.verify import accepted_path, choose_drawn, compact_kv, greedy, quantile, sample

__all__ = [
    "Beam",
    "accepted_path",
    "act_and_mul",
    "add_norm",
    "choose_drawn",
    "compact_kv",
    "extend_reach",
    "greedy",
    "keep_best",
    "next_beam",
    "node_inputs",
    "quantile",
    "rotate_and_cache",
    "sample",
    "top_log_probs",
    "tree_ancestors",
    "tree_attention",
    "write_last",
]
