"""Cache of models with recurrent layers: recurrent states, and keys and values of attention layers.

A verify pass does not change the states. It stores the inputs of the convolutions and the scans' gates; a commit
recomputes the convolutions along the accepted path and updates the states from their outputs. A node thus stores
convolution inputs instead of a state.

Additional axes: ``units`` counts the scans of all layers, usually one per layer; ``channels`` are a convolution's
concatenated channels, such as x, B and C of Mamba-2 or q, k and v of Gated DeltaNet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.cache.rows import row_index
from mmspec.cache.tree_cache import TreeCache
from mmspec.errors import UserError
from mmspec.ssm.ops import conv_window
from mmspec.ssm.recurrences import Recurrence
from mmspec.ssm.states import Convolutions, Key, Scans

STATES = "tree_states"
"""Keyword argument of a decoder's forward that passes a ``StateCache`` to its mixers, and attribute of convolution
inputs for mixers without keyword arguments, such as Mamba-1."""

_COMMIT_ELEMENTS = 1 << 17
"""Elements per batched commit on a CPU: small layers are batched to save calls, large layers run one by one to save
memory. With static shapes, all layers are batched."""


@dataclass
class _Tree:
    """Tree of the current verify pass."""

    ancestors: Tensor  # (batch, nodes, nodes) bool
    window: Tensor  # (batch, nodes, width), see conv_window


class StateCache(TreeCache):
    """``TreeCache`` of a model with recurrent layers of one kind.

    Args:
        recurrence: recurrence class of these layers; None for convolutions only.
        recurrent: indices of layers with a recurrent state.
        attending: indices of layers with keys and values; a layer may have both.
        scans: consecutive scans per layer, whose states transformers stacks.
    """

    def __init__(
        self,
        num_layers: int,
        recurrence: Callable[[int], Recurrence] | None,
        recurrent: Sequence[int],
        *,
        attending: Sequence[int],
        reserve: int,
        static_shapes: bool = False,
        scans: int = 1,
    ) -> None:
        super().__init__(num_layers, reserve=reserve, attending=attending, static_shapes=static_shapes)
        self._place = {layer: place for place, layer in enumerate(recurrent)}
        units = len(recurrent) * scans if recurrence is not None else 0
        self._scans = Scans(recurrence(units) if recurrence is not None else None, units, scans, static_shapes)
        self._conv = Convolutions(static_shapes)
        self._tree: _Tree | None = None
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
        batch, nodes, slots = reach.shape
        if slots != nodes:
            raise UserError(
                "recurrent layers require the whole tree in one pass: "
                f"got {nodes} nodes after {slots - nodes} uncommitted ones"
            )
        width, index = self._conv.width, torch.arange(nodes, device=reach.device)
        if nodes == 1:
            window = torch.arange(width, device=reach.device).expand(batch, 1, -1)
        else:
            # The parent is the last proper ancestor, as parents precede their children.
            window = conv_window(torch.where(reach.tril(-1), index, -1).amax(-1), width)
        self._tree = _Tree(reach, window)
        self._conv.calls = self._scans.calls = 0
        return {STATES: self}

    def conv(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None, **options: Any
    ) -> Tensor:
        """Replace ``causal_conv1d_fn``: (batch, channels, nodes) in and out."""
        assert self._tree is not None
        x = hidden_states.transpose(1, 2)
        return self._conv.convolve(self._current, x, weight, bias, activation, self._tree.window).transpose(1, 2)

    def scan(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Replace the mixer's scan; returns an empty tensor as the final state."""
        assert self._tree is not None
        return self._scans.read(self._place[self._current[0]], self._tree.ancestors, *args, **options)

    def windowed(
        self, key: Key, width: int, function: Callable[..., Any], x: Tensor, *others: Tensor, mask: Tensor | None = None
    ) -> Any:
        """Run a part of a layer whose outputs depend on the last ``width`` tokens of ``x`` and on the current token of
        ``others``. In a verify pass, each node's window is passed as a sequence.

        Args:
            key: key of the convolution whose state stores the inputs.
            function: called with ``x`` and ``others``, (batch, tokens, features) each; must not use a cache.
            mask: (batch, tokens), 0 at padding in a prompt.

        Returns:
            Result of ``function``: one or several (batch, tokens, ...).
        """
        if self._tree is None:
            inputs = x if mask is None else x * mask[:, :, None].to(x.dtype)
            self._conv.store(key, inputs.transpose(1, 2), width)
            return function(x, *others)
        windows = self._conv.windows(key, x, self._tree.window).flatten(0, 1)
        outputs = function(windows, *(value.flatten(0, 1)[:, None].expand(-1, width, -1) for value in others))
        several = isinstance(outputs, tuple)
        last = tuple(value[:, -1].unflatten(0, x.shape[:2]) for value in (outputs if several else (outputs,)))
        return last if several else last[0]

    def by_row(self, function: Callable[..., Tensor], states: Tensor) -> Tensor:
        """Compute a relative position bias row by row, because positions differ between rows.

        Args:
            function: called with one row's states, (1, nodes, ...), and positions of queries and keys, (n,) each.
            states: (rows, nodes, ...), query states.
        """
        assert self._tree is not None
        depth, slots = self._tree.ancestors.sum(-1) - 1, torch.arange(self.length, device=states.device)
        outputs = []
        for state, length, row in zip(states[:, None], self.lengths, depth, strict=True):
            outputs.append(function(state, length + row, torch.cat([slots, length + row])))
        return torch.cat(outputs)

    def commit_prompt(self, tokens: int, attention_mask: Tensor | None, batch: int) -> None:
        self._conv.commit_prompt(self._scans.state.data.new_zeros(batch, 0, 0))
        super().commit_prompt(tokens, attention_mask, batch)

    def append(self, prompt: TreeCache, reserve: int = 0, chosen: Sequence[int] | None = None) -> None:
        assert isinstance(prompt, StateCache)
        index = row_index(range(prompt.rows) if chosen is None else chosen, prompt._conv.state.data.device)
        self._conv.append(prompt._conv, index)
        if len(self._scans):
            self._scans.state.append(prompt._scans.state.data[index])
        self.kv.device = index.device
        super().append(prompt, reserve, chosen)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self._conv.state.data, self._scans.state.data]

    def truncate(self, length: int) -> None:
        raise UserError("recurrent states cannot be truncated: only whole prefixes can be reused")

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
        self._tree = None
        self._conv.calls = self._scans.calls = 0

    def _advance_states(self, path: Tensor) -> None:
        """Update the states along each row's path, (batch, depth) padded with -1."""
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
