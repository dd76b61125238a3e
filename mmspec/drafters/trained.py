"""Base classes of drafters with a network, which grow trees of a configured shape."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from mmspec.core.target import Target
from mmspec.drafters import checkpoint, layouts
from mmspec.drafters.captured import CapturedDrafter
from mmspec.drafters.layouts import Published
from mmspec.drafters.shape import TREE, TreeShape


class TreeDrafter(CapturedDrafter):
    """Drafter with a network, which grows trees of a configured shape."""

    name: ClassVar[str]  # as registered
    learns: ClassVar[bool] = False
    usual_tree: ClassVar[TreeShape] = TreeShape(top_k=10, depth=6, total_tokens=59)

    def __init__(self, network: Any, **tree: int) -> None:
        shape = replace(self.usual_tree, **tree)
        self.network = network
        self.top_k, self.depth, self.total_tokens = shape.top_k, shape.depth, shape.total_tokens
        super().__init__()

    @property
    def target(self) -> Target:
        assert self._target is not None, "attach comes first"
        return self._target

    @property
    def checks(self) -> str:
        trained = "the target that it was trained for, the number of training steps (too few?)"
        return f"{trained}, chat template, rotary positions, positions after images"

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

    Attributes:
        layout: layout of published checkpoints, a key of ``LAYOUTS``; None without published checkpoints.
        published: target of a published checkpoint, see ``layouts.check_target``.

    Args:
        draft_ids: (n,) int64, draft vocabulary; None is the target's whole vocabulary.
        verifier: target that the drafter was trained for, see ``checkpoint.Verifier``.
    """

    config_class: ClassVar[type[Any]]
    network_class: ClassVar[type[nn.Module]]
    layout: ClassVar[str | None] = None
    published: dict[str, Any] | None = None

    def __init__(
        self, network: Any, draft_ids: Tensor | None = None, *, verifier: dict[str, Any] | None = None, **tree: int
    ) -> None:
        self.draft_ids, self.verifier = draft_ids, verifier
        super().__init__(network, **tree)

    @classmethod
    def from_checkpoint(cls, folder: Path, **changes: Any) -> Self:
        """Load a checkpoint of ``save`` or a published one.

        Args:
            changes: fields of the network's configuration that override the checkpoint.
        """
        keywords: dict[str, Any] = {}
        published = None
        if cls.layout is not None and checkpoint.drafter_name(folder) is None:
            config, tensors, draft_ids, published = cls.read_published(folder)
        else:
            config, tensors, draft_ids, keywords = checkpoint.read_network(folder, cls.config_class)
        network = checkpoint.load_network(cls.network_class, replace(config, **changes), tensors, folder)
        drafter = cls(network, draft_ids, **keywords)
        drafter.published = published
        return drafter

    @classmethod
    def read_published(cls, folder: Path) -> Published:
        """Read and convert a published checkpoint; raises ``UserError`` if it is invalid."""
        return layouts.read(folder, cls)

    @classmethod
    def convert(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Published:
        """Like ``read_published``, from the contents of the files; ``where`` is the checkpoint's name in messages."""
        return layouts.convert(config, tensors, cls, where)

    @property
    def checks(self) -> str:
        return "" if self.published is None and self.verifier is None else super().checks

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """Map draft-vocabulary indices to target tokens, (...) int64."""
        return drafted if self.draft_ids is None else self.draft_ids[drafted]

    def renewed(self, network: Any) -> Self:
        """A copy of this drafter with another network of the same shape, without rows and unattached."""
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
