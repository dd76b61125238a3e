"""States of a model's causal convolutions and scans. Verify passes record inputs and gates without changing states;
commits advance the states along the accepted path.

A layer may have several convolutions: Inkling has four in addition to attention. The convolutions of all layers are
stored as one wide convolution, with channels in layer order. Short-range operations that are not depthwise convolutions
(``Convolutions.windows``) use the same states. ``units`` counts the scans of all layers, usually one per layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.cache.rows import RowTensor
from mmspec.ssm.ops import commit_conv, tree_conv
from mmspec.ssm.recurrences import Recurrence

Key = tuple[int, int]
"""Layer index, and index of the convolution in the layer (transformers' ``state_idx``)."""

MIN_NODES = 64
"""Initial node capacity of buffers with static shapes."""


class Convolutions:
    """States of all convolutions of a model, which have the same width.

    Attributes:
        state: (rows, channels, width - 1), the last inputs, newest last.
        calls: convolutions computed in the last verify pass.
    """

    def __init__(self, static_shapes: bool) -> None:
        self.static_shapes = static_shapes
        self.state = RowTensor(static_shapes)
        self.calls = 0
        self._prompt: dict[Key, Tensor] = {}  # (batch, channels, width - 1) until the prompt is committed
        self._channels: dict[Key, slice] = {}
        self._parameters: dict[Key, tuple[Tensor, Tensor | None, str | None]] = {}  # weight, bias and activation
        self._inputs = torch.empty(0, 0, 0, dtype=torch.float32)  # (rows, nodes, channels)
        self._reallocated = object()  # replaced with the buffer of inputs

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def version(self) -> tuple[object, object]:
        """Changes whenever a buffer is reallocated."""
        return self.state.version, self._reallocated

    @property
    def width(self) -> int:
        """Number of inputs that an output depends on."""
        assert self.state.rows, "the prompt comes first"
        return self.state.data.shape[2] + 1

    def store(self, key: Key, inputs: Tensor, width: int) -> None:
        """Store the last inputs of a prompt, (batch, channels, tokens)."""
        batch, channels, tokens = inputs.shape
        kept = min(tokens, width - 1)
        state = self._prompt[key] = inputs.new_zeros(batch, channels, width - 1)
        state[:, :, width - 1 - kept :] = inputs[:, :, tokens - kept :]

    def commit_prompt(self, without: Tensor) -> None:
        """Use the stored inputs as states of new rows; ``without``, (batch, 0, 0), is used without convolutions."""
        end = 0
        for key, state in self._prompt.items():
            self._channels[key] = slice(end, end := end + state.shape[1])
        self.state.append(torch.cat(list(self._prompt.values()), dim=1) if self._prompt else without)
        self._prompt = {}

    def append(self, prompt: Convolutions, rows: Tensor) -> None:
        """Append rows, (count,) int64, of other states, e.g. of a prefill."""
        self._channels = prompt._channels
        self.state.append(prompt.state.data[rows])

    def convolve(
        self, key: Key, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, window: Tensor
    ) -> Tensor:
        """``tree_conv`` over the nodes' inputs, (batch, nodes, channels), which are recorded for the commit."""
        state = self._record(key, x)
        self._parameters[key] = weight, bias, activation
        return tree_conv(x, state, weight, bias, window, activation)

    def windows(self, key: Key, x: Tensor, window: Tensor) -> Tensor:
        """Inputs of each node's output, (batch, nodes, width, channels); records ``x`` for the commit."""
        inputs = torch.cat([self._record(key, x).transpose(1, 2), x], dim=1)
        return inputs[torch.arange(len(x), device=x.device)[:, None, None], window]

    def _record(self, key: Key, x: Tensor) -> Tensor:
        """Copy the inputs of the nodes to the buffer; returns the state before them, (batch, channels, width - 1)."""
        self.calls += 1
        (rows, nodes, _), buffer, state = x.shape, self._inputs, self.state.data
        alike = (buffer.shape[2], buffer.dtype, buffer.device) == (state.shape[1], state.dtype, state.device)
        if not alike or buffer.shape[0] < rows or buffer.shape[1] < nodes:
            self._inputs = state.new_empty(rows, max(nodes, MIN_NODES if self.static_shapes else 1), state.shape[1])
            self._reallocated = object()
        self._inputs[:rows, :nodes, self._channels[key]] = x
        return state[:rows, self._channels[key]]

    def commit(self, part: slice, chain: Tensor, at: tuple[Tensor, Tensor], read: bool) -> Tensor:
        """Advance some convolutions along a path.

        Args:
            chain: (batch, depth) int64, 0 to depth - 1, right-padded with -1.
            at: indices of rows and of the path's nodes, (batch, 1) and (batch, depth).

        Returns:
            (batch, depth, channels), outputs of the convolutions, or their inputs if ``read`` is false.
        """
        channels = list(self._channels.values())[part]
        span = slice(channels[0].start, channels[-1].stop)
        y = inputs = self._inputs[:, :, span][at]
        state = self.state.data[: len(inputs), span]
        if read:
            depth, taps = (torch.arange(count, device=inputs.device) for count in (inputs.shape[1], self.width))
            weights, biases, activations = zip(*list(self._parameters.values())[part], strict=True)
            weight, bias = weights[0], biases[0]
            if len(weights) > 1:
                weight, bias = torch.cat(weights), None if bias is None else torch.cat(biases)
            window = (depth[:, None] + taps).expand(len(inputs), -1, -1)
            y = tree_conv(inputs, state, weight, bias, window, activations[0])
        commit_conv(inputs, state, chain)
        return y


class Scans:
    """States of all scans of a model.

    Args:
        recurrence: recurrence of all units; None for a model with convolutions only.
        units: number of scans of all layers; 0 without scans.
        per_layer: consecutive scans per layer, whose states transformers stacks.

    Attributes:
        state: (rows, units, heads, ...) float32.
        calls: scans computed in the last verify pass.
    """

    def __init__(self, recurrence: Recurrence | None, units: int, per_layer: int, static_shapes: bool) -> None:
        self.state = RowTensor(static_shapes)
        self.calls = 0
        self.per_layer = per_layer
        self._recurrence, self._units, self._static_shapes = recurrence, units, static_shapes
        self._gates: Tensor | None = None  # (units, rows, nodes, gates)
        self._reallocated = object()  # replaced when the gates are reallocated

    def __len__(self) -> int:
        return self._units

    @property
    def version(self) -> tuple[object, object]:
        """Changes whenever a buffer is reallocated."""
        return self.state.version, self._reallocated

    @property
    def gates(self) -> int:
        """Number of values that a layer stores per node."""
        return 0 if self._gates is None else self._gates.shape[3] * self.per_layer

    def store(self, place: int, states: Tensor) -> None:
        """Store a layer's states after a prompt, (batch, heads, ...) or (batch, scans, heads, ...)."""
        new = states if self.per_layer > 1 else states[:, None]
        if not self.state.rows:
            batch, _, *shape = new.shape
            self.state.append(new.new_zeros(batch, self._units, *shape, dtype=torch.float32))
        first = place * self.per_layer
        self.state.data[:, first : first + self.per_layer] = new

    def read(self, place: int, ancestors: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Outputs of a layer's next scan at tree nodes, and an empty final state; records gates for the commit.

        Args:
            ancestors: (batch, nodes, nodes) bool.
        """
        assert self._recurrence is not None
        unit = place * self.per_layer + self.calls % self.per_layer
        self.calls += 1
        state = self.state.data[: len(ancestors), unit]
        y, gates = self._recurrence.read(unit, state, ancestors, *args, **options)
        rows, nodes, count = gates.shape
        if self._gates is None or self._gates.shape[1] < rows or self._gates.shape[2] < nodes:
            capacity = max(nodes, MIN_NODES if self._static_shapes else 1)
            self._gates = gates.new_empty(self._units, rows, capacity, count)
            self._reallocated = object()
        self._gates[unit, :rows, :nodes] = gates
        return y, state[:0]

    def commit(self, layers: slice, inputs: Tensor, chain: Tensor, at: tuple[Tensor, Tensor], channels: bool) -> None:
        """Advance the states of some layers along a path.

        Args:
            layers: indices among layers with scans.
            inputs: (batch, depth, channels), outputs of the layers' convolutions along the path.
            chain: (batch, depth) int64, 0 to depth - 1, right-padded with -1.
            at: indices of rows and of the path's nodes, (batch, 1) and (batch, depth).
        """
        assert self._gates is not None
        assert self._recurrence is not None
        batch, units = len(chain), slice(layers.start * self.per_layer, layers.stop * self.per_layer)
        states = self.state.data[:batch, units]  # (batch, units, heads, ...)
        state = states.view(batch, -1, *states.shape[3:])
        contiguous = state.contiguous()  # a copy if layers are split and there are several rows
        gates = self._gates[units][:, *at].permute(1, 2, 0, 3)
        y = inputs.unflatten(2, (states.shape[1], -1)) if channels else inputs
        self._recurrence.commit(units, y, gates, contiguous, chain)
        if contiguous is not state:
            state.copy_(contiguous)
