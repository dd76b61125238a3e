"""ctypes bindings of the C++ kernels in ``cpp``: structures, functions and supported builds; used by ``cpu.py``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.errors import UserError
from mmspec.ops import builds, compiler
from mmspec.ops.builds import BUILDS

KINDS = ("int4", "int8", "bfloat16", "float32", "q5", "q4_k", "q5_k", "q6_k", "mxfp4")  # ``Kind`` of ``cpp/formats.h``
FORMATS = {"Q4_0": "int4", "Q4_1": "int4", "Q5_0": "q5", "Q5_1": "q5", "Q8_0": "int8", "MXFP4": "mxfp4"}
FORMATS |= {"Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k"}
"""GGUF formats (``Stored`` of ``cpp/stored.h``) and the kinds of their blocks."""

MIXING = "attention", "delta", "mamba", "convolution", "mlp", "experts"
"""Kinds of sublayers, ``Mixing`` of ``cpp/sublayers.h``."""

ACTIVATIONS = "silu", "gelu", "squared_relu"
"""``Activation`` of ``cpp/sublayers.h``."""


class Linear(ctypes.Structure):
    kept: Any  # owners of the memory behind pointers
    _fields_ = [
        ("blocks", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kind", "inputs", "outputs", "features")),
        ("rest", ctypes.c_void_p),
    ]


class Packing(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("places", "blocks")),
        *((name, ctypes.c_int64) for name in ("format", "count", "features", "file")),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "centre", "mask", "sinks", "read")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("batch", "nodes", "slots", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_node", "query_head")),
        *((name, ctypes.c_int64) for name in ("key_row", "key_head", "key_slot", "mask_row", "mask_node")),
        ("stored", ctypes.c_int64),
    ]


class Experts(ctypes.Structure):
    kept: Any
    _fields_ = [
        *((name, Linear) for name in ("gate_up", "up", "down")),
        *((name, ctypes.c_int64) for name in ("count", "gelu")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    ]


class Router(ctypes.Structure):
    kept: Any
    _fields_ = [
        ("correction", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "used", "sigmoid", "normalised")),
        *((name, ctypes.c_int64) for name in ("groups", "used_groups", "group_best")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
    ]


class Sublayer(ctypes.Structure):
    kept: Any
    _fields_ = [
        ("inputs", ctypes.c_void_p),
        ("out", Linear),
        *((name, ctypes.c_void_p) for name in ("norm", "after", "inner_norm", "output_scale", "sinks")),
        *((name, ctypes.c_void_p) for name in ("taps", "tap_bias", "decay", "step_bias", "skip")),
        *((name, ctypes.c_float) for name in ("epsilon", "after_epsilon", "inner_epsilon", "scale")),
        *((name, ctypes.c_float) for name in ("attention_scale", "gate_scale")),
        *((name, ctypes.c_int64) for name in ("kind", "projections", "ends_layer", "beside", "parts")),
        *((name, ctypes.c_int64) for name in ("normed_residual", "heads", "groups", "head_dim", "key_dim", "rotated")),
        *((name, ctypes.c_int64) for name in ("gated", "rotation", "windowed", "interleaved", "width", "channels")),
        *((name, ctypes.c_int64) for name in ("first_channel", "place", "activation", "norm_groups")),
        ("experts", ctypes.POINTER(Experts)),
        ("router", ctypes.POINTER(Router)),
    ]


class Recurrent(ctypes.Structure):
    kept: Any
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("conv_state", "state", "inputs", "record")),
        *((name, ctypes.c_int64) for name in ("channels", "width", "state_row", "unit", "recorded", "units", "nodes")),
    ]


class TreePass(ctypes.Structure):
    _fields_ = [
        ("sublayers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "hidden")),
        *((name, ctypes.c_void_p) for name in ("x", "rotation", "states", "ancestors", "first")),
        ("attention", Attention),
        ("window", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("window_row", "window_node")),
        ("recurrent", Recurrent),
    ]


class EagleCell(ctypes.Structure):
    _fields_ = [
        *((name, Linear) for name in ("into", "out", "guess", "head")),
        *((name, ctypes.c_void_p) for name in ("table", "norm", "norm_bias")),
        ("epsilon", ctypes.c_float),
    ]


class Markov(ctypes.Structure):
    _fields_ = [
        ("out", Linear),
        ("table", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("draft_ids", ctypes.c_void_p),
    ]


def available() -> bool:
    """Whether the kernels are available: requires AVX2, a C++ compiler, and ``MMSPEC_KERNELS=auto``."""
    return os.environ.get("MMSPEC_KERNELS", "auto") == "auto" and isinstance(library(), ctypes.CDLL)


def in_use(x: Tensor) -> bool:
    """Whether the kernels support a tensor and are already loaded; does not trigger compilation."""
    ready = library.cache_info().currsize > 0 and available()
    return ready and x.device.type == "cpu" and x.dtype == torch.float32


def problem() -> str | None:
    """Reason why the kernels cannot be compiled or loaded; None if they can."""
    loaded = library()
    return loaded if isinstance(loaded, str) else None


def functions() -> Any:
    loaded = library()
    if isinstance(loaded, str):  # weights were packed on another machine
        raise UserError(f"weights packed for the C++ kernels need them, load the model here: {loaded}")
    return loaded


@cache
def library() -> ctypes.CDLL | str:
    """The compiled kernels, or the reason why they are not available."""
    name = build()
    return compiled(BUILDS[name], builds.prebuilt(name, compiler.processor().split()))


def compiled(flags: Sequence[str], prebuilt: Path | None = None) -> ctypes.CDLL | str:
    """The kernels ``prebuilt``, else compiled with flags of ``BUILDS``, or the reason why they are not available."""
    if not _has_instructions():
        return "expected a processor with AVX2"
    try:
        loaded = compiler.load(builds.SOURCE, flags, prebuilt)
    except compiler.CompilerError as error:
        return str(error)
    pointer, count, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    address = ctypes.POINTER
    loaded.linear.argtypes = [address(Linear), pointer, count, pointer, threads]
    loaded.attention.argtypes = [address(Attention), threads]
    loaded.int8_heads.argtypes = [pointer, count, count, threads, pointer, threads]
    loaded.expert_outputs.argtypes = [address(Experts), pointer, count, count, pointer, pointer, pointer, threads]
    loaded.chosen_experts.argtypes = [address(Router), pointer, count, pointer, pointer, threads]
    loaded.decode_sublayers.argtypes = loaded.write_keys_values.argtypes = [address(TreePass), threads]
    loaded.advance_states.argtypes = [pointer, count, address(Recurrent), pointer, count, count, threads]
    loaded.greatest_of_rows.argtypes = [pointer, count, count, count, threads, pointer, pointer, threads]
    loaded.norm_rows.argtypes = [pointer, count, count, pointer, ctypes.c_float, pointer, threads]
    loaded.quantiles_of_rows.argtypes = [pointer, count, count, pointer, pointer, threads]
    tree = [pointer] * 3
    loaded.draft_slots.argtypes = [address(Markov), pointer, pointer, *[count] * 4, *tree]
    limits = count, count, count, count, ctypes.c_float, count
    loaded.draft_cells.argtypes = [address(EagleCell), *[pointer] * 5, *limits, *tree, threads]
    loaded.draft_cells.restype = count
    loaded.bytes_of_blocks.argtypes, loaded.bytes_of_blocks.restype = [count] * 3, count
    loaded.bytes_of_row.argtypes, loaded.bytes_of_row.restype = [count] * 2, count
    loaded.pack_rows.argtypes, loaded.pack_rows.restype = [address(Packing), count, threads], count
    loaded.instructions.restype = ctypes.c_char_p
    loaded.read_bytes.argtypes, loaded.read_bytes.restype = [pointer, count, threads], count
    loaded.multiply_add.argtypes, loaded.multiply_add.restype = [count, count, threads], count
    loaded.dense_rows.argtypes = [count, pointer, count, count, threads, pointer, threads]
    return loaded


def _has_instructions() -> bool:
    """Whether the CPU has AVX2 or AVX-512, or AArch64's dot products if requested; else torch's kernels are faster."""
    if os.environ.get("MMSPEC_CPU_BUILD") == "AArch64":
        return "asimddp" in compiler.processor().split()
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def build() -> str:
    """Name of the build to use, a key of ``BUILDS``: ``MMSPEC_CPU_BUILD``, or the fastest build.

    Without AVX-512 VNNI, 256-bit vectors are as fast as 512-bit vectors, and can use AVX-VNNI if available. Raises
    ``UserError``: ``MMSPEC_CPU_BUILD`` is not in ``BUILDS``.
    """
    vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
    name = os.environ.get("MMSPEC_CPU_BUILD") or ("AVX-512 VNNI" if vnni else "AVX-VNNI")
    if name not in BUILDS:
        raise UserError(f"MMSPEC_CPU_BUILD must be one of {', '.join(BUILDS)}: got {name!r}")
    return name
