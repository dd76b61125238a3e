"""C++ CPU kernels (folder ``cpp``), compiled at first use: decoder layers, top-k and sampling of logits, and tree
drafting in one call; thread counts and huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from time import perf_counter as clock
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mmspec.ops import cpu_library
from mmspec.ops.cpu_library import (
    ACTIVATIONS,
    FORMATS,
    KINDS,
    MIXING,
    Attention,
    EagleCell,
    Experts,
    Linear,
    Markov,
    Packing,
    Recurrent,
    Router,
    Sublayer,
    TreePass,
)

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 256)

LANES = 16
"""Output features of a block of weights."""

PAGE = 2 << 20
"""Bytes of a huge page."""

MOVER = "huge pages"
"""Name of the threads of ``use_huge_pages``."""

_REST = 4.0  # pause, as a multiple of the time to move a page
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1, not defined in Python

Gain = tuple[Tensor, float]
"""Gain, float32, and epsilon of an RMSNorm."""

_GAINS = {"": "norm", "inner_": "inner_norm", "after_": "after"}

_LOCAL = threading.local()  # ``kernels``: see ``kernel_threads``


def zeros(count: int, huge: bool = False) -> Tensor:
    """``count`` zeros, (count,) uint8, aligned to a huge page; see ``use_huge_pages``. ``huge``: take huge pages at the
    first write, if the system supports them."""
    pages = mmap.mmap(-1, count + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:count]


def use_huge_pages(memory: Tensor) -> threading.Thread | None:
    """Move initialised memory from ``zeros`` to huge pages in a background thread, if the system supports them.

    With 4 KiB pages, address translation may take as long as sequential reads. If the system first has to find memory
    for huge pages (as virtual machines do at first use), writing to them would dominate the time to load a model. The
    thread sleeps most of the time, because forward passes wait for pages that are being moved.
    """
    starts = range(memory.data_ptr(), memory.data_ptr() + len(memory) - PAGE + 1, PAGE)
    if not hasattr(mmap, "MADV_HUGEPAGE") or not starts:
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    advise(starts[0], len(starts) * PAGE, mmap.MADV_HUGEPAGE)  # for systems that collapse pages gradually on their own

    def move(kept: Tensor) -> None:
        for start in starts:
            begun = clock()
            if advise(start, PAGE, _COLLAPSE):
                return
            time.sleep(_REST * (clock() - begun))

    thread = threading.Thread(target=move, args=(memory,), name=MOVER, daemon=True)
    thread.start()
    return thread


_MALLOPT = (("ARENA_MAX", -8, 2), ("MMAP_THRESHOLD", -3, 1 << 20), ("TRIM_THRESHOLD", -1, 128 << 20))


def give_back_freed_memory() -> None:
    """Make the allocator (glibc's) return large tensors to the system as soon as they are freed.

    By default, it keeps them in per-thread arenas. Does not override environment variables.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for name, number, value in _MALLOPT:
            if f"MALLOC_{name}" not in os.environ and f"MALLOC_{name}_" not in os.environ:
                mallopt(number, value)


def trim() -> None:
    """Return freed memory to the system, if the allocator (glibc's) supports it."""
    if trimmed := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trimmed(0)


def kernel_threads() -> int:
    """Number of threads of C++ kernels in calls from this thread: set by ``use_kernel_threads``, else torch's."""
    return getattr(_LOCAL, "kernels", None) or torch.get_num_threads()


def use_kernel_threads(count: int) -> None:
    """Set the number of threads of C++ kernels in calls from this thread; 0: torch's. Results do not depend on it."""
    _LOCAL.kernels = count


def limit_torch(count: int) -> bool:
    """Set torch's number of threads for the calling thread only, ``torch.get_num_threads()`` in it; returns False if
    torch's OpenMP does not support that."""
    library = _openmp()
    if library is None:
        return False
    torch.get_num_threads()  # in a new thread, a later first call would reset the limit
    library.omp_set_num_threads(count)
    if hasattr(library, "MKL_Set_Num_Threads_Local"):
        library.MKL_Set_Num_Threads_Local(count)
    return True


@cache
def _openmp() -> Any:
    """torch's library, if OpenMP is linked into it."""
    library = ctypes.CDLL(torch._C.__file__)
    return library if hasattr(library, "omp_set_num_threads") else None


def pointer(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], packed: int | None = None) -> int:
    """Check dtype and shape of a tensor and return its address for a kernel.

    Args:
        packed: number of last axes that must be contiguous; None means all.

    Raises:
        RuntimeError: the tensor has another dtype or shape, is not contiguous, or not on the CPU.
    """
    dense = x.is_contiguous() if packed is None else _is_packed(x.shape, x.stride(), packed)
    if x.dtype is not dtype or x.shape != shape or not dense or not x.is_cpu:
        raise RuntimeError(
            f"expected a contiguous tensor {shape} of {dtype} on the CPU: got {tuple(x.shape)} of {x.dtype} on "
            f"{x.device} with strides {x.stride()}"
        )
    return x.data_ptr()


