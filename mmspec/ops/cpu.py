"""CPU kernels in C++ (folder ``cpp``); see ``mmspec.ops.compiler``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.errors import UserError
from mmspec.ops import compiler

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 256)

_SOURCE = Path(__file__).with_name("cpp") / "kernels.cpp"
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
_AVX2_FLAGS = ["-mno-avx512f", "-fno-schedule-insns2", "-fno-tree-ter"]  # reordering makes GCC spill accumulators
_KINDS = ("int4", "int8", "bfloat16", "float32", "q5", "q4_k", "q5_k", "q6_k")  # ``Kind`` of ``cpp/products.h``


_NORMS = "attention", "mlp", "attention_after", "mlp_after", "head"


class _Linear(ctypes.Structure):
    kept: Any  # what its pointers lead to
    _fields_ = [
        ("blocks", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kind", "inputs", "outputs", "features")),
        ("rest", ctypes.c_void_p),
    ]


class _Layer(ctypes.Structure):
    kept: Any
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "read", "gate_up", "down")),
        *((f"{name}_norm", ctypes.c_void_p) for name in _NORMS),
        *((f"{name}_epsilon", ctypes.c_float) for name in ("attention", "mlp", "after", "head")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "gelu", "parts", "normed_residual")),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "mask", "read")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("batch", "nodes", "slots", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_node", "key_row", "key_head", "key_slot")),
        *((name, ctypes.c_int64) for name in ("mask_row", "mask_node")),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "start")),
        *((name, ctypes.c_void_p) for name in ("x", "rotation", "states", "middle", "cache")),
        ("cache_part", ctypes.c_int64),
        ("attention", _Attention),
    ]


class _Cell(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("into", "out", "guess", "head")),
        *((name, ctypes.c_void_p) for name in ("table", "norm", "norm_bias")),
        ("epsilon", ctypes.c_float),
    ]


class _Markov(ctypes.Structure):
    _fields_ = [
        ("out", _Linear),
        ("table", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("draft_ids", ctypes.c_void_p),
    ]


def available() -> bool:
    """Whether the kernels run here: with AVX2, a C++ compiler, and ``auto`` as ``MMSPEC_KERNELS``."""
    return os.environ.get("MMSPEC_KERNELS", "auto") == "auto" and isinstance(_library(), ctypes.CDLL)


def in_use(x: Tensor) -> bool:
    """Whether the kernels take a tensor and are loaded: what needs no packed weights does not wait for a compiler."""
    loaded = _library.cache_info().currsize > 0 and available()
    return loaded and x.device.type == "cpu" and x.dtype == torch.float32


def problem() -> str | None:
    """Why the kernels cannot be compiled or loaded here; None if they can."""
    library = _library()
    return library if isinstance(library, str) else None


def linear_weights(kind: str, blocks: Tensor, bias: Tensor | None, inputs: int, outputs: int) -> _Linear:
    """A linear layer's weights for the kernels.

    Args:
        kind: ``"int4"``, ``"int8"``, ``"bfloat16"``, ``"float32"``, ``"q5"``, ``"q4_k"``, ``"q5_k"`` or ``"q6_k"``.
        blocks: uint8, in the layout of ``cpp/products.h``; must outlive the result, as must ``bias``.
        bias: (outputs,) float32.
    """
    sizes = _KINDS.index(kind), inputs, outputs, outputs
    return _Linear(blocks.data_ptr(), None if bias is None else bias.data_ptr(), *sizes)


def joined_weights(parts: Sequence[_Linear]) -> _Linear:
    """A linear layer with the outputs of several, one after the other, whose weights are quantised.

    Args:
        parts: of ``linear_weights``, with the same inputs.
    """
    outputs, rest = sum(part.outputs for part in parts), None
    for part in reversed(parts):
        at = None if rest is None else ctypes.addressof(rest)
        joined = _Linear(part.blocks, part.bias, part.kind, part.inputs, outputs, part.outputs, at)
        joined.kept, rest = rest, joined
    assert rest is not None
    return rest


def layer_weights(
    linears: Sequence[_Linear],
    norms: Mapping[str, tuple[Tensor, float]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    gelu: bool = False,
    parts: int = 1,
    normed_residual: bool = False,
) -> _Layer:
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
    gains = [norms[name][0].data_ptr() if name in norms else None for name in _NORMS]
    named = ("attention", "mlp", "attention_after", "head")
    epsilons = [norms[name][1] if name in norms else 0.0 for name in named]
    layer = _Layer(*linears, *gains, *epsilons, heads, kv_heads, head_dim, gelu, parts, normed_residual)
    layer.kept = linears
    return layer


def linear(weights: _Linear, x: Tensor) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: (..., inputs) float32. For quantised weights it is quantised to int8, per row and group of 32 features.

    Raises:
        RuntimeError: other inputs, as torch's product does.
    """
    if x.shape[-1] != weights.inputs:
        raise RuntimeError(f"x must have {weights.inputs} features: got {x.shape[-1]}")
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], weights.outputs)
    rows = x.numel() // weights.inputs
    _functions().linear(weights, x.data_ptr(), rows, out.data_ptr(), torch.get_num_threads())
    return out


