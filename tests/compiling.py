"""Triton kernels compiled for GPUs that are not there, and what a program takes of a processor."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448}
"""Bytes of shared memory that a program may have, by capability."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compiled(
    kernel: Any,
    capability: int,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, int],
    aligned: Collection[str],
) -> dict[str, Any]:
    """One kernel for one capability.

    Args:
        pointers: types of arguments; those not named are int32.
        constants: what is compiled in.
        aligned: arguments that are multiples of 16, as a launch finds them to be.

    Returns:
        ``shared`` bytes of memory of a program; ``registers`` of a thread, and bytes of its ``stack``, to which those
        go that it lacks; sizes of ``ptx`` and ``cubin``; loads issued ``ahead`` of their use by a loop; ``narrow``, see
        ``narrow_products``.
    """
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    several = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in constants and name in aligned
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=several)
    built: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    entry = {"kernel": kernel.__name__, "capability": capability, "shared": built.metadata.shared}
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
