"""Recurrences of mixers on a tree, one class per kind of recurrent layer.

Most mixers convolve their inputs (``mmspec.ssm.ops.tree_conv``) and pass the result to a module-level function of their
modelling file, the scan; for other mixers, see ``mmspec.ssm.mixers``. ``StateCache`` owns the states and the
convolution; a ``Recurrence`` computes the scan over a tree and advances the states along a path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.ssm.ops import (
    DepthIndex,
    commit_delta,
    commit_kda,
    commit_scan,
    commit_selective,
    depth_index,
    tree_delta,
    tree_kda,
    tree_scan,
    tree_selective,
)

Adapter = Callable[..., Any]
"""Replaces a method of a mixer: takes the ``StateCache``, transformers' own method, and its arguments."""

Functions = Mapping[str, tuple[str | Adapter, tuple[str, ...]]]
"""Functions of a modelling file or methods of its classes, with the ``StateCache`` method or adapter that replaces
each, and its required parameters."""

CONVOLUTION: Functions = {"causal_conv1d_fn": ("conv", ("hidden_states", "weight", "bias", "activation"))}


class Recurrence(Protocol):
    """The scan of one kind of layer over a tree. One object serves one ``StateCache``.

    The constructor takes the number of recurrent layers.
    """

    name: ClassVar[str]
    functions: ClassVar[Functions]

    def __init__(self, layers: int) -> None: ...

    def read(self, place: int, state: Tensor, ancestors: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Output of a layer's scan at every node, and its gates.

        Args:
            state: (batch, heads, ...) float32, before the tree; not modified.
            ancestors: (batch, nodes, nodes) bool, [i, j] is True if j is i or an ancestor of i.

        Returns:
            The first result of the replaced function, and gates, (batch, nodes, gates): per-node values required by a
            commit, other than convolution inputs.
        """

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        """Advance the states of several layers along a path, in place.

        Args:
            part: indices of the layers among recurrent layers.
            channels: (batch, depth, layers, channels), the convolution's output at the path's nodes; empty without one.
            gates: (batch, depth, layers, gates), gates of the same nodes.
            state: (batch, layers * heads, ...) float32, contiguous.
            path: (batch, depth) int64, 0 to depth - 1, right-padded with -1.
        """


class Mamba2:
    """Mamba-2's selective scan. State: (heads, head_dim, state); gates: step sizes, (heads,)."""

    name: ClassVar[str] = "Mamba-2"
    functions: ClassVar[Functions] = {
        **CONVOLUTION,
        "mamba2_chunk_scan": ("scan", ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus")),
    }

    def __init__(self, layers: int) -> None:
        self._a: list[Any] = [None] * layers  # (heads,), valid during the pass
        self._stored_a: Tensor | None = None  # (layers, heads), copy for the commit

    def read(
        self,
        place: int,
        state: Tensor,
        ancestors: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        chunk_size: int | None = None,
        D: Tensor | None = None,  # noqa: N803
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Does not clamp step sizes to ``dt_limit``: transformers clamps in prefill, but not in decoding."""
        self._a[place] = A.detach()
        if place == len(self._a) - 1:
            self._stored_a = torch.stack(self._a, out=self._stored_a)
        dt = _step_sizes(dt, dt_bias, dt_softplus)
        return tree_scan(hidden_states, dt, A, B, C, D, state, ancestors).contiguous(), dt

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        assert self._stored_a is not None
        (batch, depth), (head_dim, size) = path.shape, state.shape[2:]
        inner = gates.shape[3] * head_dim
        x, b, _ = channels.split([inner, *[(channels.shape[3] - inner) // 2] * 2], dim=-1)
        x, b = x.reshape(batch, depth, -1, head_dim), b.reshape(batch, depth, -1, size)
        commit_scan(x, gates.flatten(2), self._stored_a[part].flatten(), b, state, path)


class Mamba1:
    """Mamba-1's selective scan, with its gate. State: (channels, state); gates: step sizes and B, (channels + state,).

    Step sizes and B are computed from the convolution's output by projections (and norms in Falcon-Mamba and Jamba) of
    the mixer, so a commit reads the recorded values.
    """

    name: ClassVar[str] = "Mamba"
    functions: ClassVar[Functions] = {
        **CONVOLUTION,
        "mamba_selective_scan": (
            "scan",
            (*("hidden_states", "dt", "A", "B", "C", "D", "z"), "delta_bias", "delta_softplus", "return_last_state"),
        ),
    }

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._a: Tensor | None = None  # (layers, channels, state), copy for the commit
        self._levels: DepthIndex | None = None

    def read(
        self,
        place: int,
        state: Tensor,
        ancestors: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Arguments and output have shape (batch, channels or state, nodes)."""
        if place == 0:
            self._levels = depth_index(ancestors)
        assert self._levels is not None
        if self._a is None:
            self._a = A.new_empty(self._layers, *A.shape)
        self._a[place] = A.detach()
        x, dt, b, c = (t.transpose(1, 2) for t in (hidden_states, dt, B, C))
        dt = _step_sizes(dt, delta_bias, delta_softplus)
        y = tree_selective(x, dt, A, b.unsqueeze(2), c.unsqueeze(2), D, state, self._levels)
        if z is not None:
            y *= torch.nn.functional.silu(z.transpose(1, 2).float())
        return y.to(x.dtype).transpose(1, 2), torch.cat([dt, b.float()], dim=-1)

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        assert self._a is not None
        dt, b = gates.split([channels.shape[3], state.shape[2]], dim=-1)
        commit_selective(channels.flatten(2), dt.flatten(2), self._a[part].flatten(0, 1), b, state, path)


_DELTA_PARAMETERS = ("query", "key", "value", "g", "beta", "use_qk_l2norm_in_kernel")


class GatedDelta:
    """Gated DeltaNet's gated delta rule. State: (heads, key_dim, value_dim); gates: log decays and rates, (2 heads,).

    Queries and keys may have fewer heads than values.
    """

    name: ClassVar[str] = "Gated DeltaNet"
    functions: ClassVar[Functions] = {**CONVOLUTION, "torch_chunk_gated_delta_rule": ("scan", _DELTA_PARAMETERS)}
    scan: ClassVar[Callable[..., Tensor]] = staticmethod(tree_delta)

    def __init__(self, layers: int) -> None:
        pass

    def read(
        self,
        place: int,
        state: Tensor,
        ancestors: Tensor,
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
        y = self.scan(query, normalised(key), value, g, beta, state, ancestors)
        return y.to(value.dtype), torch.cat([g.flatten(2), beta], dim=-1)

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        (batch, depth), (key_dim, value_dim) = path.shape, state.shape[2:]
        g, beta = gates.chunk(2, dim=-1)
        values = g.shape[3] * value_dim
        keys = (channels.shape[3] - values) // 2
        _, k, v = channels.split([keys, keys, values], dim=-1)
        k, v = normalised(k.reshape(batch, depth, -1, key_dim)), v.reshape(batch, depth, -1, value_dim)
        commit_delta(k, v, g.flatten(2), beta.flatten(2), state, path)


class KimiDelta(GatedDelta):
    """Kimi Delta Attention. State: (heads, key_dim, value_dim).

    Gates: log decays, and rates, ((key_dim + 1) heads,).
    """

    name: ClassVar[str] = "Kimi Delta Attention"
    functions: ClassVar[Functions] = {**CONVOLUTION, "chunk_kimi_delta_attention": ("scan", _DELTA_PARAMETERS)}
    scan = staticmethod(tree_kda)

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        (batch, depth), (key_dim, value_dim) = path.shape, state.shape[2:]
        heads = gates.shape[3] // (key_dim + 1)
        g, beta = gates.split([key_dim * heads, heads], dim=-1)
        _, k, v = channels.split([key_dim * heads, key_dim * heads, value_dim * heads], dim=-1)
        k, v = normalised(k.reshape(batch, depth, -1, key_dim)), v.reshape(batch, depth, -1, value_dim)
        commit_kda(k, v, g.reshape(k.shape), beta.flatten(2), state, path)


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Step sizes in float32, from the projection's output and its bias."""
    dt = dt.float() if bias is None else dt.float() + bias
    return torch.nn.functional.softplus(dt) if softplus else dt


def normalised(x: Tensor) -> Tensor:
    """L2-normalised over the last axis in float32, with transformers' epsilon."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