def _is_packed(shape: Sequence[int], strides: Sequence[int], last: int) -> bool:
    whole = 1
    for axis in range(-1, -1 - last, -1):
        if strides[axis] != whole and shape[axis] != 1:
            return False
        whole *= shape[axis]
    return True


def bytes_of_row(form: str, features: int) -> int:
    """Bytes per row in a GGUF format."""
    return int(cpu_library.functions().bytes_of_row(list(FORMATS).index(form), features))


def bytes_of_blocks(kind: str, inputs: int, outputs: int) -> int:
    """Bytes of a linear layer's ``blocks``, see ``linear_weights``."""
    return int(cpu_library.functions().bytes_of_blocks(KINDS.index(kind), inputs, outputs))


def _blocks(blocks: Tensor, kind: str, inputs: int, outputs: int) -> int:
    return pointer(blocks, torch.uint8, (-(-outputs // LANES), bytes_of_blocks(kind, inputs, LANES)))


def pack_rows(packings: Sequence[tuple[str, Tensor, int, int, Tensor]], threads: int) -> int:
    """Convert rows in GGUF formats to the blocks of layers, layer by layer.

    Args:
        packings: per layer: format; file offsets or addresses of the rows, (rows,) int64; features per row; file
            descriptor, or -1; the layer's ``blocks``.

    Returns:
        Number of completed packings, n; fewer than all if a file is too short for the next packing; -1 - n if the next
        packing contains non-finite scales.
    """
    fields = (
        Packing(
            pointer(places, torch.int64, (len(places),)),
            _blocks(blocks, FORMATS[form], features, len(places)),
            *(list(FORMATS).index(form), len(places), features, file),
        )
        for form, places, features, file, blocks in packings
    )
    return int(cpu_library.functions().pack_rows((Packing * len(packings))(*fields), len(packings), threads))


def dense_rows(form: str, places: Tensor, features: int, file: int) -> tuple[Tensor | None, bool]:
    """Dequantise rows in a GGUF format.

    Args:
        form, places, features, file: see ``pack_rows``.

    Returns:
        (rows, features padded to groups) float32, None if the file is too short; and whether all numbers are finite.
    """
    out = torch.empty(len(places), -(-features // 32) * 32, dtype=torch.float32)
    rows = pointer(places, torch.int64, (len(places),)), len(places), features, file
    to = pointer(out, torch.float32, tuple(out.shape)), kernel_threads()
    status = cpu_library.functions().dense_rows(list(FORMATS).index(form), *rows, *to)
    return out if status else None, status > 0


def linear_weights(kind: str, blocks: Tensor, bias: Tensor | None, inputs: int, outputs: int) -> Linear:
    """Descriptor of a linear layer's weights for the kernels.

    Args:
        kind: one of ``KINDS``.
        blocks: uint8, in the layout of ``cpp/formats.h``; must outlive the result, as must ``bias``.
        bias: (outputs,) float32.
    """
    sizes = KINDS.index(kind), inputs, outputs, outputs
    added = None if bias is None else pointer(bias, torch.float32, (outputs,))
    return Linear(_blocks(blocks, kind, inputs, outputs), added, *sizes)


def joined_weights(parts: Sequence[Linear]) -> Linear:
    """Descriptor of a linear layer that concatenates outputs of several quantised layers. ``parts``: results of
    ``linear_weights`` with the same number of inputs."""
    outputs, rest = sum(part.outputs for part in parts), None
    for part in reversed(parts):
        at = None if rest is None else ctypes.addressof(rest)
        joined = Linear(part.blocks, part.bias, part.kind, part.inputs, outputs, part.outputs, at)
        joined.kept, rest = rest, joined
    assert rest is not None
    return rest


def linear(weights: Linear, x: Tensor) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: (..., inputs) float32; quantised to int8 per row and group of 32 features if the weights are quantised.

    Raises:
        RuntimeError: the shape or dtype of ``x`` is wrong.
    """
    x = x.contiguous()
    inputs = pointer(x, torch.float32, (*x.shape[:-1], weights.inputs))
    out = x.new_empty(*x.shape[:-1], weights.outputs)
    rows = x.numel() // weights.inputs
    cpu_library.functions().linear(weights, inputs, rows, out.data_ptr(), kernel_threads())
    return out


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention whose result does not depend on the positions of the attended slots.

    Keys, values, queries and softmax weights are bfloat16, accumulated in float32; or int8, with integer products.

    Args:
        query: (batch, nodes, heads, head_dim) float32, heads of a node contiguous; ``head_dim`` in ``HEAD_DIMS``.
        key, value: (batch, kv_heads, slots, head_dim) bfloat16, or of ``int8_heads``; equal strides, slots contiguous.
        mask: (batch, 1, nodes, slots) bool, slots contiguous; None is causal, with the nodes in the last slots.

    Returns:
        (batch, nodes, heads * head_dim).
    """
    batch, nodes, heads, head_dim = query.shape
    out = query.new_empty(batch, nodes, heads * head_dim)
    for part in (key, value):
        _check_stored(part, (batch, *key.shape[1:3]), head_dim)
    task = _attention(nodes, key.shape[2], head_dim, [key, value], mask)
    task.heads, task.scale = heads, scale
    task.query, task.read = pointer(query, torch.float32, tuple(query.shape), 2), out.data_ptr()
    if key.stride() != value.stride():
        raise RuntimeError(f"keys and values must have equal strides: got {key.stride()} and {value.stride()}")
    task.query_row, task.query_node, task.query_head, _ = query.stride()
    cpu_library.functions().attention(task, kernel_threads())
    return out


def int8_heads(states: Tensor, centre: Tensor | None = None) -> Tensor:
    """Keys or values in int8, see ``cpp/attention.h``.

    Args:
        states: (batch, kv_heads, slots, head_dim).
        centre: (kv_heads, head_dim) float32, subtracted from keys; None for values.

    Returns:
        (batch, kv_heads, slots, head_dim + 4) uint8.
    """
    x = (states.float() if centre is None else states.float() - centre[:, None]).contiguous()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] + 4, dtype=torch.uint8)
    rows = x.data_ptr(), x.numel() // x.shape[-1], x.shape[-1]
    cpu_library.functions().int8_heads(*rows, centre is not None, out.data_ptr(), kernel_threads())
    return out


def float_heads(stored: Tensor, centre: Tensor | None = None) -> Tensor:
    """Keys or values of ``int8_heads``, (batch, kv_heads, slots, head_dim) float32."""
    unit = stored[..., -4:].contiguous().view(torch.float32)
    if centre is None:
        return stored[..., :-4].view(torch.int8).float() * unit
    states = (stored[..., :-4].float() - 128) * unit
    return states @ _hadamard(states.shape[-1]) + centre[:, None]


@cache
def _hadamard(size: int) -> Tensor:
    """The matrix that keys are multiplied by before they are rounded, (size, size) float32: symmetric, orthonormal."""
    matrix, block = torch.ones(1, 1, dtype=torch.float32), size & -size
    while len(matrix) < block:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32), matrix)
    return torch.block_diag(*[matrix * block**-0.5] * (size // block))


def _check_stored(states: Tensor, shape: tuple[int, ...], head_dim: int) -> None:
    """Check keys or values of a cache: (*shape, head_dim) bfloat16 or (*shape, head_dim + 4) uint8."""
    coded = states.dtype is torch.uint8
    pointer(states, torch.uint8 if coded else torch.bfloat16, (*shape, head_dim + 4 * coded), 1)


def _attention(
    nodes: int, slots: int, head_dim: int, stored: Sequence[Tensor] | Tensor, mask: Tensor | None
) -> Attention:
    """Attention descriptor; ``stored`` are keys and values, (batch, kv_heads, ``slots`` or more, ...) each."""
    (batch, kv_heads, *_), size = stored[0].shape, stored[0].element_size()
    row, head, slot, _ = (stride * size for stride in stored[0].stride())
    masked = (None, 0, 0) if mask is None else _mask(mask, (batch, 1, nodes, slots))
    return Attention(
        batch=batch,
        nodes=nodes,
        slots=slots,
        kv_heads=kv_heads,
        head_dim=head_dim,
        key_row=row,
        key_head=head,
        key_slot=slot,
        key=stored[0].data_ptr(),
        value=stored[1].data_ptr(),
        stored=size == 1,
        **dict(zip(("mask", "mask_row", "mask_node"), masked, strict=True)),
    )


def _mask(mask: Tensor, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Address of a mask, and its strides of rows and nodes."""
    return pointer(mask, torch.bool, shape, 1), mask.stride(0), mask.stride(2)


def expert_weights(
    gate_up: Sequence[Linear], down: Linear, count: int, *, gelu: bool = False, alpha: float = 0.0, limit: float = 0.0
) -> Experts:
    """Descriptor of gated MLPs of which each row uses a few; a layer has the outputs of all, one after the other.

    Args:
        gate_up: one layer with the gates and then the ups of each expert, or a layer of gates and one of ups.
        count: number of experts, each with multiples of 32 features.
        gelu: the activation is GELU (tanh) instead of SiLU.
        alpha, limit: with a limit, the product is gpt-oss's: ``gate * sigmoid(alpha * gate) * (up + 1)``, clamped.
    """
    up = gate_up[1] if len(gate_up) > 1 else Linear()
    made = Experts(gate_up[0], up, down, count, gelu, alpha, limit)
    made.kept = list(gate_up), down
    return made


def expert_outputs(weights: Experts, x: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    """Sum of the chosen experts' outputs times their factors, in this order; experts out of range are skipped.

    Args:
        weights: result of ``expert_weights``.
        x: (rows, hidden) float32, contiguous.
        chosen: (rows, used) int64, contiguous.
        factors: (rows, used) float32, contiguous.
    """
    (rows, used), out = chosen.shape, torch.empty_like(x)
    inputs = pointer(x, torch.float32, (rows, weights.gate_up.inputs)), rows, used
    places = pointer(chosen, torch.int64, (rows, used)), pointer(factors, torch.float32, (rows, used))
    cpu_library.functions().expert_outputs(weights, *inputs, *places, out.data_ptr(), kernel_threads())
    return out


def router_weights(
    count: int,
    used: int,
    correction: Tensor | None = None,
    *,
    sigmoid: bool = False,
    normalised: bool = True,
    groups: int = 1,
    used_groups: int = 1,
    group_best: int = 1,
    epsilon: float = 0.0,
    scale: float = 1.0,
) -> Router:
    """Descriptor of a router for ``chosen_experts`` and ``sublayer_weights``: scores are softmax or sigmoids of logits.

    Args:
        count, used: number of experts, and of those that a row uses.
        correction: (count,) float32, added to scores for the choice alone.
        normalised: divide the scores of a row's experts by their sum plus ``epsilon``.
        groups, used_groups, group_best: experts are chosen among those of ``used_groups`` of ``groups`` equal groups:
            those with the greatest sums of ``group_best`` scores.
        scale: factor of the weights.
    """
    corrected = None if correction is None else pointer(correction, torch.float32, (count,))
    made = Router(corrected, count, used, sigmoid, normalised, groups, used_groups, group_best, epsilon, scale)
    made.kept = correction
    return made


def chosen_experts(router: Router, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Experts of each row, in descending order of their scores, and their weights: (rows, used) int64 and float32.

    Args:
        router: result of ``router_weights``.
        logits: (rows, count) float32, contiguous.
    """
    rows, chosen = len(logits), torch.empty(len(logits), router.used, dtype=torch.long)
    factors = torch.empty(chosen.shape, dtype=torch.float32)
    inputs = pointer(logits, torch.float32, (rows, router.count)), rows, chosen.data_ptr(), factors.data_ptr()
    cpu_library.functions().chosen_experts(router, *inputs, kernel_threads())
    return chosen, factors


def sublayer_weights(
    kind: str,
    inputs: Sequence[Linear],
    out: Linear,
    norm: Gain | None = None,
    inner_norm: Gain | None = None,
    after: Gain | None = None,
    *,
    scale: float = 1.0,
    attention_scale: float = 0.0,
    gate_scale: float = 1.0,
    activation: str = "silu",
    tensors: Mapping[str, Tensor] = MappingProxyType({}),
    experts: Experts | None = None,
    router: Router | None = None,
    parts: int = 1,
    **sizes: int,
) -> Sublayer:
    """Descriptor of a residual sublayer, ``x + scale * after(out(f(inputs(norm(x)))))``, for ``decode_sublayers``.

    Args:
        kind: one of ``MIXING``; ``"delta"`` is Gated DeltaNet, ``"mamba"`` Mamba-2.
        inputs: projections of the normed input, whose outputs are: queries (with gates after each head's if ``gated``),
            keys and values; queries, keys and values, output gate, rates and step sizes; gate, inputs of the
            convolution and step sizes; B, C and x; gate and up, or only up, in one layer; router, gate and up of the
            shared MLP in one layer, and its gate if ``gated``.
        norm, inner_norm, after: gains and epsilons of RMSNorms of the input, (parts * hidden,); of heads or a mixer's
            output; and of the output.
        gate_scale: factor of an MLP's gate.
        activation: ``"silu"``, ``"gelu"`` or, without a gate, ``"squared_relu"``, of an MLP.
        tensors: float32 ``taps``, (width, channels), and ``tap_bias``; ``decay``, ``step_bias`` and ``skip``, (heads,);
            ``sinks``, (heads,), scores of attention without values.
        parts: number of input parts, each with its own norm; the last part is the residual.
        sizes: other fields of ``Sublayer`` in ``cpp/sublayers.h``.
    """
    given = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    norms = {"": norm, "inner_": inner_norm, "after_": after}
    known = {name: one for name, one in norms.items() if one is not None}
    given |= {_GAINS[name]: gain.float().contiguous() for name, (gain, _) in known.items()}
    projections = (Linear * len(inputs))(*inputs)
    made = Sublayer(
        ctypes.addressof(projections),
        out,
        **{name: tensor.data_ptr() for name, tensor in given.items()},
        **{f"{name}epsilon": epsilon for name, (_, epsilon) in known.items()},
        scale=scale,
        attention_scale=attention_scale,
        gate_scale=gate_scale,
        kind=MIXING.index(kind),
        projections=len(inputs),
        activation=ACTIVATIONS.index(activation),
        experts=None if experts is None else ctypes.pointer(experts),
        router=None if router is None else ctypes.pointer(router),
        parts=parts,
        **sizes,
    )
    made.kept = projections, list(inputs), out, given, experts, router
    return made


def sublayers(parts: Sequence[Sublayer]) -> Any:
    """Array of sublayer descriptors, for ``decode_sublayers``."""
    array: Any = (Sublayer * len(parts))(*parts)
    array.kept, array.outputs = list(parts), sum(part.ends_layer for part in parts)
    return array


def decode_sublayers(
    weights: Any,
    x: Tensor,
    rotation: Tensor,
    mask: Tensor | None,
    cache: Tensor | None,
    start: int,
    window: Tensor | None = None,
    ancestors: Tensor | None = None,
    recurrent: Recurrent | None = None,
    first: Tensor | None = None,
    centre: Tensor | None = None,
) -> Tensor:
    """Run a decoder of residual sublayers over a tree.

    Args:
        weights: result of ``sublayers``.
        x: (batch, nodes, parts * hidden) float32, contiguous.
        rotation: (rotations, batch, nodes, 2, rotated / 2) float32, contiguous: cosines and sines of rotated pairs, i
        and i + rotated / 2.
        mask: (batch, 1, nodes, slots), see ``attention``; covers the slots up to the last written slot.
        cache: (2 * layers or more, rows, kv_heads, slots, head_dim) bfloat16, or of ``int8_heads``, the last axis
            contiguous: keys and values by layer with attention; None without any. New keys and values are written to
            the first rows, starting at slot ``start``.
        window: as ``mask``, for ``windowed`` sublayers; None is ``mask``.
        ancestors: (batch, nodes, nodes) bool, contiguous; [i, j] is True if j is i or an ancestor of i. None for tokens
            of a prompt, whose pass advances the states of recurrent layers.
        recurrent: result of ``recurrent_buffers``; None without recurrent layers.
        first: (batch,) int64, first token of each row of a prompt, after padding; None is 0.
        centre: (layers with attention, kv_heads, head_dim) float32, subtracted from keys in int8.

    Returns:
        (layers, batch, nodes, hidden), the outputs of sublayers that end a layer.
    """
    batch, nodes, features = x.shape
    states = x.new_empty(weights.outputs, batch, nodes, features // weights[0].parts)
    task = _pass(weights, x, rotation, cache, start, mask)
    task.states = states.data_ptr()
    task.ancestors = None if ancestors is None else pointer(ancestors, torch.bool, (batch, nodes, nodes))
    task.first = None if first is None else pointer(first, torch.int64, (batch,))
    task.recurrent = Recurrent() if recurrent is None else recurrent
    if centre is not None:
        task.attention.centre = pointer(centre, torch.float32, tuple(centre.shape))
    if window is not None:
        task.window, task.window_row, task.window_node = _mask(window, (batch, 1, nodes, start + nodes))
    cpu_library.functions().decode_sublayers(task, kernel_threads())
    return states


def write_keys_values(weights: Any, x: Tensor, rotation: Tensor, cache: Tensor, start: int) -> None:
    """Write the keys and values of all sublayers with attention for the same inputs.

    Args:
        weights, rotation, cache, start: as for ``decode_sublayers``; ``cache`` not in int8.
        x: (batch, nodes, features) float32, contiguous; norms of inputs are skipped.
    """
    cpu_library.functions().write_keys_values(_pass(weights, x, rotation, cache, start), kernel_threads())


def _pass(
    weights: Any, x: Tensor, rotation: Tensor, cache: Tensor | None, start: int, mask: Tensor | None = None
) -> TreePass:
    """Descriptor of a pass; arguments as for ``decode_sublayers``."""
    batch, nodes, features = x.shape
    task = TreePass(
        sublayers=ctypes.addressof(weights),
        count=len(weights),
        hidden=features // weights[0].parts,
        x=pointer(x, torch.float32, (batch, nodes, features)),
        rotation=pointer(rotation, torch.float32, (len(rotation), batch, nodes, 2, rotation.shape[-1])),
        attention=Attention(batch=batch, nodes=nodes),
    )
    if cache is not None:
        parts, rows, groups, slots, width = cache.shape
        head_dim = width - 4 * (cache.dtype is torch.uint8)
        _check_stored(cache, (parts, max(rows, batch), groups, max(slots, start + nodes)), head_dim)
        task.attention = _attention(nodes, start + nodes, head_dim, cache[:2, :batch], mask)
    return task


SCANS = MIXING.index("delta"), MIXING.index("mamba")
"""Kinds of sublayers with states besides those of convolutions."""


def recurrent_buffers(weights: Any, conv_state: Tensor, state: Tensor, nodes: int | None) -> Recurrent:
    """Descriptor of recurrent states, and of new buffers for a pass's records.

    Args:
        weights: result of ``sublayers``.
        conv_state: (rows, channels, width - 1) float32, inputs before the tree of all layers' convolutions; must
            outlive the result, like ``state``.
        state: (rows, units, heads, ...) float32, of these layers' scans and later ones; empty without scans.
        nodes: number of nodes of a tree; None for a prompt, which needs no records.
    """
    rows, channels, before = conv_state.shape
    scans = [part for part in weights if part.kind in SCANS]
    recorded = max((part.groups * part.key_dim + part.heads * (part.head_dim + 1) for part in scans), default=0)
    records = [] if nodes is None else [(rows, nodes, channels), (rows, nodes, len(scans), recorded)]
    inputs, record = [conv_state.new_empty(shape) for shape in records] or (None, None)
    shape = (rows, max(len(scans), state.shape[1]), *state.shape[2:]) if scans else tuple(state.shape)
    made = Recurrent(
        conv_state=pointer(conv_state, torch.float32, (rows, channels, before)),
        state=pointer(state, torch.float32, shape),
        inputs=None if inputs is None else inputs.data_ptr(),
        record=None if record is None else record.data_ptr(),
        channels=channels,
        width=before + 1,
        state_row=state.stride(0) if scans else 0,
        unit=state.stride(1) if scans else 0,
        recorded=recorded,
        units=len(scans),
        nodes=nodes or 0,
    )
    made.kept = conv_state, state, inputs, record
    return made


def advance_states(weights: Any, recurrent: Recurrent, path: Tensor) -> None:
    """Advance the states of all recurrent sublayers along a path.

    Args:
        weights, recurrent: arguments of the last ``decode_sublayers``.
        path: (batch, depth) int64, node indices from the root, right-padded with -1.
    """
    at = pointer(path, torch.int64, tuple(path.shape))
    cpu_library.functions().advance_states(weights, len(weights), recurrent, at, *path.shape, kernel_threads())


def greatest(x: Tensor, k: int, log_softmax: bool = False) -> tuple[Tensor, Tensor]:
    """Top-k values along the last axis, in descending order, and their indices; ties are ordered by index.

    Args:
        x: (..., count) float32.
        k: at most ``count``.
        log_softmax: return values of ``log_softmax(x)``.

    Returns:
        (..., k) float32 and int64.
    """
    x = x.contiguous()
    rows = x.numel() // x.shape[-1]
    best = x.new_empty(*x.shape[:-1], k)
    places = best.new_empty(best.shape, dtype=torch.int64)
    task = pointer(x, torch.float32, tuple(x.shape)), rows, x.shape[-1], k, log_softmax
    cpu_library.functions().greatest_of_rows(*task, best.data_ptr(), places.data_ptr(), kernel_threads())
    return best, places


def norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of (..., features) float32, contiguous, a multiple of 16 features; ``gain``: (features,) float32."""
    out, features = torch.empty_like(x), x.shape[-1]
    task = pointer(x, torch.float32, tuple(x.shape)), x.numel() // features, features
    gains = pointer(gain, torch.float32, (features,))
    cpu_library.functions().norm_rows(*task, gains, epsilon, out.data_ptr(), kernel_threads())
    return out


def quantile(scores: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling from ``softmax(scores)``.

    Args:
        scores: (..., count) float32.
        uniform: (...) float32 in [0, 1).

    Returns:
        (...) int64, never a token whose probability is 0 in float32.
    """
    scores, uniform = scores.contiguous(), uniform.contiguous()
    tokens = torch.empty(uniform.shape, dtype=torch.int64)
    cpu_library.functions().quantiles_of_rows(
        pointer(scores, torch.float32, (*uniform.shape, scores.shape[-1])),
        *(uniform.numel(), scores.shape[-1], pointer(uniform, torch.float32, tuple(uniform.shape))),
        *(tokens.data_ptr(), kernel_threads()),
    )
    return tokens


def cell_weights(layers: Sequence[Linear], table: Tensor, norm: Any) -> EagleCell:
    """Descriptor of a recurrent cell's weights, for ``draft_cells``; sizes must be multiples of 16.

    Args:
        layers: ``into``, ``out``, ``guess`` and ``head``, see ``draft_cells``.
        table: (tokens, into.outputs) float32, contiguous: each token's contribution to ``into``, including the bias.
        norm: a ``torch.nn.LayerNorm`` with float32 weights.
    """
    into, out, _, head = layers
    read = pointer(table, torch.float32, (max(len(table), head.outputs), into.outputs))
    affine = [pointer(part, torch.float32, (out.outputs,)) for part in (norm.weight, norm.bias)]
    return EagleCell(*layers, read, *affine, norm.eps)


def markov_weights(out: Linear, table: Tensor, draft_ids: Tensor | None) -> Markov:
    """Descriptor of a Markov head's weights, for ``draft_slots``.

    Args:
        out: layer from a token's embedding to the draft vocabulary.
        table: (tokens, out.inputs) float32, contiguous, embeddings; must outlive the result, like ``draft_ids``.
        draft_ids: (out.outputs,) int64, the target's tokens; None is the identity.
    """
    ids = None if draft_ids is None else pointer(draft_ids, torch.int64, (out.outputs,))
    return Markov(out, pointer(table, torch.float32, (len(table), out.inputs)), len(table), ids)


def draft_slots(weights: Markov, logits: Tensor, last: Tensor, width: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Grow trees of the most probable paths over slots, with logits corrected given the previous token.

    Args:
        weights: result of ``markov_weights``.
        logits: (batch, slots, draft tokens) float32, one slot per tree level.
        last: (batch,) int64, the roots.
        width: nodes extended per level, and children per node.
        nodes: maximum number of nodes, excluding the root.

    Returns:
        Tokens, parents and log probabilities as in ``TokenTree``, (batch, 1 + nodes or fewer), in descending order.
    """
    batch, slots, vocab = logits.shape
    width = min(width, nodes)
    k = min(width, vocab)
    nodes = 1 + min(nodes, _candidates(k, k, width, slots))
    tree = _tree(batch, nodes)
    logits, last = logits.contiguous(), last.contiguous()
    inputs = pointer(logits, torch.float32, (batch, slots, weights.out.outputs)), pointer(last, torch.int64, (batch,))
    cpu_library.functions().draft_slots(weights, *inputs, batch, slots, width, nodes, *map(Tensor.data_ptr, tree))
    return tree


def draft_cells(
    weights: EagleCell,
    carried: Tensor,
    first: tuple[Tensor, Tensor],
    last: Tensor,
    draft_ids: Tensor | None,
    width: int,
    levels: int,
    least_gain: float,
    nodes: int,
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Grow trees of the most probable paths with a recurrent cell.

    A token's state is ``norm(before + out(silu(table[token] + into(before))))``, where ``before`` is the state that
    predicted the token; the logits of its children are ``head(guess(state))``.

    Args:
        weights: result of ``cell_weights``.
        carried: (batch, hidden) float32, states that predicted the first level.
        first: the first level, tokens (batch, k) int64, rows of the table, and log probabilities, in descending order.
        last: (batch,) int64, the roots.
        draft_ids: (n,) int64, target token of each row of the table; None is the identity.
        width: nodes extended per level, and children per node.
        levels: maximum depth.
        least_gain: minimum gain of a level, see ``StepPlan.least_gain``.
        nodes: maximum number of nodes, excluding the root.

    Returns:
        Tokens, parents and log probabilities as in ``TokenTree``, (batch, 1 + nodes or fewer), in descending order; and
        the number of levels.
    """
    width, levels = min(width, nodes), min(levels, nodes)
    (batch, k), later = first[0].shape, min(width, weights.head.outputs)
    most = 1 + min(nodes, _candidates(k, later, width, levels))
    tree = _tree(batch, most)
    carried, tokens, scores, last = (x.contiguous() for x in (carried, *first, last))
    inputs = (
        pointer(carried, torch.float32, (batch, weights.out.outputs)),
        *(pointer(tokens, torch.int64, (batch, k)), pointer(scores, torch.float32, (batch, k))),
        pointer(last, torch.int64, (batch,)),
        None if draft_ids is None else pointer(draft_ids, torch.int64, (max(len(draft_ids), weights.head.outputs),)),
    )
    grown: int = cpu_library.functions().draft_cells(
        *(weights, *inputs, batch, k, width, levels, least_gain, most),
        *map(Tensor.data_ptr, tree),
        kernel_threads(),
    )
    if grown < levels:
        most = 1 + min(nodes, _candidates(k, later, width, grown))
        tree = tree[0][:, :most], tree[1][:, :most], tree[2][:, :most]
    return tree, grown


def _candidates(first: int, children: int, width: int, levels: int) -> int:
    """Number of candidates of a tree with ``first`` nodes in its first level and ``width`` extended nodes per level."""
    total = level = first
    for _ in range(levels - 1):
        level = min(width, level) * children
        total += level
    return total


def _tree(batch: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, parents = torch.empty(2, batch, nodes, dtype=torch.int64)
    return tokens, parents, torch.empty(batch, nodes, dtype=torch.float32)