def attention_inputs(weights: _Layer, x: Tensor, rotation: Tensor) -> Tensor:
    """RMSNorm, then queries, keys and values, of which queries and keys are normalised, if they are, and rotated.

    Args:
        x: (batch, nodes, hidden) float32, contiguous.
        rotation: (batch, nodes, head_dim / 2) complex64, contiguous, for pairs of neighbouring features.

    Returns:
        (batch, nodes, heads + 2 * kv_heads, head_dim).
    """
    batch, nodes, _ = x.shape
    out = x.new_empty(batch, nodes, weights.heads + 2 * weights.kv_heads, weights.head_dim)
    _functions().attention_inputs(
        weights, x.data_ptr(), rotation.data_ptr(), batch * nodes, out.data_ptr(), torch.get_num_threads()
    )
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
    _, kv_heads, slots, _ = key.shape
    out = query.new_empty(batch, nodes, heads * head_dim)
    masked = (None, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0), mask.stride(2))
    task = _Attention(
        *(query.data_ptr(), key.data_ptr(), value.data_ptr(), masked[0], out.data_ptr(), scale),
        *(batch, nodes, slots, heads, kv_heads, head_dim),
        *(query.stride(0), query.stride(1), key.stride(0), key.stride(1), key.stride(2), *masked[1:]),
    )
    _functions().attention(task, torch.get_num_threads())
    return out


def layer_outputs(weights: _Layer, read: Tensor, x: Tensor) -> Tensor:
    """A decoder layer from its attention on: output projection, gated MLP and both residuals.

    Args:
        read: (batch, nodes, heads * head_dim) float32, contiguous: what attention read.
        x: (batch, nodes, hidden) float32, contiguous: the layer's input.
    """
    out = torch.empty_like(x)
    rows = x.shape[0] * x.shape[1]
    _functions().layer_outputs(
        weights, read.data_ptr(), x.data_ptr(), rows, out.data_ptr(), None, torch.get_num_threads()
    )
    return out


def decoder_weights(layers: Sequence[_Layer]) -> Any:
    """The weights of a decoder's layers, for ``decode``."""
    return (_Layer * len(layers))(*layers)


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
        cache: (2 * layers, rows, kv_heads, slots, head_dim) bfloat16, contiguous: keys and values by layer. Those of
            the nodes are written to the slots from ``start`` on of the first rows.
        middle: (batch, nodes, hidden) float32; is set to the last layer's residual before its MLP.

    Returns:
        (layers, batch, nodes, hidden), each layer's output.
    """
    batch, nodes, _ = x.shape
    hidden = weights[0].read.outputs
    states = x.new_empty(len(weights), batch, nodes, hidden)
    work = _pass(weights, x, rotation, cache, start)
    work.hidden, work.states, work.attention.scale = hidden, states.data_ptr(), scale
    work.middle = None if middle is None else middle.data_ptr()
    if mask is not None:
        attention = work.attention
        attention.mask, attention.mask_row, attention.mask_node = mask.data_ptr(), mask.stride(0), mask.stride(2)
    _functions().decode(work, torch.get_num_threads())
    return states


def write_keys_values(weights: Any, x: Tensor, rotation: Tensor, cache: Tensor, start: int) -> None:
    """Write the keys and values that all layers have of the same states.

    Args:
        weights, rotation, cache, start: as for ``decode``.
        x: (batch, nodes, hidden) float32, contiguous, which the norms before attention do not change.
    """
    _functions().write_keys_values(_pass(weights, x, rotation, cache, start), torch.get_num_threads())


def _pass(weights: Any, x: Tensor, rotation: Tensor, cache: Tensor, start: int) -> _Pass:
    """A pass that writes keys and values to a cache; arguments as for ``decode``."""
    batch, nodes, _ = x.shape
    layer = weights[0]
    attention = _Attention(
        *(None,) * 5,
        *(0.0, batch, nodes, start + nodes, layer.heads, layer.kv_heads, layer.head_dim),
        *(0, 0, *cache.stride()[1:4], 0, 0),
    )
    pointers = x.data_ptr(), rotation.data_ptr(), None, None, cache.data_ptr()
    return _Pass(ctypes.addressof(weights), len(weights), 0, start, *pointers, cache.stride(0), attention)


def cell_weights(layers: Sequence[_Linear], table: Tensor, norm: Any) -> _Cell:
    """The weights of a recurrent cell, for ``draft_level``; sizes of states and of what ``into`` returns are multiples
    of 16.

    Args:
        layers: ``into``, ``out``, ``guess`` and ``head``, see ``draft_level``.
        table: (tokens, into.outputs) float32, contiguous: what ``into`` adds for each token, its bias included.
        norm: a ``torch.nn.LayerNorm`` with float32 weights.
    """
    pointers = table.data_ptr(), norm.weight.data_ptr(), norm.bias.data_ptr()
    return _Cell(*layers, *pointers, norm.eps)


def draft_level(
    weights: _Cell, carried: Tensor, origin: Tensor, tokens: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A level of a draft tree: ``carried <- norm(carried + out(silu(table[token] + into(carried))))``, and the best
    tokens by ``head(guess(carried))``.

    Args:
        weights: of ``cell_weights``.
        carried: (batch, entries, hidden) float32, contiguous: the states of the level before.
        origin: (batch, beam) int64, the entry that each token was drafted from.
        tokens: (batch, beam) int64, rows of the table.
        k: children per token, at most the head's outputs.

    Returns:
        New states (batch, beam, hidden), guesses (batch, beam, guess.outputs), children's tokens and log probabilities
        (batch, beam, k) in descending order.
    """
    (batch, entries, hidden), beam = carried.shape, origin.shape[1]
    state = carried.new_empty(batch, beam, hidden)
    guesses = carried.new_empty(batch, beam, weights.guess.outputs)
    best = carried.new_empty(batch, beam, k)
    children = torch.empty(batch, beam, k, dtype=torch.int64)
    origin, tokens = origin.contiguous(), tokens.contiguous()
    _functions().draft_level(
        *(weights, carried.data_ptr(), entries, origin.data_ptr(), tokens.data_ptr(), batch * beam, beam, k),
        *(state.data_ptr(), guesses.data_ptr(), best.data_ptr(), children.data_ptr()),
        torch.get_num_threads(),
    )
    return state, guesses, children, best


