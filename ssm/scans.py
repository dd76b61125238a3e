"""Recurrent states of a model: the scans of its layers in verify passes, and their commits.

A verify pass does not change the states. It stores the gates of the scans; a commit advances the states along the
accepted path. ``units`` counts the scans of all layers, of which a layer mostly has one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.cache.rows import RowTensor
from mmspec.ssm.convolutions import MIN_NODES
from mmspec.ssm.recurrences import Recurrence


class Scans:
    """States of all scans of a model.

    Args:
        recurrence: of all its units; None for a model with convolutions alone.
        units: scans of all layers; 0 without any.
        per_layer: scans of a layer, one after another, whose states transformers stacks.

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
        self._reallocated = object()  # replaced with the gates

    def __len__(self) -> int:
        return self._units

    @property
    def version(self) -> tuple[object, object]:
        """Changes whenever a buffer is reallocated."""
        return self.state.version, self._reallocated

    @property
    def gates(self) -> int:
        """Values that a layer stores per node."""
        return 0 if self._gates is None else self._gates.shape[3] * self.per_layer

    def store(self, place: int, states: Tensor) -> None:
        """Store a layer's states after a prompt, (batch, heads, ...) or (batch, scans, heads, ...).

        Args:
            place: of the layer among those with scans.
        """
        new = states if self.per_layer > 1 else states[:, None]
        if not self.state.rows:
            batch, _, *shape = new.shape
            self.state.append(new.new_zeros(batch, self._units, *shape, dtype=torch.float32))
        first = place * self.per_layer
        self.state.data[:, first : first + self.per_layer] = new

    def read(self, place: int, ancestors: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Outputs of the next scan of a layer at the nodes of trees, recorded for the commit; instead of a final state,
        an empty tensor.

        Args:
            place: of the layer among those with scans.
            ancestors: (batch, nodes, nodes) bool.
            args, options: of the scan that this replaces.
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
            layers: places among those with scans.
            inputs: (batch, depth, channels), outputs of their convolutions along the path.
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
