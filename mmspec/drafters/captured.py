"""Base of drafters that absorb the accepted tokens of a step and then grow a tree.

With static shapes (``kernels.fixed_shapes``), both are one captured pass: its batch is padded to a power of two with
idle rows, and nothing in it may read a value on the host. Otherwise the steps since the last tree are absorbed at once,
and the budget decides about each level of the tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.cache.rows import RowTensor, batch_bucket, pad_rows
from mmspec.ops.graphs import Graphed
from mmspec.ops.transfer import on_device
from mmspec.speculation.budget import Budget
from mmspec.speculation.tree import TokenTree
from mmspec.speculation.verify import Verdict

Inputs = tuple[Tensor, ...]


class RowState(Protocol):
    """State of the sequences: a ``RowTensor``, a ``TreeCache``, a target."""

    @property
    def version(self) -> Hashable:
        """Changes whenever a buffer has moved."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""


class CapturedDrafter(ABC):
    """See the module. The inputs of a step are tensors whose meaning the drafter knows, (batch, width, ...) each, and
    the number of accepted tokens, (batch,) int64; idle rows have 0.

    Attributes:
        rows: sequences.
        static: whether shapes are static.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, static: bool = False) -> None:
        """Drop all rows, and what was captured."""
        self.rows, self.static = 0, static
        self._pending: list[tuple[Inputs, list[int]]] = []  # inputs of steps to absorb, and accepted tokens by row
        self._grow, self._absorb = Graphed(self._grown), Graphed(self._absorbed)

    # ------------------------------------------------------------------ what a drafter defines

    @property
    @abstractmethod
    def parts(self) -> Sequence[RowState]:
        """Its state."""

    @property
    @abstractmethod
    def limits(self) -> tuple[int, int]:
        """Levels of a tree below its root, and drafted nodes, at most."""

    @abstractmethod
    def absorb(self, *inputs: Tensor) -> None:
        """Absorb the accepted tokens of a step. Captured."""

    @abstractmethod
    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        """The next tree of each row after ``token``, (batch,) int64. Captured."""

    def reserve(self, width: int) -> None:  # noqa: B027
        """Grow buffers, if need be, before a pass that absorbs ``width`` tokens per row and grows a tree."""

    def advance(self, accepted: list[int]) -> None:  # noqa: B027
        """Advance the host's row lengths after a captured ``absorb``."""

    # ------------------------------------------------------------------ sequences join and leave

    def join(self, rows: int, static: bool) -> None:
        """Prepare for sequences that join: their state is to be appended to each of ``parts``."""
        if static != self.static:
            self.reset(static)
        self.rows += rows
        self._pending = [
            (tuple(pad_rows(x, self.rows) for x in inputs), accepted + [0] * rows) for inputs, accepted in self._pending
        ]

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """See ``Drafter``."""
        for part in self.parts:
            part.select(rows)
        pending, self._pending, self.rows = self._pending, [], len(rows)
        for inputs, before in pending:
            if any(accepted := [before[row] for row in rows]):
                kept = on_device(list(rows), inputs[0].device)
                self._pending.append((tuple(x[kept] for x in inputs), accepted))

    # ------------------------------------------------------------------ steps

    def note(self, inputs: Inputs, verdict: Verdict) -> None:
        """Note a step, which is absorbed when the next tree is asked for."""
        self._pending.append(((*inputs, verdict.length), [len(path) for path, _ in verdict.host]))

    @torch.inference_mode()
    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        """See ``Drafter``. With static shapes, depth and size do not depend on how much is left to generate."""
        if not self.static:
            inputs = self._merged()
            self.reserve(inputs[0].shape[1] if inputs else 0)
            if inputs:
                self.absorb(*inputs)
            return self.grow(token, budget)
        *earlier, (inputs, accepted) = self._pending or [((), [])]
        self._absorb_all(earlier)
        self._pending = []
        rows, (levels, most) = len(token), self.limits
        depth, nodes = min(levels, budget.depth), min(most, budget.nodes)
        token, *padded = self._padded((token, *inputs))
        self.reserve(inputs[0].shape[1] if inputs else 0)
        grown = self._grow(token, *padded, version=self._version, nodes=nodes, depth=depth)
        if accepted:
            self.advance(accepted)
        tokens, parents, log_probs = (x[:rows] for x in grown)
        tree = TokenTree(tokens, parents, log_probs=log_probs, check=False)
        tree.max_depth = min(depth, tree.nodes - 1)
        return tree

    def _absorb_all(self, steps: list[tuple[Inputs, list[int]]]) -> None:
        for inputs, accepted in steps:
            self.reserve(inputs[0].shape[1])
            self._absorb(*self._padded(inputs), version=self._version)
            self.advance(accepted)

    def _merged(self) -> Inputs:
        """All pending steps as one; empty if there are none."""
        steps, self._pending = self._pending, []
        if not steps:
            return ()
        accepted = [sum(counts) for counts in zip(*(counts for _, counts in steps), strict=True)]
        if len(steps) == 1:
            merged = [x[:, : max(accepted)] for x in steps[0][0][:-1]]
        else:
            merged = [
                pad_sequence(
                    [torch.cat([x[at][row, : counts[row]] for x, counts in steps]) for row in range(self.rows)],
                    batch_first=True,
                )
                for at in range(len(steps[0][0]) - 1)
            ]
        return *merged, torch.tensor(accepted, device=merged[0].device)

    def _padded(self, inputs: Inputs) -> Inputs:
        return tuple(pad_rows(x, batch_bucket(self.rows)) for x in inputs)

    @property
    def _version(self) -> tuple[Hashable, ...]:
        return tuple(part.version for part in self.parts)

    def _grown(self, token: Tensor, *inputs: Tensor, nodes: int, depth: int) -> Inputs:
        """Absorb a step, if one is given, and grow the next tree: its tokens, parents and log probabilities."""
        if inputs:
            self.absorb(*inputs)
        tree = self.grow(token, Budget(nodes, depth))
        assert tree.log_probs is not None
        return tree.tokens, tree.parents, tree.log_probs

    def _absorbed(self, *inputs: Tensor) -> Inputs:
        self.absorb(*inputs)
        return ()

    @property
    def captured(self) -> tuple[int, int]:
        """How many kinds of passes are captured: those that grow a tree, and those that do not."""
        return self._grow.captured, self._absorb.captured


def path_of(length: Tensor, width: int) -> Tensor:
    """(batch, width) int64: of a chain of nodes, the first ``length``, (batch,); then -1."""
    step = torch.arange(width, device=length.device)
    return torch.where(step < length[:, None], step, -1)


def write_last(state: RowTensor, outputs: Tensor, length: Tensor) -> None:
    """Set each row of ``state``, (rows, n), to its last output.

    Args:
        outputs: (batch, width, n).
        length: (batch,) int64, a row's outputs; one without any keeps its state.
    """
    at = (length - 1).clamp(min=0)[:, None, None].expand(-1, -1, outputs.shape[2])
    state.write(torch.where(length[:, None] > 0, outputs.gather(1, at)[:, 0], state.data[: len(length)]))
