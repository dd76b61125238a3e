"""CPU kernels in C++ (folder ``cpp``), compiled at first use: of decoder layers, of logits, and of drafting, which
grow a tree in one call; their numbers of threads, and memory of huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor

from mmspec.ops import cpu_library
from mmspec.ops.cpu_library import FORMATS, KINDS, NORMS, Attention, EagleCell, Layer, Linear, Markov, Packing, Pass

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 256)

LANES = 16
"""Output features of a block of weights."""

PAGE = 2 << 20
"""Bytes of a huge page."""

MOVER = "huge pages"
"""Name of the threads of ``use_huge_pages``."""

_REST = 4.0  # of the time that moving a page takes
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1, which Python has no name for

_LOCAL = threading.local()  # ``kernels``: threads of kernels that this thread calls


def zeros(count: int) -> Tensor:
    """``count`` zeros, (count,) uint8, from the start of a huge page on; see ``use_huge_pages``."""
    pages = mmap.mmap(-1, count + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:count]


def use_huge_pages(memory: Tensor) -> threading.Thread | None:
    """Move memory of ``zeros`` that is written to huge pages, where the system has them, in a thread of its own.

    With pages of 4 KiB, address translation may take as long as reading the memory in order. Where a system has to find
    memory for huge pages first (a virtual machine does at their first use), writing to them would take longer than all
    else in the loading of a model. The thread rests most of the time: passes wait for a page that is being moved.
    """
    starts = range(memory.data_ptr(), memory.data_ptr() + len(memory) - PAGE + 1, PAGE)
    if not hasattr(mmap, "MADV_HUGEPAGE") or not starts:
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    advise(starts[0], len(starts) * PAGE, mmap.MADV_HUGEPAGE)  # for systems that do so by and by, alone

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
    """Let the allocator (glibc's) give large tensors back to the system as soon as they are freed.

    By default it keeps them, in an arena for each thread. Settings of the environment are left as they are.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for name, number, value in _MALLOPT:
            if f"MALLOC_{name}" not in os.environ and f"MALLOC_{name}_" not in os.environ:
                mallopt(number, value)


def trim() -> None:
    """Give memory that was freed back to the system, where its allocator (glibc's) can."""
    if trimmed := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trimmed(0)


def kernel_threads() -> int:
    """Threads of a C++ kernel: torch's, without the limit of ``limit_torch``, as the kernels wait for no thread that
    the system does not run (``cpp/pool.h``)."""
    return getattr(_LOCAL, "kernels", None) or torch.get_num_threads()


def limit_torch(count: int, kernels: int) -> bool:
    """Set torch's number of threads in the calling thread alone; returns False where torch's OpenMP cannot do that.

    Args:
        count: threads of torch; ``torch.get_num_threads()`` returns it, in this thread.
        kernels: threads of the C++ kernels.
    """
    library = _openmp()
    if library is None:
        return False
    torch.get_num_threads()  # in a new thread, the first call would undo the limit
    library.omp_set_num_threads(count)
    if hasattr(library, "MKL_Set_Num_Threads_Local"):
        library.MKL_Set_Num_Threads_Local(count)
    _LOCAL.kernels = kernels
    return True


@cache
def _openmp() -> Any:
    """The library that torch computes with, if its OpenMP is linked to it."""
    library = ctypes.CDLL(torch._C.__file__)
    return library if hasattr(library, "omp_set_num_threads") else None


def pointer(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], packed: int | None = None) -> int:
    """The address of a tensor for a kernel, which reads or writes this dtype and shape.

    Args:
        packed: number of last axes that are contiguous; None is all.

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
    """Bytes of a row in a format of GGUF."""
    return int(cpu_library.functions().bytes_of_row(list(FORMATS).index(form), features))


def bytes_of_blocks(kind: str, inputs: int, outputs: int) -> int:
    """Bytes of a linear layer's ``blocks``, see ``linear_weights``."""
    return int(cpu_library.functions().bytes_of_blocks(KINDS.index(kind), inputs, outputs))


