"""Token history of every tree node on the device: the row's tokens plus the node's path.

A device copy of each row's token list is extended every step by its new tokens, without host syncs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from mmspec.core.tree import TokenTree
from mmspec.ops.transfer import on_device

NOTHING = -1
"""Padding token."""


class Histories:
    """Device copy of append-only token lists."""

    def __init__(self) -> None:
        self._tokens = torch.empty(0, 0)  # (batch, capacity) int64, right-padded with NOTHING
        self._known: list[int] = []
        self._rows: list[list[int]] = []

    def follow(self, history: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows, (batch, longest) int64, left-padded with ``NOTHING``, and their lengths, (batch, 1)."""
        if len(self._rows) != len(history) or any(a is not b for a, b in zip(self._rows, history, strict=True)):
            self._rows, self._known = list(history), [0] * len(history)  # rows were added or removed
            self._tokens = torch.empty(len(history), 0, dtype=torch.long, device=device)
        new = [row[known:] for row, known in zip(history, self._known, strict=True)]
        widest = max(map(len, new))
        room = max(self._known) + widest
        if room > self._tokens.shape[1]:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, 2 * room - self._tokens.shape[1]), value=NOTHING)
        # One transfer per step: length, known length and new tokens of each row.
        update = on_device(
            [
                [len(row), known, *tokens, *[NOTHING] * (widest - len(tokens))]
                for row, known, tokens in zip(history, self._known, new, strict=True)
            ],
            device,
        )
        lengths, known = update[:, :1], update[:, 1:2]
        self._tokens.scatter_(1, known + torch.arange(widest, device=device), update[:, 2:])
        self._known = [len(row) for row in history]
        longest = max(self._known)
        place = torch.arange(longest, device=device) - (longest - lengths)
        return self._tokens.gather(1, place.clamp(min=0)).where(place >= 0, NOTHING), lengths


class NodeHistories:
    """Token histories of all nodes of a tree, computed lazily.

    Args:
        rows: device copy of ``history``.
        history: tokens of each row, up to the root.
        tree: (batch, nodes).
        index: each row's number in its request.
    """

    def __init__(self, rows: Histories, history: Sequence[list[int]], tree: TokenTree, index: Sequence[int]) -> None:
        self._rows, self._history, self._tree, self._index = rows, history, tree, index

    @cached_property
    def _followed(self) -> tuple[Tensor, Tensor]:
        return self._rows.follow(self._history, self._tree.tokens.device)

    @property
    def prefix(self) -> Tensor:
        """(batch, longest) int64, each row's tokens up to the root, left-padded with ``NOTHING``."""
        return self._followed[0]

    @property
    def prefix_lengths(self) -> Tensor:
        """(batch, 1) int64, length of each row, root included."""
        return self._followed[1]

    @cached_property
    def index(self) -> Tensor:
        """(batch,) int64, each row's number in its request."""
        return on_device(list(self._index), self._tree.tokens.device)

    @cached_property
    def lengths(self) -> Tensor:
        """(batch, nodes) int64, length of each node's history."""
        return self.prefix_lengths + (self._tree.depth if self._tree.max_depth else torch.zeros_like(self._tree.tokens))

    @cached_property
    def path(self) -> Tensor:
        """(batch, nodes, max_depth) int64, path from below the root to each node, right-padded with ``NOTHING``."""
        tree, deepest = self._tree, self._tree.max_depth
        if deepest == 0:
            return tree.tokens[:, :, None][:, :, :0]
        # Scatter ancestors' tokens by depth; other nodes and the root go to an extra column.
        place = torch.where(tree.ancestors & (tree.depth > 0)[:, None], tree.depth[:, None] - 1, deepest)
        path = torch.full((*tree.tokens.shape, deepest + 1), NOTHING, device=place.device)
        return path.scatter(2, place, tree.tokens[:, None].expand_as(place))[:, :, :-1]

    @cached_property
    def whole(self) -> Tensor:
        """(batch, nodes, longest + max_depth) int64, prefix and path, padded with ``NOTHING`` on both sides."""
        return torch.cat([self.prefix[:, None].expand(-1, self._tree.nodes, -1), self.path], dim=2)

    def after(self, first: int | Tensor) -> Tensor:
        """``whole`` without the first tokens of each row, whose number is ``first``: an int or (batch, 1) int64."""
        # Positions count from the first token of each row, after the padding.
        place = torch.arange(self.whole.shape[2], device=self.whole.device)
        place = place - (self.prefix.shape[1] - self.prefix_lengths)
        return self.whole.where((place >= first)[:, None], NOTHING)

    def last(self, count: int) -> Tensor:
        """(batch, nodes, count) int64, the last ``count`` tokens, left-padded with ``NOTHING``."""
        ends = self.lengths - self.prefix_lengths + self.prefix.shape[1]
        place = ends[:, :, None] - count + torch.arange(count, device=ends.device)
        return self.whole.gather(2, place.clamp(min=0)).where(place >= 0, NOTHING)
