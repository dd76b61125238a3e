"""Base classes of drafters with a network, which grow trees of a configured shape."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from mmspec.core.target import Target
from mmspec.drafters import checkpoint
from mmspec.drafters.captured import CapturedDrafter
from mmspec.drafters.shape import TREE, TreeShape


class TreeDrafter(CapturedDrafter):
    """Drafter with a network, which grows trees of a configured shape.

    Args:
        network: the trained network.
        top_k: nodes extended per level, and children per node.
        depth: maximum tree depth.
        total_tokens: maximum number of drafted nodes.
    """

    name: ClassVar[str]  # as registered
    learns: ClassVar[bool] = False

    def __init__(self, network: Any, *, top_k: int, depth: int, total_tokens: int) -> None:
        TreeShape(top_k, depth, total_tokens)
        self.network = network
        self.top_k, self.depth, self.total_tokens = top_k, depth, total_tokens
        super().__init__()

    @property
    def target(self) -> Target:
        """The attached target."""
        assert self._target is not None, "attach comes first"
        return self._target

    @property
    def limits(self) -> tuple[int, int]:
        return self.depth, self.total_tokens

    @property
    def tree_size(self) -> int:
        return self.total_tokens

    def draft_chains(self, length: int) -> None:
        self.top_k, self.depth, self.total_tokens = 1, length, length


class TrainedDrafter(TreeDrafter):
    """``TreeDrafter`` with checkpoints of its own.

    Args:
        network: its ``config`` is a dataclass.
        draft_ids: (n,) int64, draft vocabulary; None is the target's whole vocabulary.
        verifier: the target that it was trained for, see ``checkpoint.Verifier``.
        **tree: top_k, depth, total_tokens.
    """

    def __init__(self, network: Any, draft_ids: Tensor | None, *, verifier: dict[str, Any] | None, **tree: int) -> None:
        self.draft_ids, self.verifier = draft_ids, verifier
        super().__init__(network, **tree)

    def renewed(self, network: Any) -> Self:
        """A drafter like this one, without rows and attached to no target, with another network of the same shape."""
        fresh = copy.copy(self)
        fresh.network, fresh._target = network.eval().requires_grad_(False), None
        fresh.reset()
        return fresh

    def save(self, folder: Path, target: Any) -> None:
        """Write a drafter checkpoint for ``target``."""
        tensors = dict(self.network.state_dict())
        if self.draft_ids is not None:
            tensors["draft_ids"] = self.draft_ids
        settings = {name: getattr(self, name) for name in TREE}
        checkpoint.write(folder, self.name, {"network": asdict(self.network.config), **settings}, tensors, target)
