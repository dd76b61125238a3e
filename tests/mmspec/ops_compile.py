"""``python -m tests.mmspec.ops_compile 80 90``: compile every kernel of ``mmspec.ops`` for these GPUs, without one.

Prints one JSON line for each kernel and capability, with what a program takes of a processor.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmspec.ops import triton_attention, triton_compact, triton_growth, triton_verify

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
UNIT = dict.fromkeys(("q_dim", "k_dim", "v_dim", "m_slot", "d_node", "s_dim", "p_depth"), 1)
"""What a launch finds to be one, Triton compiles in."""
ALIGNED = ("query", "key", "value", "part", "weight", "storage", "scratch", "probs")
"""Pointers and strides that are multiples of 16 let several elements be moved at a time."""
STRIDES = ("q_row", "q_head", "q_node", "k_row", "k_head", "k_slot", "v_row", "v_head", "v_slot", "s_row", "s_slot")


SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448}
"""Bytes of shared memory that a program may have."""


def attention(shared: int, dtype: torch.dtype, rows: int, head_dim: int, **changes: Any) -> tuple[Any, ...]:
    block_rows, block_slots, block_dim = triton_attention.tiles(rows, head_dim, dtype, shared)
    blocks = {"BLOCK_ROWS": block_rows, "BLOCK_SLOTS": block_slots, "BLOCK_DIM": block_dim}
    blocks["HEAD_DIM"] = head_dim
    flags = {"SPLIT": True, "START": False, "WINDOW": False, "SOFTCAP": False} | changes
    pointers = dict.fromkeys(("query", "key", "value"), "*" + TYPES[dtype])
    pointers |= {"begin": "*i32", "end": "*i32", "mask": "*u8", "start": "*i32", "depth": "*i64"}
    pointers |= {"part": "*fp32" if flags["SPLIT"] else pointers["query"], "weight": "*fp32"}
    pointers |= {"scale": "fp32", "softcap": "fp32"}
    none = {name: None for name, used in (("start", "START"), ("depth", "WINDOW")) if not flags[used]}
    return (
        triton_attention._attend_kernel,
        pointers,
        flags | none | blocks,
        triton_attention.options(block_rows, dtype),
    )


def kernels(shared: int) -> list[tuple[Any, ...]]:
    """Each kernel with its pointers' types, what is compiled in, and options: at the shapes of 7B and 8B models and at
    those that take most."""
    low, tree = torch.bfloat16, {"tokens": "*i64", "parents": "*i64", "valid": "*u8", "choices": "*i64"}
    drawn = {"scratch": "*fp32", "chances": "*fp32", "last": "*fp32", "choice": "*i64"}
    grown = {"scores": "*fp32", "tokens": "*i64"}
    kept = {"storage": "*bf16", "path": "*i64", "ends": "*i32"}
    return [
        attention(shared, low, 60, 128),
        attention(shared, low, 240, 128, SPLIT=False, START=True),
        attention(shared, torch.float16, 240, 256, SOFTCAP=True, WINDOW=True),
        attention(shared, torch.float32, 60, 80),
        (
            triton_attention._merge_kernel,
            {"part": "*fp32", "weight": "*fp32", "read": "*bf16"},
            {"HEAD_DIM": 128, "BLOCK_SPLITS": 4, "BLOCK_DIM": 128},
            {"num_warps": 2},
        ),
        (
            triton_verify._follow_kernel,
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
            triton_verify._quantile_kernel,
            {"probs": "*fp32", "uniform": "*fp32", "token": "*i64"},
            {"BLOCK_VOCAB": 4096},
            {"num_warps": 8},
        ),
        (
            triton_compact._compact_kernel,
            kept | {"start": "*i32"},
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


def main(capabilities: list[int]) -> None:
    for capability in capabilities:
        for kernel, pointers, constants, options in kernels(SHARED[capability]):
            constants = {name: value for name, value in (UNIT | constants).items() if name in kernel.arg_names}
            types = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(kernel.arg_names)
                if n not in constants and n in (*ALIGNED, *STRIDES)
            }
            source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
            built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            entry = {"kernel": kernel.__name__, "capability": capability, "shared": built.metadata.shared}
            entry |= {kind: len(built.asm[kind]) for kind in ("ptx", "cubin")}
            # Loads that a loop issues ahead of their use; without them the device waits for its memory.
            entry["ahead"] = built.asm["ttgir"].count("async_copy_global_to_local")
            print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
