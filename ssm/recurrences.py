"""Recurrences of mixers on a tree, one class per kind of recurrent layer.

Most mixers convolve their inputs (``mmspec.ssm.ops.tree_conv``) and pass the result to a module-level function of their
modelling file, the scan. ``StateCache`` owns the states and the convolution; a ``Recurrence`` computes the scan over a
tree and advances the states along a path.

Adapters replace methods of modules whose recurrence is not a function in their modelling file. An adapter computes a
mixer from its sub-modules. States are always in the cache, even in prefill: such mixers otherwise keep them in the
module or in a cache of their own class.

Some modules other than attention also read more than their own token. Modules that read the last few tokens, but are
not depthwise convolutions, get each node's window as a sequence; modules that read positions, assumed equal for all
rows, are called row by row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.ssm import ops
from mmspec.ssm.ops import DepthIndex

Adapter = Callable[..., Any]
"""Replaces a method of a mixer: takes the ``StateCache``, transformers' own method, and its arguments."""

Functions = Mapping[str, tuple[str | Adapter, tuple[str, ...]]]
"""Functions of a modelling file or methods of its classes, with the ``StateCache`` method or adapter that replaces
each, and its required parameters."""

CONVOLUTION: Functions = {"causal_conv1d_fn": ("conv", ("hidden_states", "weight", "bias", "activation"))}


