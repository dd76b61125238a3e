"""The cache of a model with Mamba-2 layers: their states beside the keys and values of its attention layers.

A pass over a tree reads the states and changes nothing. It keeps what entered each layer's convolution and each node's
step sizes; a commit runs the convolution once more along the accepted path, which gives what the scan was fed there,
and lets the states absorb it. So a node costs its convolution's inputs, not a state.

Axes beside the usual ones: ``layers`` counts the recurrent layers only, ``channels`` are those of the convolution: x, B
and C side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.cache.rows import RowTensor
from mmspec.cache.tree_cache import TreeCache
from mmspec.errors import UserError
from ssm.ops import commit_conv, commit_scan, conv_window, tree_conv, tree_scan

STATES = "tree_states"
"""The keyword argument of a decoder's forward that hands a ``StateCache`` to its mixers."""

_NOTED = 64
"""Nodes that are provided for from the beginning where what a pass notes must not move."""

_AT_ONCE = 1 << 17
"""Numbers per convolution along a path, times layers, that a commit works on at once on a CPU: small layers are taken
together, which means fewer calls; big ones one by one, which means less memory. In place, all are taken together."""


@dataclass
class _Tree:
    """The nodes of the pass under way."""

    ancestors: Tensor  # (batch, nodes, nodes) bool
    window: Tensor  # (batch, nodes, width), see conv_window


