"""``python -m tests.mmspec.ops.ops_compile 80 90``: compile every kernel of ``mmspec.ops`` for these GPUs, without one;
``... 90 attention``: attention at many shapes.

Prints one JSON line for each kernel and capability, with what a program takes of a processor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from mmspec.ops import triton_attention, triton_compact, triton_growth, triton_verify
from tests.compiling import SHARED, compiled

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
UNIT = dict.fromkeys(("q_dim", "k_dim", "v_dim", "m_slot", "d_node", "s_dim", "p_depth"), 1)
"""What a launch finds to be one, Triton compiles in."""
ALIGNED = ("query", "key", "value", "part", "weight", "storage", "scratch", "probs")
"""Pointers and strides that are multiples of 16 let several elements be moved at a time."""
STRIDES = ("q_row", "q_head", "q_node", "k_row", "k_head", "k_slot", "v_row", "v_head", "v_slot", "s_row", "s_slot")


def attention(
    shared: int, dtype: torch.dtype, rows: int, head_dim: int, value_dim: int | None = None, **changes: Any
) -> tuple[Any, ...]:
    value_dim = value_dim or head_dim
    widest = max(head_dim, value_dim)
    block_rows, block_slots = triton_attention.tiles(rows, widest, dtype, shared)
    blocks = {"BLOCK_ROWS": block_rows, "BLOCK_SLOTS": block_slots, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim}
    blocks["BLOCK_DIM"], blocks["BLOCK_VALUE"] = (triton_attention.block_of(dim) for dim in (head_dim, value_dim))
    flags = {"SPLIT": True, "START": False, "WINDOW": False, "SOFTCAP": False} | changes
    pointers = dict.fromkeys(("query", "key", "value"), "*" + TYPES[dtype])
    pointers |= {"prefix": "*i64", "mask": "*u8", "start": "*i64", "depth": "*i64"}
    pointers |= {"part": "*fp32" if flags["SPLIT"] else pointers["query"], "weight": "*fp32"}
    pointers |= {"scale": "fp32", "softcap": "fp32"}
    none = {name: None for name, used in (("start", "START"), ("depth", "WINDOW")) if not flags[used]}
    return (
        triton_attention._attend_kernel,
        pointers,
        flags | none | blocks,
        triton_attention.options(block_rows, triton_attention.block_of(widest), dtype),
    )


def attentions(shared: int) -> list[tuple[Any, ...]]:
    """Attention at the shapes of 1B, 7B and 8B models and of latent attention (DeepSeek V2 and V3, MiniCPM3), of one
    node and of 60, and at those that take most."""
    low, full = torch.bfloat16, torch.float32
    groups = [(rows, split) for rows in (1, 60, 240) for split in (True, False)]
    return [
        *(attention(shared, low, rows, 128, START=True, SPLIT=split) for rows, split in groups),
        *(attention(shared, low, rows, 64, START=True) for rows in (8, 480)),
        attention(shared, low, 60, 96, START=True, WINDOW=True),
        *(attention(shared, full, 60, head_dim, START=True) for head_dim in (64, 80, 256)),
        *(attention(shared, low, rows, 192, 128, START=True, SPLIT=split) for rows, split in groups),
        attention(shared, low, 60, 96, 64, START=True),
        attention(shared, full, 60, 192, 128, START=True),
    ]


def kernels(shared: int) -> list[tuple[Any, ...]]:
    """Each kernel with its pointers' types, what is compiled in, and options: at the shapes of 7B and 8B models and at
    those that take most."""
    low, tree = torch.bfloat16, {"tokens": "*i64", "parents": "*i64", "valid": "*u8", "choices": "*i64"}
    drawn = {"scratch": "*fp32", "chances": "*fp32", "last": "*fp32", "choice": "*i64"}
    grown = {"scores": "*fp32", "tokens": "*i64"}
    kept = {"storage": "*bf16", "path": "*i64", "lengths": "*i64"}
    return [
        attention(shared, low, 60, 128, START=True),
        attention(shared, low, 240, 128, SPLIT=False, START=True),
        attention(shared, torch.float16, 240, 256, SOFTCAP=True, WINDOW=True),
        attention(shared, torch.float32, 60, 128, START=True),
        attention(shared, low, 60, 192, 128, START=True),
        (
            triton_attention._merge_kernel,
            {"part": "*fp32", "weight": "*fp32", "read": "*bf16"},
            {"HEAD_DIM": 128, "BLOCK_SPLITS": 4, "BLOCK_DIM": 128},
            {"num_warps": 2},
        ),
        (
            triton_verify._path_kernel,
            tree | {"verdict": "*i64"},
            {"VALID": True, "BLOCK_NODES": 64},
            {"num_warps": 1},
        ),
        (
            triton_verify._choose_kernel,
            tree | drawn,
            {"VALID": False, "valid": None, "BLOCK_NODES": 64, "BLOCK_VOCAB": 4096},
            {"num_warps": 8},
        ),
        (
            triton_verify._sum_kernel,
            {"probs": "*fp32", "sums": "*fp64"},
            {"BLOCK_VOCAB": 4096},
            {"num_warps": 8},
        ),
        (
            triton_verify._quantile_kernel,
            {"probs": "*fp32", "sums": "*fp64", "uniform": "*fp32", "token": "*i64"},
            {"BLOCK_VOCAB": 4096, "BLOCK_PARTS": 64},
            {"num_warps": 8},
        ),
        (
            triton_compact._compact_kernel,
            kept | {"start": "*i64"},
            {"HEAD_DIM": 80, "START": True, "BLOCK_DEPTH": 16, "BLOCK_DIM": 128},
            {"num_warps": 4},
        ),
        (
            triton_growth._rank_kernel,
            {"logits": "*bf16", "keys": "*i64", "peaks": "*fp32", "sums": "*fp32"},
            {"K": 10, "BLOCK_VOCAB": 2048},
            {"num_warps": 8},
        ),
        (
            triton_growth._top_kernel,
            {"keys": "*i64", "peaks": "*fp32", "sums": "*fp32", "tokens": "*i64", "log_probs": "*fp32"},
            {"K": 10, "BLOCK_PARTS": 128, "BLOCK_KEYS": 2048},
            {"num_warps": 2},
        ),
        (
            triton_growth._beam_kernel,
            grown | {"best_score": "*fp32", "best_token": "*i64", "best_at": "*i64"},
            {"BLOCK_ENTRIES": 128},
            {"num_warps": 1},
        ),
        (
            triton_growth._keep_kernel,
            grown | {"root": "*i64", "parents": "*i64", "kept": "*i64", "above": "*i64", "score": "*fp32"},
            {"BLOCK": 64},
            {"num_warps": 4},
        ),
    ]


def main(capabilities: list[int], listed: Callable[[int], list[tuple[Any, ...]]]) -> None:
    for capability in capabilities:
        for kernel, pointers, constants, options in listed(SHARED[capability]):
            entry = compiled(kernel, capability, pointers, UNIT | constants, options, (*ALIGNED, *STRIDES))
            print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    *numbers, last = sys.argv[1:]
    if last == "attention":
        main([int(capability) for capability in numbers], attentions)
    else:
        main([int(capability) for capability in (*numbers, last)], kernels)