class Recurrence:
    """The scan of one kind of layer over a tree. One object serves one ``StateCache`` with this number of layers."""

    name: ClassVar[str]
    functions: ClassVar[Functions]

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def read(self, place: int, state: Tensor, tree: DepthIndex, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The replaced function's first result, at every node, and gates, (batch, nodes, gates): per-node values that a
        commit requires, other than convolution inputs. ``state``: (batch, heads, ...) float32, not modified."""
        raise NotImplementedError

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        """Advance the states of the layers ``part``, (batch, layers * heads, ...) float32, contiguous, along a path, in
        place. At its nodes, ``channels`` are the convolution's outputs, (batch, depth, layers, channels), if the layer
        has a convolution; gates are (batch, depth, layers, gates). ``path``: (batch, depth) int64, 0 to depth - 1,
        right-padded with -1."""
        raise NotImplementedError


class Mamba2(Recurrence):
    """Mamba-2's selective scan. State: (heads, head_dim, state); gates: step sizes, (heads,)."""

    name: ClassVar[str] = "Mamba-2"
    functions: ClassVar[Functions] = {
        **CONVOLUTION,
        "mamba2_chunk_scan": ("scan", ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus")),
    }

    def __init__(self, layers: int) -> None:
        self._a: list[Any] = [None] * layers  # (heads,), valid during the pass
        self._stored_a: Tensor | None = None  # (layers, heads), copy for the commit

    def read(self, place: int, state: Tensor, tree: DepthIndex, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Does not clamp step sizes to ``dt_limit``: transformers clamps in prefill, but not in decoding."""
        x, dt, a, b, c = inputs
        self._a[place] = a.detach()
        if place == len(self._a) - 1:
            self._stored_a = torch.stack(self._a, out=self._stored_a)
        dt = _step_sizes(dt, options.get("dt_bias"), options.get("dt_softplus", False))
        return ops.tree_scan(x, dt, a, b, c, options.get("D"), state, tree.ancestors).contiguous(), dt

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        assert self._stored_a is not None
        (batch, depth), (head_dim, size) = path.shape, state.shape[2:]
        inner = gates.shape[3] * head_dim
        x, b, _ = channels.split([inner, *[(channels.shape[3] - inner) // 2] * 2], dim=-1)
        x, b = x.reshape(batch, depth, -1, head_dim), b.reshape(batch, depth, -1, size)
        ops.commit_scan(x, gates.flatten(2), self._stored_a[part].flatten(), b, state, path)


class Mamba1(Recurrence):
    """Mamba-1's selective scan, with its gate. State: (channels, state); gates: step sizes and B, (channels + state,),
    which projections (and norms in Falcon-Mamba and Jamba) of the mixer compute from the convolution's output."""

    name: ClassVar[str] = "Mamba"
    functions: ClassVar[Functions] = {
        **CONVOLUTION,
        "mamba_selective_scan": (
            "scan",
            (*("hidden_states", "dt", "A", "B", "C", "D", "z"), "delta_bias", "delta_softplus", "return_last_state"),
        ),
    }

    _a: Tensor | None = None  # (layers, channels, state), copy for the commit

    def read(self, place: int, state: Tensor, tree: DepthIndex, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Inputs and output have shape (batch, channels or state, nodes)."""
        a = inputs[2]
        if self._a is None:
            self._a = a.new_empty(self._layers, *a.shape)
        self._a[place] = a.detach()
        x, dt, b, c = (t.transpose(1, 2) for t in (*inputs[:2], *inputs[3:]))
        dt = _step_sizes(dt, options["delta_bias"], options["delta_softplus"])
        y = ops.tree_selective(x, dt, a, b.unsqueeze(2), c.unsqueeze(2), options["D"], state, tree)
        if (z := options["z"]) is not None:
            y *= torch.nn.functional.silu(z.transpose(1, 2).float())
        return y.to(x.dtype).transpose(1, 2), torch.cat([dt, b.float()], dim=-1)

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        assert self._a is not None
        dt, b = gates.split([channels.shape[3], state.shape[2]], dim=-1)
        ops.commit_selective(channels.flatten(2), dt.flatten(2), self._a[part].flatten(0, 1), b, state, path)


_DELTA_PARAMETERS = ("query", "key", "value", "g", "beta", "use_qk_l2norm_in_kernel")


class GatedDelta(Recurrence):
    """Gated DeltaNet's gated delta rule, whose queries and keys may have fewer heads than values. State: (heads,
    key_dim, value_dim); gates: log decays and rates, (2 heads,)."""

    name: ClassVar[str] = "Gated DeltaNet"
    functions: ClassVar[Functions] = {**CONVOLUTION, "torch_chunk_gated_delta_rule": ("scan", _DELTA_PARAMETERS)}
    scan: ClassVar[Callable[..., Tensor]] = staticmethod(ops.tree_delta)

    def read(
        self,
        place: int,
        state: Tensor,
        tree: DepthIndex,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        assert options["use_qk_l2norm_in_kernel"], "queries and keys must be normalised by the scan"
        g, beta = g.float(), beta.float()
        query = normalised(query) * query.shape[-1] ** -0.5
        y = self.scan(query, normalised(key), value, g, beta, state, tree.ancestors)
        return y.to(value.dtype), torch.cat([g.flatten(2), beta], dim=-1)

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        (batch, depth), (key_dim, value_dim) = path.shape, state.shape[2:]
        heads = state.shape[1] // channels.shape[2]
        g, beta = gates.split([gates.shape[3] - heads, heads], dim=-1)
        keys = (channels.shape[3] - heads * value_dim) // 2
        _, k, v = channels.split([keys, keys, heads * value_dim], dim=-1)
        k, v = normalised(k.reshape(batch, depth, -1, key_dim)), v.reshape(batch, depth, -1, value_dim)
        if g.shape[3] == heads:
            ops.commit_delta(k, v, g.flatten(2), beta.flatten(2), state, path)
        else:  # decays by key channel
            ops.commit_kda(k, v, g.reshape(k.shape), beta.flatten(2), state, path)


class KimiDelta(GatedDelta):
    """Kimi Delta Attention. State: (heads, key_dim, value_dim); gates: log decays and rates, ((key_dim + 1) heads,)."""

    name: ClassVar[str] = "Kimi Delta Attention"
    functions: ClassVar[Functions] = {**CONVOLUTION, "chunk_kimi_delta_attention": ("scan", _DELTA_PARAMETERS)}
    scan = staticmethod(ops.tree_kda)


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Step sizes in float32, from the projection's output and its bias."""
    dt = dt.float() if bias is None else dt.float() + bias
    return torch.nn.functional.softplus(dt) if softplus else dt


def normalised(x: Tensor) -> Tensor:
    """L2-normalised over the last axis in float32, with transformers' epsilon."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _attention(
    states: Any, original: Adapter, mixer: Any, hidden_states: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Replace ``MiniMaxLightningAttention.forward``."""
    if not states.verifying:
        options = {name: value for name, value in options.items() if value is not states}
        y, state = original(mixer, hidden_states=hidden_states, **options)
        states.update_recurrent_state(state.transpose(2, 3), mixer.layer_idx)
        return y, None
    states.update_recurrent_state(None, mixer.layer_idx)
    projected = mixer.act_fn(mixer.qkv_proj(hidden_states))
    q, k, v = projected.unflatten(2, (mixer.num_attention_heads, -1)).chunk(3, dim=-1)
    y, _ = states.scan(q, k, v, mixer.slope_rate)
    gate = torch.sigmoid(mixer.output_gate(hidden_states))
    return mixer.out_proj(gate * mixer.norm(y.flatten(2))), None


def _model(states: Any, original: Adapter, model: Any, **options: Any) -> Any:
    """Replace ``MiniMaxModel.forward``, which rejects other cache classes if ``use_cache`` is set."""
    return original(model, **{**options, "use_cache": False})


class LightningAttention(Mamba2):
    """Lightning attention: Mamba-2's scan with a constant decay per head and without step sizes. State: (heads,
    value_dim, key_dim); gates: keys and values, (2 heads key_dim,). Source: MiniMax-01 (arXiv 2501.08313), section 2.2;
    Lightning Attention-2 (arXiv 2401.04658)."""

    name: ClassVar[str] = "lightning attention"
    functions: ClassVar[Functions] = {
        "MiniMaxLightningAttention.forward": (_attention, ("hidden_states", "position_embeddings", "attention_mask")),
        "MiniMaxModel.forward": (_model, ("use_cache",)),
    }

    def read(
        self, place: int, state: Tensor, tree: DepthIndex, q: Tensor, k: Tensor, v: Tensor, slope: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps = torch.ones(q.shape[:3], dtype=torch.float32, device=q.device)
        y, _ = super().read(place, state, tree, v, steps, -slope.flatten().float(), k, q)
        return y.to(v.dtype), torch.cat([k, v], dim=2).flatten(2)

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        assert self._stored_a is not None
        a = self._stored_a[part].flatten()
        k, v = (t.flatten(2).unflatten(2, (len(a), -1)) for t in gates.chunk(2, dim=-1))
        ops.commit_scan(v, torch.ones(v.shape[:3], dtype=torch.float32, device=v.device), a, k, state, path)


def _block(
    states: Any, original: Adapter, mixer: Any, input_states: Tensor, position_ids: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Replace ``RecurrentGemmaRecurrentBlock.forward``; masks padding before the convolution, unlike transformers."""
    x, conv = mixer.linear_x(input_states).transpose(1, 2), mixer.conv_1d
    if not states.verifying:
        index = torch.arange(x.shape[2], device=x.device)
        first = torch.where(position_ids == 0, index, 0).amax(1, keepdim=True)  # padding also has position 0
        x = x * (index >= first).unsqueeze(1)
    states.update_conv_state(x, mixer.layer_idx, conv_kernel_size=mixer.conv1d_width)
    x = states.conv(x, conv.weight.squeeze(1), conv.bias) if states.verifying else conv(x)[..., : x.shape[2]]
    lru = copy.copy(mixer.rg_lru)  # the original stores states in the module
    lru.recurrent_states = states if states.verifying else None
    y = lru(x.transpose(1, 2), position_ids) * mixer.act_fn(mixer.linear_y(input_states))
    states.update_recurrent_state(lru.recurrent_states, mixer.layer_idx)
    return mixer.linear_out(y), None


def _scan(
    states: Any, original: Adapter, lru: Any, hidden_states: Tensor, recurrent_gate: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Replace ``RecurrentGemmaRglru._rnn_scan`` in verify passes, where no node is the first token of its sequence."""
    return states.scan(hidden_states, recurrent_gate)


class RGLRU(Recurrence):
    """RG-LRU: a gated linear recurrence (Griffin, arXiv 2402.19427, section 2.4). State: (channels,); gates: decays and
    scaled inputs, (2 channels,), which projections of the mixer compute from the convolution's output."""

    name: ClassVar[str] = "RG-LRU"
    functions: ClassVar[Functions] = {
        "RecurrentGemmaRecurrentBlock.forward": (_block, ("input_states", "position_ids")),
        "RecurrentGemmaRglru._rnn_scan": (_scan, ("hidden_states", "recurrent_gate", "recurrent_states")),
    }

    def read(self, place: int, state: Tensor, tree: DepthIndex, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return ops.tree_lru(x, a, state, tree).to(x.dtype), torch.cat([a, x], dim=-1)

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        a, x = gates.chunk(2, dim=-1)
        ops.commit_lru(x.flatten(2), a.flatten(2), state, path)


def _projections(states: Any, original: Adapter, module: Any, hidden_states: Tensor, cache: Any, conv_mask: Any) -> Any:
    """Replace ``ZayaCCAProjection.forward``, called with positional arguments: two convolutions and delayed values."""
    key, project = (module.layer_idx, 0), lambda hidden: original(module, hidden, None, conv_mask)
    return states.windowed(key, module.conv_kernel_size + 1, project, hidden_states, mask=conv_mask)


def _dynamic_convolution(
    states: Any,
    original: Adapter,
    module: Any,
    hidden_states: Tensor,
    dynamic_input: Tensor,
    conv_mask: Any,
    **cache: Any,
) -> Any:
    """Replace ``Inkling2DynamicShortConvolution.forward``, whose weights depend on the token."""
    key, convolve = (module.layer_idx, module.conv_idx), partial(original, module, conv_mask=conv_mask)
    return states.windowed(key, module.conv_kernel_size, convolve, hidden_states, dynamic_input, mask=conv_mask)


def _relative_logits(
    states: Any, original: Adapter, module: Any, relative_states: Tensor, *positions: Tensor
) -> Tensor:
    """Replace ``InklingRelativeLogits.forward``."""
    return states.by_row(partial(original, module), relative_states)


def _position_bias(
    states: Any, original: Adapter, module: Any, hidden_states: Tensor, relative_distance: Tensor, *positions: Any
) -> Tensor:
    """Replace ``Inkling2RelativePositionBias.forward``."""

    def biased(hidden: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return original(module, hidden, queries[:, None] - keys, queries[None])

    return states.by_row(biased, hidden_states)


_RELATIVE = _relative_logits, ("relative_states", "query_positions", "key_positions")
_WINDOWED = ("hidden_states", "conv_mask")

INKLING: Functions = {**CONVOLUTION, "InklingRelativeLogits.forward": _RELATIVE}
INKLING2_BIASES: Functions = {
    "Inkling2RelativeLogits.forward": _RELATIVE,  # transformers 5.23 and earlier
    "Inkling2RelativePositionBias.forward": (_position_bias, ("hidden_states", "relative_distance", "position_ids")),
}
INKLING2: Functions = {
    **CONVOLUTION,
    "Inkling2DynamicShortConvolution.forward": (_dynamic_convolution, (*_WINDOWED, "dynamic_input")),
    **INKLING2_BIASES,
}
ZAYA: Functions = {"ZayaCCAProjection.forward": (_projections, _WINDOWED)}

RECURRENCES: dict[str, type[Recurrence]] = {
    **dict.fromkeys(("mamba2", "bamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid"), Mamba2),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), Mamba1),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), GatedDelta),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), KimiDelta),
    "minimax": LightningAttention,
    "recurrent_gemma": RGLRU,
}
"""The recurrence after the convolution, by model type of the text configuration."""

CONVOLVED: dict[str, Functions] = {
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), CONVOLUTION),
    "inkling_text": INKLING,
    "inkling2_text": INKLING2,
    "zaya": ZAYA,
}
"""Functions to replace in models without a recurrence: short convolutions (LFM2); short convolutions of keys, values
and outputs, of which some have weights that depend on the token (Inkling 2), and attention with a relative position
bias (Inkling); projections from the last tokens to queries, keys and values (ZAYA's compressed convolutional
attention)."""
