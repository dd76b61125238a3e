"""``python -m tests.ssm.ops_compile 80 90``: compile every kernel of ``ssm.ops`` for these GPUs, without one.

Prints one JSON line for each kernel and capability, with the size of its machine code.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ssm.ops import triton_conv, triton_scan

SCAN = {"dt": "*fp32", "a": "*fp32", "d": "*fp32", "state": "*fp32", "ancestors": "*u8", "y": "*fp32", "path": "*i64"}
UNIT = dict.fromkeys(("x_dim", "b_state", "c_state", "s_state", "y_dim", "x_channel", "y_channel", "p_depth"), 1)
"""What a launch finds to be one, Triton compiles in."""


def kernels() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Each kernel with its pointers' types and what is compiled in, at the shapes of an 8B hybrid and a small one."""
    low = dict.fromkeys(("x", "b", "c", "weight", "bias"), "*bf16")
    full = dict.fromkeys(low, "*fp32")
    conv = {"state": "*bf16", "window": "*i64", "path": "*i64", "y": "*bf16"}
    big, small = {"BLOCK_DIM": 32, "BLOCK_STATE": 128}, {"BLOCK_DIM": 64, "BLOCK_STATE": 64}
    tree = {"HAS_D": True, "BLOCK_NODES": 32, "TILES": 2}
    taps = {"HAS_BIAS": True, "SILU": True, "WIDTH": 4, "BLOCK_NODES": 8, "BLOCK_CHANNELS": 128}
    return [
        (triton_scan._tree_scan_kernel, low | SCAN, tree | big),
        (triton_scan._tree_scan_kernel, full | SCAN, tree | {"BLOCK_NODES": 16, "TILES": 1} | small),
        (triton_scan._commit_scan_kernel, low | SCAN, {"BLOCK_DEPTH": 16, "TILES": 1} | big),
        (triton_conv._tree_conv_kernel, low | conv, taps),
        (triton_conv._commit_conv_kernel, low | conv, {"BLOCK_CHANNELS": 128, "BLOCK_ENTRIES": 4, "BLOCK_DEPTH": 8}),
    ]


def main(capabilities: list[int]) -> None:
    for kernel, pointers, constants in kernels():
        constants = {name: value for name, value in (UNIT | constants).items() if name in kernel.arg_names}
        types = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
        for capability in capabilities:
            source = ASTSource(fn=kernel, signature=types, constexprs=constants)
            target = GPUTarget("cuda", capability, 32)
            built = triton.compile(source, target=target, options={"num_stages": 1})
            code = {kind: len(built.asm[kind]) for kind in ("ptx", "cubin")}
            print(json.dumps({"kernel": kernel.__name__, "capability": capability, **code}), flush=True)


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
