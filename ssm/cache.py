"""Cache of models with recurrent layers: recurrent states, and keys and values of attention layers.

A verify pass does not change the states. It stores each layer's convolution inputs and gates; a commit recomputes the
convolution along the accepted path and updates the states from its output. A node thus costs its convolution inputs,
not a state.

Further axes: ``layers`` counts recurrent layers only; ``channels`` are the convolution's, such as x, B and C of Mamba-2
or q, k and v of Gated DeltaNet, concatenated; none in layers without a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.cache.rows import RowTensor
from mmspec.cache.tree_cache import TreeCache
from mmspec.errors import UserError
from ssm.ops import commit_conv, conv_window, tree_conv
from ssm.recurrences import Recurrence

STATES = "tree_states"
"""Keyword argument of a decoder's forward that passes a ``StateCache`` to its mixers; and attribute of a convolution's
inputs, for mixers without keyword arguments, such as Mamba-1's."""

_MIN_NODES = 64
"""Initial node capacity of in-place buffers."""

_COMMIT_ELEMENTS = 1 << 17
"""Convolution elements per batched commit on a CPU: small layers are batched to save calls, large ones run one by one
to save memory. In place, all layers are batched."""


@dataclass
class _Tree:
    """Tree of the current verify pass."""

    ancestors: Tensor  # (batch, nodes, nodes) bool
    window: Tensor  # (batch, nodes, width), see conv_window


