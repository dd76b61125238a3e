"""Passes of a language model over a growing tree, level by level, after the prefix in its cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.core.target import Feature
from mmspec.drafters.growth import Reach
from mmspec.targets.runner import Runner


class LevelPasses:
    """A pass per level of a draft tree.

    Args:
        runner: of the model; its uncommitted nodes are dropped.
        recurrent: the model has recurrent layers, whose states cannot be extended by uncommitted nodes: each pass runs
            all nodes.
        read: the feature that passes return.
    """

    def __init__(self, runner: Runner, recurrent: bool, read: Feature = "last") -> None:
        self._runner, self._recurrent, self._read = runner, recurrent, read
        self._reach, self._levels = Reach(), 0
        self._nodes: tuple[Tensor, Tensor, Tensor] | None = None  # of all levels: tokens, depths and ancestors
        runner.forget_nodes()

    def __call__(self, tokens: Tensor, origin: Tensor) -> Tensor:
        """Hidden states of a level, (batch, width, hidden).

        Args:
            tokens: (batch, width) int64.
            origin: (batch, width) int64, as of ``grow_tree``.
        """
        depth = torch.full_like(tokens, self._levels)
        nodes = tokens, depth, self._reach(origin)
        if self._recurrent:
            nodes = self._nodes = nodes if self._nodes is None else _joined(self._nodes, nodes)
        states = self._runner.forward_nodes(*nodes, self._read)[:, -tokens.shape[1] :]
        if not self._recurrent:
            self._runner.keep_nodes(depth)
        self._levels += 1
        return states

    def end(self) -> None:
        """Drop the nodes."""
        self._runner.forget_nodes()


def _joined(
    nodes: tuple[Tensor, Tensor, Tensor], level: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Earlier nodes and a level, each as of ``Runner.forward_nodes``."""
    (tokens, depth, reach), (more, deeper, reached) = nodes, level
    reach = torch.cat([F.pad(reach, (0, more.shape[1])), reached], dim=1)
    return torch.cat([tokens, more], dim=1), torch.cat([depth, deeper], dim=1), reach