def markov_weights(out: _Linear, table: Tensor, draft_ids: Tensor | None) -> _Markov:
    """The weights of a Markov head, for ``draft_slots``.

    Args:
        out: from a token's embedding to the draft vocabulary.
        table: (tokens, out.inputs) float32, contiguous, the embeddings; must outlive the result, as must ``draft_ids``.
        draft_ids: (out.outputs,) int64, the target's tokens; None is the identity.
    """
    return _Markov(out, table.data_ptr(), len(table), None if draft_ids is None else draft_ids.data_ptr())


def draft_slots(
    weights: _Markov, logits: Tensor, last: Tensor, width: int, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
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
    k = min(width, vocab)
    beams = [1]
    for _ in range(slots - 1):
        beams.append(min(width, beams[-1] * k))
    nodes = 1 + min(nodes, sum(beams) * k)
    tokens, parents = (torch.empty(batch, nodes, dtype=torch.int64) for _ in range(2))
    log_probs = logits.new_empty(batch, nodes)
    pointers = tokens.data_ptr(), parents.data_ptr(), log_probs.data_ptr()
    logits, last = logits.contiguous(), last.contiguous()
    _functions().draft_slots(weights, logits.data_ptr(), last.data_ptr(), batch, slots, width, nodes, *pointers)
    return tokens, parents, log_probs


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
    pointers = best.data_ptr(), places.data_ptr()
    _functions().greatest_of_rows(x.data_ptr(), rows, x.shape[-1], k, log_softmax, *pointers, torch.get_num_threads())
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
    pointers = uniform.data_ptr(), tokens.data_ptr()
    _functions().quantiles_of_rows(
        scores.data_ptr(), uniform.numel(), scores.shape[-1], *pointers, torch.get_num_threads()
    )
    return tokens


def _functions() -> Any:
    library = _library()
    if isinstance(library, str):  # weights that another machine has packed
        raise UserError(f"weights packed for the C++ kernels need them, load the model here: {library}")
    return library


@cache
def _library() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none."""
    if not _has_instructions():
        return "expected a processor with AVX2"
    try:
        library = compiler.load(_SOURCE, _flags())
    except compiler.CompilerError as error:
        return str(error)
    pointer, count, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    address = ctypes.POINTER
    library.linear.argtypes = [address(_Linear), pointer, count, pointer, threads]
    library.attention_inputs.argtypes = [address(_Layer), pointer, pointer, count, pointer, threads]
    library.attention.argtypes = [address(_Attention), threads]
    library.layer_outputs.argtypes = [address(_Layer), pointer, pointer, count, pointer, pointer, threads]
    library.decode.argtypes = library.write_keys_values.argtypes = [address(_Pass), threads]
    library.greatest_of_rows.argtypes = [pointer, count, count, count, threads, pointer, pointer, threads]
    library.quantiles_of_rows.argtypes = [pointer, count, count, pointer, pointer, threads]
    counts, outputs = [count] * 3, [pointer] * 4
    library.draft_level.argtypes = [address(_Cell), pointer, count, pointer, pointer, *counts, *outputs, threads]
    library.draft_slots.argtypes = [address(_Markov), pointer, pointer, *[count] * 4, *[pointer] * 3]
    functions = "linear", "attention_inputs", "layer_outputs", "decode", "write_keys_values", "attention"
    for name in (*functions, "greatest_of_rows", "quantiles_of_rows", "draft_level", "draft_slots"):
        getattr(library, name).restype = None
    return library


def _has_instructions() -> bool:
    """Without them torch's kernels are faster."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _flags() -> list[str]:
    """Compiler flags. Without VNNI, vectors of 256 bits are as fast as those of 512."""
    vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
    return _FLAGS if vnni else [*_FLAGS, *_AVX2_FLAGS]
