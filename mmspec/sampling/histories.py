"""What each node of a tree has before it: its row's tokens, then its own path, on the device.

The host's list of a row's tokens is followed there as it grows, so that a step copies its new tokens and waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from mmspec.ops.transfer import on_device
from mmspec.speculation.tree import TokenTree

NOTHING = -1
"""In the place of a token where there is none."""


class Histories:
    """Lists of tokens that only grow, followed on the device."""

    def __init__(self) -> None:
        self._tokens = torch.empty(0, 0)  # (batch, capacity) int64, from the left, then NOTHING
        self._known: list[int] = []
        self._rows: list[list[int]] = []

    def at(self, history: Sequence[list[int]], tree: TokenTree, index: Sequence[int] | None = None) -> NodeHistories:
        """The histories of a tree's nodes.

        Args:
            history: each row's tokens, the root being the last.
            tree: (batch, nodes).
            index: each row's number in its request; None: the rows are a whole request.
        """
        return NodeHistories(self, history, tree, range(len(history)) if index is None else index)

    def follow(self, history: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows, (batch, longest) int64, behind ``NOTHING`` in shorter ones, and their lengths, (batch, 1)."""
        if len(self._rows) != len(history) or any(a is not b for a, b in zip(self._rows, history, strict=True)):
            self._rows, self._known = list(history), [0] * len(history)  # sequences have joined or left
            self._tokens = torch.empty(len(history), 0, dtype=torch.long, device=device)
        new = [row[known:] for row, known in zip(history, self._known, strict=True)]
        widest = max(map(len, new))
        room = max(self._known) + widest
        if room > self._tokens.shape[1]:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, 2 * room - self._tokens.shape[1]), value=NOTHING)
        # One transfer: of each row its length, how much of it was known, and the new tokens.
        told = on_device(
            [
                [len(row), known, *tokens, *[NOTHING] * (widest - len(tokens))]
                for row, known, tokens in zip(history, self._known, new, strict=True)
            ],
            device,
        )
        lengths, known = told[:, :1], told[:, 1:2]
        self._tokens.scatter_(1, known + torch.arange(widest, device=device), told[:, 2:])
        self._known = [len(row) for row in history]
        longest = max(self._known)
        place = torch.arange(longest, device=device) - (longest - lengths)
        return self._tokens.gather(1, place.clamp(min=0)).where(place >= 0, NOTHING), lengths


class NodeHistories:
    """The token histories of all nodes of a tree, each part computed when it is asked for."""

    def __init__(self, rows: Histories, history: Sequence[list[int]], tree: TokenTree, index: Sequence[int]) -> None:
        self._rows, self._history, self._tree, self._index = rows, history, tree, index

    @cached_property
    def _told(self) -> tuple[Tensor, Tensor]:
        return self._rows.follow(self._history, self._tree.tokens.device)

    @property
    def prefix(self) -> Tensor:
        """(batch, longest) int64, each row's tokens up to the root, behind ``NOTHING`` in shorter rows."""
        return self._told[0]

    @property
    def prefix_lengths(self) -> Tensor:
        """(batch, 1) int64, tokens of each row, the root included."""
        return self._told[1]

    @cached_property
    def index(self) -> Tensor:
        """(batch,) int64, each row's number in its request."""
        return on_device(list(self._index), self._tree.tokens.device)

    @cached_property
    def lengths(self) -> Tensor:
        """(batch, nodes) int64, tokens of each node's history."""
        return self.prefix_lengths + (self._tree.depth if self._tree.max_depth else torch.zeros_like(self._tree.tokens))

    @cached_property
    def path(self) -> Tensor:
        """(batch, nodes, max_depth) int64, the tokens from the root's child down to each node, then ``NOTHING``."""
        tree, deepest = self._tree, self._tree.max_depth
        if deepest == 0:
            return tree.tokens[:, :, None][:, :, :0]
        # An ancestor's token goes to the place of its depth; those of other nodes, and the root's, behind the end.
        place = torch.where(tree.ancestors & (tree.depth > 0)[:, None], tree.depth[:, None] - 1, deepest)
        path = torch.full((*tree.tokens.shape, deepest + 1), NOTHING, device=place.device)
        return path.scatter(2, place, tree.tokens[:, None].expand_as(place))[:, :, :-1]

    @cached_property
    def whole(self) -> Tensor:
        """(batch, nodes, longest + max_depth) int64, prefix and path: ``NOTHING`` stands at both ends only."""
        return torch.cat([self.prefix[:, None].expand(-1, self._tree.nodes, -1), self.path], dim=2)

    def last(self, count: int) -> Tensor:
        """(batch, nodes, count) int64, the latest tokens, ``NOTHING`` before the first of all."""
        ends = self.lengths - self.prefix_lengths + self.prefix.shape[1]
        place = ends[:, :, None] - count + torch.arange(count, device=ends.device)
        return self.whole.gather(2, place.clamp(min=0)).where(place >= 0, NOTHING)