@dataclass
class _Mixers:
    """What the mixers hand over beside states and inputs, the same at every pass; one entry per layer."""

    weight: list[Tensor]  # (channels, width)
    bias: list[Tensor | None]  # (channels,)
    a: list[Tensor]  # (heads,), which a mixer computes anew in every pass, and which is gone after it
    kept: Tensor | None = None  # (layers, heads), the same for the commit
    activation: str | None = None
    groups: int = 1

    def keep(self) -> None:
        """All mixers have run."""
        self.kept = torch.stack(self.a) if self.kept is None else torch.stack(self.a, out=self.kept)

    def side_by_side(self, part: slice) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of some layers, as of one layer of many heads: (channels, width), (channels,) or None, (heads,)."""
        assert self.kept is not None
        a = self.kept[part].flatten()
        if part.stop - part.start == 1:
            return self.weight[part.start], self.bias[part.start], a
        bias = [b for b in self.bias[part] if b is not None]
        return torch.cat(self.weight[part]), torch.cat(bias) if bias else None, a


class StateCache(TreeCache):
    """Cache of one batch of sequences of a model with Mamba-2 layers. See ``TreeCache``.

    Args:
        num_layers: layers of the model.
        recurrent: the layers that have a state.
        attending: the layers that have keys and values; a layer may have both.
        reserve: slots to allocate for keys and values.
        in_place: states and what a pass notes stay where they are, too.
    """

    def __init__(
        self,
        num_layers: int,
        recurrent: Sequence[int],
        *,
        attending: Sequence[int],
        reserve: int,
        in_place: bool = False,
    ) -> None:
        super().__init__(num_layers, reserve=reserve, attending=attending, in_place=in_place)
        self._place = {layer: place for place, layer in enumerate(recurrent)}
        nothing: list[Any] = [None] * len(recurrent)
        self._mixers = _Mixers(nothing[:], nothing[:], nothing[:])
        self._conv = RowTensor(in_place)  # (rows, layers, channels, width - 1)
        self._state = RowTensor(in_place)  # (rows, layers, heads, head_dim, state) float32
        self._inputs: Tensor | None = None  # (layers, rows, nodes, channels)
        self._dt: Tensor | None = None  # (layers, rows, nodes, heads) float32
        self._tree: _Tree | None = None
        self._calls = 0  # of convolution and scan in the last pass over a tree
        self._current = 0  # the layer whose mixer is running: its convolution and scan are not told

    # ------------------------------------------------------------------ what transformers' mixers ask

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        # Else a mixer would take its own path for one token, which changes the state in place.
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 4, **options: Any
    ) -> Tensor:
        """Keep the last inputs of the prompt, (batch, channels, tokens); under a tree, note which layer is running."""
        place = self._current = self._place[layer_idx]
        if self._tree is None:
            (batch, channels, _), width = conv_states.shape, conv_kernel_size - 1
            if not self._conv.rows:
                self._conv.append(conv_states.new_zeros(batch, len(self._place), channels, width))
            last = conv_states[:, :, -width:]
            self._conv.data[:, place, :, width - last.shape[2] :] = last
        return conv_states

    def update_recurrent_state(  # type: ignore[override]
        self, recurrent_states: Tensor | None, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> None:
        """Keep the state behind the prompt, (batch, heads, head_dim, state); a pass over a tree has none to keep."""
        if self._tree is not None:
            return
        assert recurrent_states is not None
        if not self._state.rows:
            batch, *shape = recurrent_states.shape
            self._state.append(recurrent_states.new_zeros(batch, len(self._place), *shape, dtype=torch.float32))
        self._state.data[:, self._place[layer_idx]] = recurrent_states

    # ------------------------------------------------------------------ a pass over a tree

    def arguments(self, reach: Tensor) -> dict[str, Any]:
        batch, nodes, slots = reach.shape
        if slots != nodes:
            raise UserError(
                "a tree must pass through Mamba-2 layers as a whole: "
                f"got {nodes} nodes behind {slots - nodes} that are not committed"
            )
        assert self._conv.rows, "the prompt comes first"
        width, index = self._conv.data.shape[3] + 1, torch.arange(nodes, device=reach.device)
        if nodes == 1:
            window = torch.arange(width, device=reach.device).expand(batch, 1, -1)
        else:
            # The parent is the last ancestor but the node itself, as parents stand before their children.
            window = conv_window(torch.where(reach.tril(-1), index, -1).amax(-1), width)
        self._tree, self._calls = _Tree(reach, window), 0
        return {STATES: self}

    def conv(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None, **options: Any
    ) -> Tensor:
        """In place of ``causal_conv1d_fn``: (batch, channels, nodes) in and out."""
        assert self._tree is not None
        place, x = self._current, hidden_states.transpose(1, 2)
        self._calls += 1
        self._mixers.weight[place], self._mixers.bias[place] = weight, bias
        self._mixers.activation = activation
        self._inputs, inputs = self._noted(self._inputs, x)
        conv = self._conv.data[: len(x), place]
        return tree_conv(inputs, conv, weight, bias, self._tree.window, activation).transpose(1, 2)

    def scan(
        self,
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
    ) -> tuple[Tensor, None]:
        """In place of ``mamba2_chunk_scan``: (batch, nodes, heads, head_dim) in and out, and no state to keep yet.

        Step sizes are not clamped to ``dt_limit``: transformers clamps them in prompts, and not when it decodes.
        """
        assert self._tree is not None
        place = self._current
        self._calls += 1
        self._mixers.a[place], self._mixers.groups = A.detach(), B.shape[2]
        if self._calls == 2 * len(self._place):
            self._mixers.keep()
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias
        self._dt, dt = self._noted(self._dt, torch.nn.functional.softplus(dt) if dt_softplus else dt)
        y = tree_scan(hidden_states, dt, A, B, C, D, self._state.data[: len(dt), place], self._tree.ancestors)
        return y.contiguous(), None

    def _noted(self, kept: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
        """Keep (batch, nodes, ...) of the current layer until the commit; the storage, and the copy in it."""
        rows, nodes = new.shape[:2]
        if kept is None or kept.shape[1] < rows or kept.shape[2] < nodes:
            most = max(nodes, _NOTED if self.in_place else 1)
            kept = new.new_empty(len(self._place), rows, most, *new.shape[2:])
            self.version = object()
        copy = kept[self._current, :rows, :nodes]
        copy.copy_(new)
        return kept, copy

    # ------------------------------------------------------------------ the accepted path

    def append(self, prompt: TreeCache, reserve: int = 0) -> None:
        assert isinstance(prompt, StateCache)
        versions = self._conv.version, self._state.version
        self._conv.append(prompt._conv.data[: prompt.rows])
        self._state.append(prompt._state.data[: prompt.rows])
        if versions != (self._conv.version, self._state.version):
            self.version = object()
        super().append(prompt, reserve)

    def select(self, rows: Sequence[int]) -> None:
        self._conv.select(rows)
        self._state.select(rows)
        super().select(rows)

    def _changed(self) -> None:
        super()._changed()
        self._tree = None

    def _device(self) -> torch.device:
        return self._conv.data.device

    def commit_on_device(self, path: Tensor) -> None:
        super().commit_on_device(path)
        self._absorb(path)

    def commit(self, path: Tensor, rows: list[list[int]]) -> None:
        super().commit(path, rows)
        longest = max(map(len, rows))
        if not self.in_place:
            if longest:
                self._absorb(path[:, :longest])
            self._tree, self._calls = None, 0

    def _absorb(self, path: Tensor) -> None:
        """Take the nodes of each row's path, (batch, depth) padded with -1, into the states."""
        if self._calls != 2 * len(self._place):
            # A mixer that computes by other functions saw a sequence, and gave wrong logits.
            raise RuntimeError(
                f"each Mamba-2 layer must call its convolution and its scan once per pass: expected "
                f"{2 * len(self._place)} calls under a tree, received {self._calls}"
            )
        assert self._inputs is not None
        assert self._dt is not None
        (batch, depth), (channels, width), groups = path.shape, self._mixers.weight[0].shape, self._mixers.groups
        heads, head_dim, size = self._state.data.shape[2:]
        shares = [heads * head_dim, groups * size, groups * size]  # of the channels: x, B, C
        step = torch.arange(depth, device=path.device)
        chain = torch.where(path >= 0, step, -1)
        window = (step[:, None] + torch.arange(width, device=path.device)).expand(batch, -1, -1)
        at = torch.arange(batch, device=path.device)[:, None], path.clamp(min=0)
        for part in self._parts(batch * (depth + width) * channels):
            layers = part.stop - part.start
            weight, bias, a = self._mixers.side_by_side(part)
            inputs = _folded(self._inputs[part][:, *at])
            conv = self._conv.data[:batch, part].view(batch, layers * channels, -1)
            y = tree_conv(inputs, conv, weight, bias, window, self._mixers.activation)
            x, b, _ = y.view(batch, depth, layers, channels).split(shares, dim=-1)
            state = self._state.data[:batch, part].view(batch, layers * heads, head_dim, size)
            whole = state.contiguous()  # a copy of some layers of several rows
            commit_scan(
                x.reshape(batch, depth, layers * heads, head_dim),
                _folded(self._dt[part][:, *at]),
                a,
                b.reshape(batch, depth, layers * groups, size),
                whole,
                chain,
            )
            if whole is not state:
                state.copy_(whole)
            commit_conv(inputs, conv, chain)

    def _parts(self, entries: int) -> Iterator[slice]:
        """Layers to work on together, as one layer of many heads; each has so many ``entries``."""
        layers = len(self._place)
        together = layers if self.in_place else max(1, _AT_ONCE // entries)
        for start in range(0, layers, together):
            yield slice(start, min(start + together, layers))


def _folded(x: Tensor) -> Tensor:
    """(layers, batch, depth, n) -> (batch, depth, layers * n)"""
    return x.permute(1, 2, 0, 3).flatten(2)
