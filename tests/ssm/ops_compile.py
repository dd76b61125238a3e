"""``python -m tests.ssm.ops_compile 80 90``: compile every kernel of ``mmspec.ssm.ops`` for these GPUs, without one.

Prints one JSON line for each kernel and capability, with what a program takes of a processor.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mmspec.ssm.ops import triton_conv, triton_delta, triton_kda, triton_lru, triton_scan, triton_selective
from tests.compiling import compiled

SCAN = {"dt": "*fp32", "a": "*fp32", "d": "*fp32", "state": "*fp32", "ancestors": "*u8", "y": "*fp32", "path": "*i64"}
DELTA = {"v": "*bf16", **dict.fromkeys(("q", "k", "g", "beta", "state", "updates", "y"), "*fp32")}
DELTA |= {"ancestors": "*u8", "path": "*i64"}
KDA = dict.fromkeys(("keys", "queries", "key_overlap", "query_overlap"), "*fp32") | DELTA
SELECTIVE = {"x": "*bf16", **dict.fromkeys(("dt", "a", "b", "c", "d", "state", "states", "y"), "*fp32")}
SELECTIVE |= {"parents": "*i64", "path": "*i64"}
LRU = {"x": "*bf16", "a": "*bf16", **dict.fromkeys(("state", "y"), "*fp32"), "parents": "*i64", "path": "*i64"}
UNIT = dict.fromkeys(("x_dim", "b_state", "c_state", "s_state", "y_dim", "x_channel", "y_channel", "p_depth"), 1)
UNIT_DELTA = dict.fromkeys(("q_key", "k_key", "v_dim", "g_head", "b_head", "s_dim", "y_dim", "p_depth"), 1)
UNIT_KDA = UNIT_DELTA | dict.fromkeys(("g_key", "r_key"), 1)
UNIT_SELECTIVE = dict.fromkeys(
    ("x_channel", "dt_node", "a_state", "b_state", "c_state", "s_state", "p_node", "y_channel", "p_depth"), 1
)
UNIT_LRU = dict.fromkeys(("x_channel", "a_channel", "s_channel", "p_node", "y_channel", "p_depth"), 1)
"""What a launch finds to be one, Triton compiles in."""
ALIGNED = ("x", "dt", "a", "b", "c", "d", "state", "ancestors", "y", "weight", "bias", "window", "path")
ALIGNED += ("q", "k", "v", "g", "beta", "updates", "keys", "queries", "key_overlap", "query_overlap")
STRIDES = ("x_row", "x_node", "x_head", "b_row", "b_node", "c_row", "c_node", "s_row", "s_head", "s_dim", "y_row")
ALIGNED += ("parents", "states")
STRIDES += ("q_row", "q_node", "q_group", "k_row", "k_node", "k_group", "v_row", "v_node", "v_head", "s_key")
STRIDES += ("q_head", "k_head", "r_row", "r_node", "r_head")


def kernels() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Each kernel with its pointers' types, what is compiled in, and options: at the shapes of an 8B hybrid,
    Qwen3-Next, Kimi-Linear, MiniMax, Falcon-Mamba or RecurrentGemma, with trees of 16, 32 and 64 nodes, and of a small
    one."""
    low = dict.fromkeys(("x", "b", "c", "weight", "bias"), "*bf16")
    full = dict.fromkeys(low, "*fp32")
    conv = {"state": "*bf16", "window": "*i64", "path": "*i64", "y": "*bf16"}
    taps = {"HAS_BIAS": True, "SILU": True, "WIDTH": 4, "BLOCK_NODES": 8, "BLOCK_CHANNELS": 128}
    block = {"HAS_D": True, "BLOCK_DIM": 32, "BLOCK_PART": 32}
    trees = [{"BLOCK_NODES": nodes, "TILES": tiles} for nodes, tiles in ((16, 1), (32, 1), (32, 2))]
    ahead = {"num_stages": triton_scan.SCAN_STAGES}
    scans = [(triton_scan._tree_scan_kernel, low | SCAN, block | tree, ahead) for tree in trees]
    for tiles in (1, 2, 4):
        tree = {"BLOCK_NODES": triton_delta._NODE_TILE, "TILES": tiles}
        scans.append((triton_delta._tree_delta_kernel, DELTA, block | tree | UNIT_DELTA, ahead))
        scans.append((triton_kda._tree_kda_kernel, KDA, block | tree | UNIT_KDA, ahead))
    for nodes in (16, 64):
        walk = {"BLOCK_NODES": triton_kda._WALKING, "BLOCK_ALL": nodes, "BLOCK_KEY": 128}
        scans.append((triton_kda._overlap_kda_kernel, KDA, walk | UNIT_KDA, {}))
    scans.append((triton_scan._tree_scan_kernel, full | SCAN, block | trees[1], ahead))
    scans.append((triton_scan._tree_scan_kernel, low | SCAN, {"d": None, **block, "HAS_D": False, **trees[1]}, ahead))
    lru = {"BLOCK": triton_lru._TILE} | UNIT_LRU
    for kernel in (triton_lru._tree_lru_kernel, triton_lru._commit_lru_kernel):
        scans.append((kernel, LRU, lru, {"num_warps": 1}))
    tile = {"HAS_D": True, "BLOCK_CHANNELS": triton_selective._TREE_TILE // 16, "BLOCK_STATE": 16} | UNIT_SELECTIVE
    for nodes in (1, 16, 32, 64, None):
        tree = (
            {"BLOCK_NODES": nodes or 1, "IN_REGISTERS": nodes is not None} | tile | ({"states": None} if nodes else {})
        )
        scans.append((triton_selective._tree_selective_kernel, SELECTIVE, tree, {"num_warps": 1}))
    tile |= {"BLOCK_CHANNELS": triton_selective._COMMIT_TILE // 16}
    return [
        *scans,
        (triton_selective._commit_selective_kernel, SELECTIVE, tile, {}),
        *(
            (triton_scan._commit_scan_kernel, low | SCAN, {"BLOCK_DEPTH": 16, "TILES": 1} | tile, {"num_stages": 1})
            for tile in ({"BLOCK_DIM": 32, "BLOCK_STATE": 128}, {"BLOCK_DIM": 64, "BLOCK_STATE": 64})
        ),
        *(
            (
                triton_delta._commit_delta_kernel,
                DELTA,
                {"PER_CHANNEL": each, "BLOCK_DIM": 32, "BLOCK_KEY": 128} | unit,
                {},
            )
            for each, unit in ((False, UNIT_DELTA), (True, UNIT_KDA))
        ),
        (triton_conv._tree_conv_kernel, low | conv, taps, {}),
        (
            triton_conv._commit_conv_kernel,
            low | conv,
            {"BLOCK_CHANNELS": 128, "BLOCK_ENTRIES": 4, "BLOCK_DEPTH": 8},
            {},
        ),
    ]


def main(capabilities: list[int]) -> None:
    for capability in capabilities:
        for kernel, pointers, constants, options in kernels():
            entry = compiled(kernel, capability, pointers, UNIT | constants, options, (*ALIGNED, *STRIDES))
            print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
