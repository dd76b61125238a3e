"""Builds of the C++ kernels: flags, and libraries in wheels. Imports no other package: ``setup.py`` runs this file."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("cpp") / "kernels.cpp"
PREBUILT = Path(__file__).with_name("prebuilt")  # libraries of a wheel; absent from source trees

LINK = ["-shared", "-fPIC", "-pthread"]
_FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
_YMM_FLAGS = ["-fno-schedule-insns2", "-fno-tree-ter"]  # else GCC spills accumulators
_NATIVE = [*_FLAGS, "-march=native"]
BUILDS = {
    "AVX-512 VNNI": _NATIVE,
    "AVX-VNNI": [*_NATIVE, *_YMM_FLAGS, "-mno-avx512f"],
    "AVX2": [*_NATIVE, *_YMM_FLAGS, "-mno-avx512f", "-mno-avxvnni"],
    "AArch64": _NATIVE,
}
"""Compiler flags of each build for this processor. A build uses its instructions if the processor has them; the library
function ``instructions`` returns which."""

_V3 = frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"])
_V4 = _V3.union(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"])
_XMM, _ZMM = [*_FLAGS, *_YMM_FLAGS, "-march=x86-64-v3"], [*_FLAGS, "-march=x86-64-v4", "-mavx512vnni"]
WHEEL = (  # AMX and i8mm are used after a check at run time
    ("AVX-512 VNNI", _V4 | {"avx512_bf16"}, [*_ZMM, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]),
    ("AVX-512 VNNI", _V4, _ZMM),
    ("AVX-VNNI", _V3 | {"avx_vnni"}, [*_XMM, "-mavxvnni"]),
    ("AVX2", _V3, _XMM),
    ("AArch64", frozenset({"asimddp"}), [*_FLAGS, "-march=armv8.2-a+dotprod"]),
)
"""Builds in wheels, the fastest first: name, required processor features (of /proc/cpuinfo), compiler flags."""


def prebuilt(build: str, features: Collection[str], folder: Path = PREBUILT) -> Path | None:
    """The wheel's fastest library of these sources, no faster than ``build``, for a processor with the features."""
    slower = list(BUILDS)[list(BUILDS).index(build) :]
    files = (_library(folder, flags) for name, needs, flags in WHEEL if name in slower and needs.issubset(features))
    return next(filter(Path.exists, files), None)


def _library(folder: Path, flags: Sequence[str]) -> Path:
    return folder / f"{identity(SOURCE, flags)}.so"


def find_compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX``, else the first available of the usual names; None if there is none."""
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def compile_for_wheel(folder: Path) -> str | None:
    """Compile the builds of ``WHEEL`` for the compiler's machine into a folder.

    Returns:
        The machine, x86_64 or aarch64; None without a compiler for Linux that knows the flags.
    """
    shutil.rmtree(folder, ignore_errors=True)
    compiler = find_compiler() or ""
    target = compiler and subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True).stdout
    machine = re.match("(x86_64|aarch64)-.*linux", target)
    if machine is None:
        return None
    folder.mkdir()
    found = [flags for name, _, flags in WHEEL if (name == "AArch64") == (machine[1] == "aarch64")]
    commands = [[compiler, *flags, *LINK, "-s", "-o", str(_library(folder, flags)), str(SOURCE)] for flags in found]
    codes = [process.wait() for process in [subprocess.Popen(command) for command in commands]]
    return machine[1] if 0 in codes else None


def identity(source: Path, flags: Sequence[str], *about: bytes) -> str:
    """Digest of a source, its headers, compiler flags, and further facts that a library depends on."""
    sources = [source, *sorted(source.parent.glob("*.h"))]
    parts = [*(file.read_bytes() for file in sources), *about, " ".join(flags).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
