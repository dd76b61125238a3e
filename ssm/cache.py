"""Cache of models with recurrent layers: recurrent states, and keys and values of attention layers.

A verify pass does not change the states. It stores the inputs of the convolutions and the scans' gates; a commit
recomputes the convolutions along the accepted path and updates the states from their outputs. A node thus stores
convolution inputs instead of a state.

A layer may have several convolutions: Inkling has four in addition to attention. The convolutions of all layers are
stored as one wide convolution, with channels in layer order. Short-range operations that are not depthwise convolutions
(``Convolutions.windows``) use the same states.

Additional axes: ``units`` counts the scans of all layers, usually one per layer; ``channels`` are a convolution's
concatenated channels, such as x, B and C of Mamba-2 or q, k and v of Gated DeltaNet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.cache.rows import RowTensor, row_index
from mmspec.cache.tree_cache import TreeCache
from mmspec.errors import UserError
from mmspec.ops import cpu
from mmspec.ssm.ops import DepthIndex, commit_conv, conv_window, tree_conv
from mmspec.ssm.recurrences import Recurrence
from mmspec.targets.sublayers import zero_states

STATES = "tree_states"
"""Keyword argument of a decoder's forward that passes a ``StateCache`` to its mixers, and attribute of convolution
inputs for mixers without keyword arguments, such as Mamba-1."""

_COMMIT_ELEMENTS = 1 << 17
"""Elements per batched commit on a CPU: small layers are batched to save calls, large layers run one by one to save
memory. With static shapes, all layers are batched."""


Key = tuple[int, int]
"""Layer index, and index of the convolution in the layer (transformers' ``state_idx``)."""

MIN_NODES = 64
"""Initial node capacity of buffers with static shapes."""


class _Recorded:
    """States of all layers of a model, (rows, ...), and values of a verify pass's nodes from which a commit advances
    them. ``calls`` counts the convolutions or scans of the last verify pass."""

    def __init__(self, static_shapes: bool) -> None:
        self.static_shapes = static_shapes
        self.state = RowTensor(static_shapes)
        self.calls = 0
        self._values = torch.empty(0, 0, dtype=torch.float32)  # (rows, nodes, ...)
        self._reallocated = object()  # replaced with the buffer of values

    @property
    def version(self) -> tuple[object, object]:
        """Changes whenever a buffer is reallocated."""
        return self.state.version, self._reallocated

    def _reserve(self, rows: int, nodes: int, like: Tensor, *shape: int) -> Tensor:
        """Buffer for values of this shape, dtype and device, (rows, nodes, *shape)."""
        values = self._values
        alike = (values.shape[2:], values.dtype, values.device) == (shape, like.dtype, like.device)
        if not alike or values.shape[0] < rows or values.shape[1] < nodes:
            self._values = like.new_empty(rows, max(nodes, MIN_NODES if self.static_shapes else 1), *shape)
            self._reallocated = object()
        return self._values[:rows, :nodes]


class Convolutions(_Recorded):
    """States of all convolutions of a model, which have the same width: the last inputs, newest last, (rows, channels,
    width - 1)."""

    def __init__(self, static_shapes: bool) -> None:
        super().__init__(static_shapes)
        self._prompt: dict[Key, Tensor] = {}  # (batch, channels, width - 1) until the prompt is committed
        self._channels: dict[Key, slice] = {}
        self._parameters: dict[Key, tuple[Tensor, Tensor | None, str | None]] = {}  # weight, bias and activation

    def __len__(self) -> int:
        return len(self._channels)

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
        (rows, nodes, _), state = x.shape, self.state.data
        self._reserve(rows, nodes, state, state.shape[1])[:, :, self._channels[key]] = x
        return state[:rows, self._channels[key]]

    def commit(self, part: slice, chain: Tensor, at: tuple[Tensor, Tensor], read: bool) -> Tensor:
        """Advance some convolutions along a path; returns their outputs, or their inputs if ``read`` is false, (batch,
        depth, channels). ``chain``: (batch, depth) int64, 0 to depth - 1, right-padded with -1; ``at``: indices of rows
        and of the path's nodes, (batch, 1) and (batch, depth)."""
        channels = list(self._channels.values())[part]
        span = slice(channels[0].start, channels[-1].stop)
        y = inputs = self._values[:, :, span][at]
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


class Scans(_Recorded):
    """States of all scans of a model, (rows, units, heads, ...) float32: ``per_layer`` consecutive scans a layer,
    whose states transformers stacks; no ``recurrence`` and no units in a model with convolutions only."""

    def __init__(self, recurrence: Recurrence | None, units: int, per_layer: int, static_shapes: bool) -> None:
        super().__init__(static_shapes)
        self.per_layer = per_layer
        self._recurrence, self._units = recurrence, units

    def __len__(self) -> int:
        return self._units

    @property
    def gates(self) -> int:
        """Number of values that a layer stores per node."""
        return self._values.shape[-1] * self.per_layer if self._values.ndim == 4 else 0

    def store(self, place: int, states: Tensor) -> None:
        """Store a layer's states after a prompt, (batch, heads, ...) or (batch, scans, heads, ...)."""
        new = states if self.per_layer > 1 else states[:, None]
        if not self.state.rows:
            batch, _, *shape = new.shape
            self.state.append(new.new_zeros(batch, self._units, *shape, dtype=torch.float32))
        first = place * self.per_layer
        self.state.data[:, first : first + self.per_layer] = new

    def read(self, place: int, tree: DepthIndex, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Outputs of a layer's next scan at tree nodes, and an empty final state; records gates for the commit."""
        assert self._recurrence is not None
        unit = place * self.per_layer + self.calls % self.per_layer
        self.calls += 1
        state = self.state.data[: len(tree.ancestors), unit]
        y, gates = self._recurrence.read(unit, state, tree, *args, **options)
        rows, nodes, count = gates.shape
        self._reserve(rows, nodes, gates, self._units, count)[:, :, unit] = gates
        return y, state[:0]

    def commit(self, layers: slice, inputs: Tensor, chain: Tensor, at: tuple[Tensor, Tensor], channels: bool) -> None:
        """Advance the states of ``layers``, indices among layers with scans, along a path, as ``Convolutions.commit``
        does. ``inputs``: (batch, depth, channels), outputs of the layers' convolutions along the path."""
        assert self._recurrence is not None
        batch, units = len(chain), slice(layers.start * self.per_layer, layers.stop * self.per_layer)
        states = self.state.data[:batch, units]  # (batch, units, heads, ...)
        state = states.view(batch, -1, *states.shape[3:])
        contiguous = state.contiguous()  # a copy if layers are split and there are several rows
        gates = self._values[:, :, units][at]
        y = inputs.unflatten(2, (states.shape[1], -1)) if channels else inputs
        self._recurrence.commit(units, y, gates, contiguous, chain)
        if contiguous is not state:
            state.copy_(contiguous)


class StateCache(TreeCache):
    """``TreeCache`` of a model with layers of one recurrence, or of convolutions only: indices of ``recurrent`` layers,
    with ``scans`` states each, and of ``attending`` layers, with keys and values; a layer may be both."""

    def __init__(
        self,
        num_layers: int,
        recurrence: Callable[[int], Recurrence] | None,
        recurrent: Sequence[int],
        attending: Sequence[int],
        scans: int,
        reserve: int,
        static_shapes: bool = False,
        centre: Tensor | None = None,
    ) -> None:
        super().__init__(num_layers, reserve=reserve, attending=attending, static_shapes=static_shapes, centre=centre)
        self._place = {layer: place for place, layer in enumerate(recurrent)}
        units = len(recurrent) * scans if recurrence is not None else 0
        self._scans = Scans(recurrence(units) if recurrence is not None else None, units, scans, static_shapes)
        self._conv = Convolutions(static_shapes)
        self._tree: DepthIndex | None = None  # of the current verify pass
        self._known_window: Tensor | None = None
        self._native: tuple[Any, Any] | None = None  # of a pass in the kernels: sublayers, and buffers with its records
        self._current: Key = 0, 0  # current layer and convolution, which are not passed to convolutions and scans

    @property
    def version(self) -> tuple[object, ...]:
        """Changes whenever a buffer is reallocated."""
        return self.kv.version, self._conv.version, self._scans.version

    # Cache interface for transformers' mixers; returns no states, to avoid their in-place one-token paths.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 4, **options: Any
    ) -> Tensor:
        """Store the prompt's last inputs, (batch, channels, tokens); in a verify pass, record the layer instead."""
        self._current = layer_idx, state_idx
        if self._tree is None:
            self._conv.store(self._current, conv_states, conv_kernel_size)
        else:
            setattr(conv_states, STATES, self)
        return conv_states

    def update_recurrent_state(  # type: ignore[override]
        self, recurrent_states: Tensor | None, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> None:
        """Store the state after the prompt, (batch, heads, ...) or (batch, scans, heads, ...); in a verify pass, record
        the layer instead."""
        self._current = layer_idx, state_idx
        if self._tree is not None:
            return
        assert recurrent_states is not None
        self._scans.store(self._place[layer_idx], recurrent_states)

    @property
    def verifying(self) -> bool:
        """Whether the current pass verifies a tree; otherwise it prefills."""
        return self._tree is not None

    def arguments(self, reach: Tensor) -> dict[str, Any]:
        _, nodes, slots = reach.shape
        if slots != nodes:
            raise UserError(
                "recurrent layers require the whole tree in one pass: "
                f"got {nodes} nodes after {slots - nodes} uncommitted ones"
            )
        self._native = None
        self._tree, self._known_window = DepthIndex(reach), None
        self._conv.calls = self._scans.calls = 0
        return {STATES: self}

    @property
    def _window(self) -> Tensor:
        """(batch, nodes, width), see ``conv_window``."""
        if self._known_window is None:
            assert self._tree is not None
            self._known_window = conv_window(self._tree.parents, self._conv.width)
        return self._known_window

    def recurrent(self, weights: Any, prompt: int = 0) -> tuple[Tensor | None, Any]:
        tree, states = self._tree, (self._conv.state, self._scans.state)
        if prompt and not self._conv.state.rows:
            for part, zeros in zip(states, zero_states(weights, prompt), strict=True):
                part.append(zeros)
        for part in states:
            part.write(part.data.float())
        nodes = None if tree is None or prompt else tree.ancestors.shape[1]
        buffers = cpu.recurrent_buffers(weights, self._conv.state.data, self._scans.state.data, nodes)
        self._native = weights, None if prompt else buffers
        return None if tree is None or prompt else tree.ancestors.contiguous(), buffers

    def conv(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None, **options: Any
    ) -> Tensor:
        """Replace ``causal_conv1d_fn``: (batch, channels, nodes) in and out."""
        x = hidden_states.transpose(1, 2)
        return self._conv.convolve(self._current, x, weight, bias, activation, self._window).transpose(1, 2)

    def scan(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Replace the mixer's scan; returns an empty tensor as the final state."""
        assert self._tree is not None
        return self._scans.read(self._place[self._current[0]], self._tree, *args, **options)

    def windowed(
        self, key: Key, width: int, function: Callable[..., Any], x: Tensor, *others: Tensor, mask: Tensor | None = None
    ) -> Any:
        """Run a part of a layer whose outputs, one or several (batch, tokens, ...), depend on the last ``width`` tokens
        of ``x`` and on the current token of ``others``. In a verify pass, each node's window is passed as a sequence.

        Args:
            key: key of the convolution whose state stores the inputs.
            function: called with ``x`` and ``others``, (batch, tokens, features) each; must not use a cache.
            mask: (batch, tokens), 0 at padding in a prompt.
        """
        if self._tree is None:
            inputs = x if mask is None else x * mask[:, :, None].to(x.dtype)
            self._conv.store(key, inputs.transpose(1, 2), width)
            return function(x, *others)
        windows = self._conv.windows(key, x, self._window).flatten(0, 1)
        outputs = function(windows, *(value.flatten(0, 1)[:, None].expand(-1, width, -1) for value in others))
        several = isinstance(outputs, tuple)
        last = tuple(value[:, -1].unflatten(0, x.shape[:2]) for value in (outputs if several else (outputs,)))
        return last if several else last[0]

    def by_row(self, function: Callable[..., Tensor], states: Tensor) -> Tensor:
        """Compute a relative position bias of query states, (rows, nodes, ...), row by row, because positions differ:
        ``function`` gets one row's states and the positions of queries and keys, (n,) each."""
        assert self._tree is not None
        depth, slots = self._tree.ancestors.sum(-1) - 1, torch.arange(self.length, device=states.device)
        outputs = []
        for state, length, row in zip(states[:, None], self.lengths, depth, strict=True):
            outputs.append(function(state, length + row, torch.cat([slots, length + row])))
        return torch.cat(outputs)

    def commit_prompt(self, tokens: int, attention_mask: Tensor | None, batch: int) -> None:
        if not self._conv.state.rows:
            self._conv.commit_prompt(self._scans.state.data.new_zeros(batch, 0, 0))
        self._native = None
        super().commit_prompt(tokens, attention_mask, batch)

    def append(self, prompt: TreeCache, reserve: int = 0, chosen: Sequence[int] | None = None) -> None:
        assert isinstance(prompt, StateCache)
        index = row_index(range(prompt.rows) if chosen is None else chosen, prompt._conv.state.data.device)
        self._conv.append(prompt._conv, index)
        if len(self._scans):
            self._scans.state.append(prompt._scans.state.data[index])
        self.kv.device = index.device
        super().append(prompt, reserve, chosen)

    def truncate(self, length: int, recurrent: Sequence[Tensor] = ()) -> None:
        for part, states in zip(self._states, recurrent, strict=True):
            part.write(states.clone())
        super().truncate(length)

    def row_states(self, row: int) -> tuple[Tensor, ...]:
        return tuple(part.data[row : row + 1].clone() for part in self._states)

    @property
    def _states(self) -> list[RowTensor]:
        return [self._conv.state, *([self._scans.state] if len(self._scans) else [])]

    @property
    def layout(self) -> list[Any]:
        return [super().layout, [[*key, span.start, span.stop] for key, span in self._conv._channels.items()]]

    def load(self, layout: list[Any], parts: Sequence[Tensor], recurrent: Sequence[Tensor], length: int) -> None:
        self._conv._channels = {(layer, number): slice(*span) for layer, number, *span in layout[1]}
        for part, states in zip(self._states, recurrent, strict=True):
            part.append(states)
        self.kv.device = recurrent[0].device
        super().load(layout[0], parts, recurrent, length)

    def select(self, rows: Sequence[int]) -> None:
        self._conv.state.select(rows)
        if len(self._scans):
            self._scans.state.select(rows)
        super().select(rows)

    def _changed(self, lengths: list[int]) -> None:
        super()._changed(lengths)
        self._tree = None

    def commit_on_device(self, path: Tensor) -> None:
        super().commit_on_device(path)
        self._advance_states(path)

    def commit(self, path: Tensor, rows: list[list[int]]) -> None:
        super().commit(path, rows)
        if longest := max(map(len, rows)):
            self._advance_states(path[:, :longest])
        self._tree, self._native = None, None
        self._conv.calls = self._scans.calls = 0

    def _advance_states(self, path: Tensor) -> None:
        """Update the states along each row's path, (batch, depth) padded with -1."""
        if self._native is not None:
            weights, buffers = self._native
            if buffers is not None:  # a prompt has advanced the states
                cpu.advance_states(weights, buffers, path.contiguous())
            return
        expected, received = len(self._conv) + len(self._scans), self._conv.calls + self._scans.calls
        if received != expected:
            # A mixer that bypasses the replaced functions treats the tree as a sequence: wrong logits.
            raise RuntimeError(
                "each recurrent layer must call its convolutions and scans once per verify pass: "
                f"expected {expected} calls, received {received}"
            )
        batch, depth = path.shape
        chain = torch.where(path >= 0, torch.arange(depth, device=path.device), -1)
        at = torch.arange(batch, device=path.device)[:, None], path.clamp(min=0)
        for part in self._parts(batch, depth):
            y = self._conv.commit(part, chain, at, bool(len(self._scans))) if len(self._conv) else chain
            if len(self._scans):
                self._scans.commit(part, y, chain, at, bool(len(self._conv)))

    def _parts(self, batch: int, depth: int) -> Iterator[slice]:
        """Slices of layers, or of convolutions without scans, to batch in a commit."""
        layers = len(self._conv) or len(self._place)
        entries = batch * (depth + self._conv.width) * max(self._conv.state.data.shape[1] // layers, self._scans.gates)
        size = layers if self.static_shapes else max(1, _COMMIT_ELEMENTS // entries)
        for start in range(0, layers, size):
            yield slice(start, min(start + size, layers))
