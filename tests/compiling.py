"""Triton kernels compiled for absent GPUs, and the registers and shared memory of a program."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from mmspec.ops import kernels

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448}
"""Bytes of shared memory that a program may have, by capability."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_TYPES |= {torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"}


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments of a launch, by name, and options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def signature(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
        """Types of arguments, those that are compiled in, and those that are multiples of 16, as Triton finds them."""
        types, constants, aligned = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, self.arguments[parameter.name]
            specialised = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and specialised):
                types[name], constants[name] = "constexpr", value
                continue
            if isinstance(value, float):
                types[name] = "fp32"
                continue
            pointer = isinstance(value, torch.Tensor)
            types[name] = f"*{_TYPES[value.dtype]}" if pointer else "i32" if value < 2**31 else "i64"
            specialised &= not parameter.do_not_specialize_on_alignment
            if specialised and (value.data_ptr() if pointer else value) % 16 == 0:
                aligned[(place,)] = [["tt.divisibility", 16]]
        return types, constants, aligned


def launches(operation: Callable[[], Any]) -> list[Launch]:
    """Launches of an operation under Triton; nothing is computed."""
    found: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | given
        options = {name: named.pop(name) for name in given if name not in kernel.arg_names}
        found.append(Launch(kernel, named, options))

    with patch.object(JITFunction, "run", record), patch.object(kernels, "in_use", lambda device: "triton"):
        operation()
    return found


def compiled(launch: Launch, capability: int) -> dict[str, Any]:
    """A launched kernel for one capability.

    Returns:
        ``shared`` bytes of memory of a program; ``registers`` of a thread, and bytes of its ``stack``, to which those
        go that it lacks; sizes of ``ptx`` and ``cubin``; loads issued ``ahead`` of their use by a loop; ``narrow``, see
        ``narrow_products``.
    """
    types, constants, aligned = launch.signature()
    source = ASTSource(fn=launch.kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": True, **launch.options}  # the default, of which Triton 3.9 warns
    built: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    entry = {"kernel": launch.kernel.__name__, "capability": capability, "shared": built.metadata.shared}
    entry |= {kind: len(built.asm[kind]) for kind in ("ptx", "cubin")}
    entry["ahead"] = built.asm["ttgir"].count("async_copy_global_to_local")
    entry["narrow"] = narrow_products(built.asm["ttir"])
    return entry | _resources(built.asm["cubin"])


def narrow_products(ttir: str) -> list[str]:
    """Products of a program's number and an argument that are taken in 32 bits: used as an offset, such a product
    overflows in buffers of 2**31 elements."""
    constants: set[str] = set()
    numbers: set[str] = set()  # 32-bit values that follow from a program's number, or from how many programs there are
    narrow = []
    for line in ttir.splitlines():
        operation = line.partition(" loc(")[0].strip()
        found = re.match(r"%(\w+) = \"?(?:arith|tt)\.(\w+)\"?(.*)", operation)
        if not found:
            continue
        name, kind, rest = found.groups()
        operands = set(re.findall(r"%(\w+)", rest))
        if kind == "constant":
            constants.add(name)
        elif kind in ("get_program_id", "get_num_programs"):
            numbers.add(name)
        elif operands & numbers and rest.endswith(("i32", "i32>")) and kind not in ("cmpi", "load"):
            numbers.add(name)
            if kind == "muli" and not operands & constants:
                narrow.append(operation)
    return narrow


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    taken = dict(part.split(":", 1) for part in said.split() if part.startswith(("REG:", "STACK:")))
    return {"registers": int(taken["REG"]), "stack": int(taken["STACK"])}