def _blocks(blocks: Tensor, kind: str, inputs: int, outputs: int) -> int:
    return pointer(blocks, torch.uint8, (-(-outputs // LANES), bytes_of_blocks(kind, inputs, LANES)))


def pack_rows(packings: Sequence[tuple[str, Tensor, int, int, Tensor]], threads: int) -> int:
    """Write rows in formats of GGUF to the blocks of layers, one layer after the other.

    Args:
        packings: format; places of the rows, (rows,) int64, in a file, or addresses; features of a row; the file's
            descriptor, or -1; a layer's ``blocks``.

    Returns:
        How many are done; fewer than all where a file has not all rows of the next; -1 less that number where the next
        contains scales that are not finite.
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


def dense_rows(form: str, places: Tensor, features: int, file: int) -> Tensor | None:
    """Rows in a format of GGUF as (rows, features of whole groups) float32; None where the file has not all of them.

    Args:
        form, places, features, file: as in ``pack_rows``.
    """
    out = torch.empty(len(places), -(-features // 32) * 32, dtype=torch.float32)
    rows = pointer(places, torch.int64, (len(places),)), len(places), features, file
    to = pointer(out, torch.float32, tuple(out.shape)), kernel_threads()
    return out if cpu_library.functions().dense_rows(list(FORMATS).index(form), *rows, *to) else None


def linear_weights(kind: str, blocks: Tensor, bias: Tensor | None, inputs: int, outputs: int) -> Linear:
    """A linear layer's weights for the kernels.

    Args:
        kind: ``"int4"``, ``"int8"``, ``"bfloat16"``, ``"float32"``, ``"q5"``, ``"q4_k"``, ``"q5_k"`` or ``"q6_k"``.
        blocks: uint8, in the layout of ``cpp/formats.h``; must outlive the result, as must ``bias``.
        bias: (outputs,) float32.
    """
    sizes = KINDS.index(kind), inputs, outputs, outputs
    added = None if bias is None else pointer(bias, torch.float32, (outputs,))
    return Linear(_blocks(blocks, kind, inputs, outputs), added, *sizes)


def joined_weights(parts: Sequence[Linear]) -> Linear:
    """A linear layer with the outputs of several, one after the other, whose weights are quantised.

    Args:
        parts: of ``linear_weights``, with the same inputs.
    """
    outputs, rest = sum(part.outputs for part in parts), None
    for part in reversed(parts):
        at = None if rest is None else ctypes.addressof(rest)
        joined = Linear(part.blocks, part.bias, part.kind, part.inputs, outputs, part.outputs, at)
        joined.kept, rest = rest, joined
    assert rest is not None
    return rest


def layer_weights(
    linears: Sequence[Linear],
    norms: Mapping[str, tuple[Tensor, float]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    gelu: bool = False,
    parts: int = 1,
    normed_residual: bool = False,
) -> Layer:
    """A pre-norm decoder layer's weights for the kernels.

    Args:
        linears: queries, keys and values; attention's output; gate and up; down.
        norms: gains float32, which must outlive the result, and epsilon of the RMSNorms before ``attention``,
            (parts * hidden,), and ``mlp``, (hidden,); of those after these, ``attention_after`` and ``mlp_after``, with
            one epsilon; and of ``head``, of the heads of queries and keys, (heads + kv_heads, head_dim). All but
            ``mlp`` may be missing.
        gelu: the MLP's gate is gelu (by tanh), not silu.
        parts: into which the inputs are divided, each normed by itself; the last one is the residual.
        normed_residual: whether the residual is taken after its norm.
    """
    qkv, read, gate_up, _ = linears
    shapes: list[tuple[int, ...]] = [(qkv.inputs,), (gate_up.inputs,), (read.outputs,), (read.outputs,)]
    shapes.append((heads + kv_heads, head_dim))
    gains = [
        pointer(norms[name][0], torch.float32, shape) if name in norms else None
        for name, shape in zip(NORMS, shapes, strict=True)
    ]
    named = ("attention", "mlp", "attention_after", "head")
    epsilons = [norms[name][1] if name in norms else 0.0 for name in named]
    layer = Layer(*linears, *gains, *epsilons, heads, kv_heads, head_dim, gelu, parts, normed_residual)
    layer.kept = linears
    return layer


def linear(weights: Linear, x: Tensor) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: (..., inputs) float32. For quantised weights it is quantised to int8, per row and group of 32 features.

    Raises:
        RuntimeError: other inputs, as torch's product does.
    """
    x = x.contiguous()
    inputs = pointer(x, torch.float32, (*x.shape[:-1], weights.inputs))
    out = x.new_empty(*x.shape[:-1], weights.outputs)
    rows = x.numel() // weights.inputs
    cpu_library.functions().linear(weights, inputs, rows, out.data_ptr(), kernel_threads())
    return out


def attention_inputs(weights: Layer, x: Tensor, rotation: Tensor) -> Tensor:
    """RMSNorm, then queries, keys and values, of which queries and keys are normalised, if they are, and rotated.

    Args:
        x: (batch, nodes, hidden) float32, contiguous.
        rotation: (batch, nodes, 1, head_dim / 2) complex64, contiguous, for pairs of neighbouring features.

    Returns:
        (batch, nodes, heads + 2 * kv_heads, head_dim).
    """
    batch, nodes, _ = x.shape
    out = x.new_empty(batch, nodes, weights.heads + 2 * weights.kv_heads, weights.head_dim)
    inputs = pointer(x, torch.float32, (batch, nodes, weights.qkv.inputs))
    turns = pointer(rotation, torch.complex64, (batch, nodes, 1, weights.head_dim // 2))
    cpu_library.functions().attention_inputs(weights, inputs, turns, batch * nodes, out.data_ptr(), kernel_threads())
    return out


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention whose result does not depend on where the attended slots lie.

    Queries and softmax weights are rounded to bfloat16, in which keys and values are; sums are float32.

    Args:
        query: (batch, nodes, heads, head_dim) float32, heads of a node contiguous; ``head_dim`` in ``HEAD_DIMS``.
        key, value: (batch, kv_heads, slots, head_dim) bfloat16 with equal strides, slots contiguous.
        mask: (batch, 1, nodes, slots) bool, slots contiguous; None is causal, the last slots being those of the nodes.

    Returns:
        (batch, nodes, heads * head_dim).
    """
    batch, nodes, heads, head_dim = query.shape
    _, kv_heads, slots, _ = shape = key.shape
    out = query.new_empty(batch, nodes, heads * head_dim)
    task = _attention(batch, nodes, slots, heads, kv_heads, head_dim, key.stride(), mask, scale)
    task.query, task.read = pointer(query, torch.float32, tuple(query.shape), 2), out.data_ptr()
    task.key, task.value = (pointer(part, torch.bfloat16, (batch, *shape[1:3], head_dim), 1) for part in (key, value))
    if key.stride() != value.stride():
        raise RuntimeError(f"keys and values must have equal strides: got {key.stride()} and {value.stride()}")
    task.query_row, task.query_node, *_ = query.stride()
    cpu_library.functions().attention(task, kernel_threads())
    return out


def _attention(
    batch: int,
    nodes: int,
    slots: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    strides: Sequence[int],
    mask: Tensor | None,
    scale: float,
) -> Attention:
    """Shapes, mask and scale of an attention; ``strides`` are those of (batch, kv_heads, slots, head_dim) keys."""
    row, head, slot, _ = strides
    masked = {}
    if mask is not None:
        allowed = pointer(mask, torch.bool, (batch, 1, nodes, slots), 1)
        masked = {"mask": allowed, "mask_row": mask.stride(0), "mask_node": mask.stride(2)}
    return Attention(
        batch=batch,
        nodes=nodes,
        slots=slots,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        key_row=row,
        key_head=head,
        key_slot=slot,
        scale=scale,
        **masked,
    )


def layer_outputs(weights: Layer, read: Tensor, x: Tensor) -> Tensor:
    """A decoder layer from its attention on: output projection, gated MLP and both residuals.

    Args:
        read: (batch, nodes, heads * head_dim) float32, contiguous: what attention read.
        x: (batch, nodes, hidden) float32, contiguous: the layer's input.
    """
    (batch, nodes, _), out = x.shape, torch.empty_like(x)
    attended = pointer(read, torch.float32, (batch, nodes, weights.read.inputs))
    residual = pointer(x, torch.float32, (batch, nodes, weights.read.outputs))
    cpu_library.functions().layer_outputs(
        weights, attended, residual, batch * nodes, out.data_ptr(), None, kernel_threads()
    )
    return out


def decoder_weights(layers: Sequence[Layer]) -> Any:
    """The weights of a decoder's layers, for ``decode``."""
    return (Layer * len(layers))(*layers)


def decode(
    weights: Any,
    x: Tensor,
    rotation: Tensor,
    mask: Tensor | None,
    scale: float,
    cache: Tensor,
    start: int,
    middle: Tensor | None = None,
) -> Tensor:
    """All layers of a decoder.

    Args:
        weights: of ``decoder_weights``.
        x: (batch, nodes, parts * hidden) float32, contiguous.
        rotation: as of ``attention_inputs``.
        mask: (batch, 1, nodes, slots) as of ``attention``, slots up to the last that is written.
        cache: (2 * layers, rows, kv_heads, slots, head_dim) bfloat16, the last axis contiguous: keys and values by
            layer. Those of the nodes are written to the slots from ``start`` on of the first rows.
        middle: (batch, nodes, hidden) float32; is set to the last layer's residual before its MLP.

    Returns:
        (layers, batch, nodes, hidden), each layer's output.
    """
    batch, nodes, _ = x.shape
    hidden = weights[0].read.outputs
    states = x.new_empty(len(weights), batch, nodes, hidden)
    work = _pass(weights, x, rotation, cache, start, mask, scale)
    work.hidden, work.states = hidden, states.data_ptr()
    work.middle = None if middle is None else pointer(middle, torch.float32, (batch, nodes, hidden))
    cpu_library.functions().decode(work, kernel_threads())
    return states


def write_keys_values(weights: Any, x: Tensor, rotation: Tensor, cache: Tensor, start: int) -> None:
    """Write the keys and values that all layers have of the same states.

    Args:
        weights, rotation, cache, start: as for ``decode``.
        x: (batch, nodes, hidden) float32, contiguous, which the norms before attention do not change.
    """
    cpu_library.functions().write_keys_values(_pass(weights, x, rotation, cache, start), kernel_threads())


def _pass(
    weights: Any, x: Tensor, rotation: Tensor, cache: Tensor, start: int, mask: Tensor | None = None, scale: float = 0.0
) -> Pass:
    """A pass that writes keys and values to a cache; arguments as for ``decode``."""
    (batch, nodes, _), layer = x.shape, weights[0]
    heads = layer.heads, layer.kv_heads, layer.head_dim
    rows, slots = max(batch, cache.shape[1]), max(start + nodes, cache.shape[3])  # at least those
    return Pass(
        layers=ctypes.addressof(weights),
        count=len(weights),
        start=start,
        x=pointer(x, torch.float32, (batch, nodes, layer.qkv.inputs)),
        rotation=pointer(rotation, torch.complex64, (batch, nodes, 1, layer.head_dim // 2)),
        cache=pointer(cache, torch.bfloat16, (2 * len(weights), rows, layer.kv_heads, slots, layer.head_dim), 1),
        cache_part=cache.stride(0),
        attention=_attention(batch, nodes, start + nodes, *heads, cache.stride()[1:], mask, scale),
    )


def greatest(x: Tensor, k: int, log_softmax: bool = False) -> tuple[Tensor, Tensor]:
    """The greatest values along the last axis in descending order, equal ones by index, and their indices.

    Args:
        x: (..., count) float32.
        k: at most ``count``.
        log_softmax: return those of ``log_softmax(x)``.

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
    """The weights of a recurrent cell, for ``draft_cells``; sizes of states and of what ``into`` returns are multiples
    of 16.

    Args:
        layers: ``into``, ``out``, ``guess`` and ``head``, see ``draft_cells``.
        table: (tokens, into.outputs) float32, contiguous: what ``into`` adds for each token, its bias included.
        norm: a ``torch.nn.LayerNorm`` with float32 weights.
    """
    into, out, _, head = layers
    read = pointer(table, torch.float32, (max(len(table), head.outputs), into.outputs))
    affine = [pointer(part, torch.float32, (out.outputs,)) for part in (norm.weight, norm.bias)]
    return EagleCell(*layers, read, *affine, norm.eps)


def markov_weights(out: Linear, table: Tensor, draft_ids: Tensor | None) -> Markov:
    """The weights of a Markov head, for ``draft_slots``.

    Args:
        out: from a token's embedding to the draft vocabulary.
        table: (tokens, out.inputs) float32, contiguous, the embeddings; must outlive the result, as must ``draft_ids``.
        draft_ids: (out.outputs,) int64, the target's tokens; None is the identity.
    """
    ids = None if draft_ids is None else pointer(draft_ids, torch.int64, (out.outputs,))
    return Markov(out, pointer(table, torch.float32, (len(table), out.inputs)), len(table), ids)


def draft_slots(weights: Markov, logits: Tensor, last: Tensor, width: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The trees of the most probable paths over slots whose logits the token before corrects.

    Args:
        weights: of ``markov_weights``.
        logits: (batch, slots, draft tokens) float32, of a level of the tree each.
        last: (batch,) int64, the target's tokens before.
        width: nodes extended per level, and children per node.
        nodes: maximum number of nodes besides the root.

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
    cpu_library.functions().draft_slots(weights, *inputs, batch, slots, width, nodes, *_pointers(tree))
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
    """The trees of the most probable paths by a recurrent cell.

    A token's state is ``norm(before + out(silu(table[token] + into(before))))``, ``before`` being the state that it was
    drafted from; its children's logits are ``head(guess(state))``.

    Args:
        weights: of ``cell_weights``.
        carried: (batch, hidden) float32, the states that the first level is drafted from.
        first: the first level, tokens (batch, k) int64, rows of the table, and log probabilities, in descending order.
        last: (batch,) int64, the roots.
        draft_ids: (n,) int64, the target's token of each row of the table; None is the identity.
        width: nodes extended per level, and children per node.
        levels: maximum depth.
        least_gain: of a level, see ``Budget.least_gain``.
        nodes: maximum number of nodes besides the root.

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
        *(*_pointers(tree), kernel_threads()),
    )
    if grown < levels:
        most = 1 + min(nodes, _candidates(k, later, width, grown))
        tree = tree[0][:, :most], tree[1][:, :most], tree[2][:, :most]
    return tree, grown


def _candidates(first: int, children: int, width: int, levels: int) -> int:
    """Candidates of a tree whose first level has ``first`` nodes, and whose levels extend ``width`` nodes each."""
    total = level = first
    for _ in range(levels - 1):
        level = min(width, level) * children
        total += level
    return total


def _tree(batch: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, parents = torch.empty(2, batch, nodes, dtype=torch.int64)
    return tokens, parents, torch.empty(batch, nodes, dtype=torch.float32)


def _pointers(tree: tuple[Tensor, Tensor, Tensor]) -> list[int]:
    return [x.data_ptr() for x in tree]