@dataclass
class _Convolutions:
    """Convolution parameters by layer, recorded during the pass."""

    weight: list[Tensor]  # (channels, width)
    bias: list[Tensor | None]  # (channels,)
    activation: str | None = None

    def concatenated(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Parameters of some layers as one wide layer: (channels, width), (channels,) or None."""
        if part.stop - part.start == 1:
            return self.weight[part.start], self.bias[part.start]
        bias = [b for b in self.bias[part] if b is not None]
        return torch.cat(self.weight[part]), torch.cat(bias) if bias else None


class StateCache(TreeCache):
    """``TreeCache`` of a model with recurrent layers of one kind.

    Args:
        num_layers: layers of the model.
        recurrence: the class of their recurrence; None for convolutions alone.
        recurrent: indices of layers with a recurrent state.
        attending: indices of layers with keys and values; a layer may have both.
        reserve: KV slots to allocate.
        in_place: static buffers, for states too.
    """

    def __init__(
        self,
        num_layers: int,
        recurrence: Callable[[int], Recurrence] | None,
        recurrent: Sequence[int],
        *,
        attending: Sequence[int],
        reserve: int,
        in_place: bool = False,
    ) -> None:
        super().__init__(num_layers, reserve=reserve, attending=attending, in_place=in_place)
        self._place = {layer: place for place, layer in enumerate(recurrent)}
        self._recurrence = recurrence(len(recurrent)) if recurrence is not None else None
        nothing: list[Any] = [None] * len(recurrent)
        self._convolutions = _Convolutions(nothing[:], nothing[:])
        self._conv = RowTensor(in_place)  # (rows, layers, channels, width - 1)
        self._state = RowTensor(in_place)  # (rows, layers, heads, ...) float32
        self._inputs: Tensor | None = None  # (layers, rows, nodes, channels)
        self._gates: Tensor | None = None  # (layers, rows, nodes, gates)
        self._tree: _Tree | None = None
        self._calls = 0  # convolution and scan calls in the last verify pass
        self._current = 0  # running layer; convolution and scan do not receive its index

    # ------------------------------------------------------------------ cache interface of transformers' mixers

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        # True would select the mixer's one-token path, which updates the state in place.
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 4, **options: Any
    ) -> Tensor:
        """Store the prompt's last inputs, (batch, channels, tokens); in a verify pass, record the layer instead."""
        place = self._current = self._place[layer_idx]
        if self._tree is None:
            (batch, channels, _), width = conv_states.shape, conv_kernel_size - 1
            if not self._conv.rows:
                self._conv.append(conv_states.new_zeros(batch, len(self._place), channels, width))
                if self._recurrence is None:
                    self._state.append(conv_states.new_zeros(batch, 0))
            last = conv_states[:, :, -width:]
            self._conv.data[:, place, :, width - last.shape[2] :] = last
        else:
            setattr(conv_states, STATES, self)
        return conv_states

    def update_recurrent_state(  # type: ignore[override]
        self, recurrent_states: Tensor | None, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> None:
        """Store the state after the prompt, (batch, heads, ...); in a verify pass, record the layer instead."""
        place = self._current = self._place[layer_idx]
        if self._tree is not None:
            return
        assert recurrent_states is not None
        batch, *shape = recurrent_states.shape
        if not self._conv.rows:
            self._conv.append(recurrent_states.new_zeros(batch, len(self._place), 0, 0))
        if not self._state.rows:
            self._state.append(recurrent_states.new_zeros(batch, len(self._place), *shape, dtype=torch.float32))
        self._state.data[:, place] = recurrent_states

    # ------------------------------------------------------------------ verify pass

    @property
    def verifying(self) -> bool:
        """Whether the current pass verifies a tree; otherwise it absorbs a prompt."""
        return self._tree is not None

    def arguments(self, reach: Tensor) -> dict[str, Any]:
        batch, nodes, slots = reach.shape
        if slots != nodes:
            raise UserError(
                "recurrent layers require the whole tree in one pass: "
                f"got {nodes} nodes after {slots - nodes} uncommitted ones"
            )
        assert self._conv.rows, "the prompt comes first"
        width, index = self._conv.data.shape[3] + 1, torch.arange(nodes, device=reach.device)
        if nodes == 1:
            window = torch.arange(width, device=reach.device).expand(batch, 1, -1)
        else:
            # The parent is the last proper ancestor, as parents precede their children.
            window = conv_window(torch.where(reach.tril(-1), index, -1).amax(-1), width)
        self._tree, self._calls = _Tree(reach, window), 0
        return {STATES: self}

    def conv(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None, **options: Any
    ) -> Tensor:
        """Replaces ``causal_conv1d_fn``: (batch, channels, nodes) in and out."""
        assert self._tree is not None
        place, x = self._current, hidden_states.transpose(1, 2)
        self._calls += 1
        self._convolutions.weight[place], self._convolutions.bias[place] = weight, bias
        self._convolutions.activation = activation
        self._inputs, inputs = self._record(self._inputs, x)
        conv = self._conv.data[: len(x), place]
        return tree_conv(inputs, conv, weight, bias, self._tree.window, activation).transpose(1, 2)

    def scan(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Replaces the mixer's scan; the state is returned unchanged."""
        assert self._tree is not None
        assert self._recurrence is not None
        self._calls += 1
        ancestors = self._tree.ancestors
        state = self._state.data[: len(ancestors), self._current]
        y, gates = self._recurrence.read(self._current, state, ancestors, *args, **options)
        self._gates, _ = self._record(self._gates, gates)
        return y, state

    def _record(self, buffer: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
        """Copy (batch, nodes, ...) of the current layer to a buffer for the commit; returns buffer and copy."""
        rows, nodes = new.shape[:2]
        if buffer is None or buffer.shape[1] < rows or buffer.shape[2] < nodes:
            capacity = max(nodes, _MIN_NODES if self.in_place else 1)
            buffer = new.new_empty(len(self._place), rows, capacity, *new.shape[2:])
            self.version = object()
        copy = buffer[self._current, :rows, :nodes]
        copy.copy_(new)
        return buffer, copy

    # ------------------------------------------------------------------ rows and commit

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
        """Update the states along each row's path, (batch, depth) padded with -1."""
        (batch, depth), (channels, before) = path.shape, self._conv.data.shape[2:]
        expected = len(self._place) * ((channels > 0) + (self._recurrence is not None))
        if self._calls != expected:
            # A mixer that bypasses the replaced functions treats the tree as a sequence: wrong logits.
            raise RuntimeError(
                "each recurrent layer must call its convolution and its scan, where it has them, once per verify pass: "
                f"expected {expected} calls, received {self._calls}"
            )
        chain = torch.where(path >= 0, torch.arange(depth, device=path.device), -1)
        at = torch.arange(batch, device=path.device)[:, None], path.clamp(min=0)
        gates = 0 if self._gates is None else self._gates.shape[3]
        for part in self._parts(batch * (depth + before + 1) * max(channels, gates)):
            y = self._convolve(part, chain, at) if channels else chain.new_empty(0)
            if self._recurrence is not None:
                self._advance(self._recurrence, part, y, chain, at)

    def _convolve(self, part: slice, chain: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        """Advance the convolutions of some layers; ``at`` indexes rows and path nodes.

        Returns:
            (batch, depth, layers, channels), their outputs, or inputs if no scan follows.
        """
        assert self._inputs is not None
        (batch, depth), width = chain.shape, self._conv.data.shape[3] + 1
        y = inputs = self._inputs[part][:, *at].permute(1, 2, 0, 3).flatten(2)  # (batch, depth, layers * channels)
        conv = self._conv.data[:batch, part].view(batch, inputs.shape[2], -1)
        if self._recurrence is not None:
            window = torch.arange(depth, device=chain.device)[:, None] + torch.arange(width, device=chain.device)
            weight, bias = self._convolutions.concatenated(part)
            y = tree_conv(inputs, conv, weight, bias, window.expand(batch, -1, -1), self._convolutions.activation)
        commit_conv(inputs, conv, chain)
        return y.unflatten(2, (-1, self._conv.data.shape[2]))

    def _advance(
        self, recurrence: Recurrence, part: slice, channels: Tensor, chain: Tensor, at: tuple[Tensor, Tensor]
    ) -> None:
        """Advance the recurrent states of some layers."""
        assert self._gates is not None
        batch = len(chain)
        states = self._state.data[:batch, part]  # (batch, layers, heads, ...)
        state = states.view(batch, -1, *states.shape[3:])
        contiguous = state.contiguous()  # a copy if layers are split and there are several rows
        gates = self._gates[part][:, *at].permute(1, 2, 0, 3)
        recurrence.commit(part, channels, gates, contiguous, chain)
        if contiguous is not state:
            state.copy_(contiguous)

    def _parts(self, entries: int) -> Iterator[slice]:
        """Slices of layers to batch in a commit; ``entries`` is the number of elements per layer."""
        layers = len(self._place)
        size = layers if self.in_place else max(1, _COMMIT_ELEMENTS // entries)
        for start in range(0, layers, size):
            yield slice(start, min(start + size, layers))
