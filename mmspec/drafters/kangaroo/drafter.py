"""Kangaroo drafter (arXiv 2404.18911) for any target of transformers: text, vision-language and hybrid models.

The target's first layers run over the tree with the target's keys and values, as in ``early_exit``. The network has
keys and values of its own, at positions that count tokens; entry j of a row takes the target's early state at token j.
The budget ends a tree where a further level gains too little, in place of the paper's confidence threshold for chains.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.core.budget import Budget
from mmspec.core.target import Target, output_of
from mmspec.core.tree import TokenTree
from mmspec.drafters.early_exit import FirstLayers
from mmspec.drafters.growth import Reach, grow_tree
from mmspec.drafters.hidden_state.passes import allowed_slots
from mmspec.drafters.hidden_state.positioned import PositionedDrafter
from mmspec.drafters.kangaroo.config import KangarooConfig
from mmspec.drafters.kangaroo.network import KangarooNetwork
from mmspec.drafters.kangaroo.published import read_published


class Kangaroo(PositionedDrafter):
    name: ClassVar[str] = "kangaroo"

    config_class = KangarooConfig
    network_class = KangarooNetwork

    def __init__(self, network: KangarooNetwork, draft_ids: Tensor | None = None, **settings: Any) -> None:
        super().__init__(network, 1, draft_ids, **settings)
        self.features = (output_of(network.config.exit_layer - 1),)

    @classmethod
    def read_published(cls, folder: Path) -> tuple[KangarooConfig, dict[str, Tensor], None, dict[str, Any]]:
        config, tensors, target = read_published(folder)
        return config, tensors, None, target

    def scoring(self, target: Target, probe: Tensor) -> Callable[[Tensor], Tensor]:
        self._first = FirstLayers(target, self.network.config.exit_layer)
        return self.target_head(target)

    def join(self, rows: int, static_shapes: bool) -> None:
        super().join(rows, static_shapes and self._first.static_shapes)

    def reserve(self, width: int) -> None:
        super().reserve(width)
        self._first.reserve(self.depth * self.top_k)

    @property
    def _version(self) -> tuple[Hashable, ...]:
        return *super()._version, *self._first.version

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        self.cache.offset = 0
        passes, reach = self._first.passes(self.features[0]), Reach()
        rotations = iter(zip(*(x.split(1, dim=1) for x in self.rotation(len(token), self.depth)), strict=True))

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            allowed = allowed_slots(self.cache, reach(origin))
            states = self.run(passes(beam, origin), next(rotations), allowed, self.cache)
            self.cache.offset += beam.shape[1]
            tokens, log_probs = self.children(states, states)
            return tokens if self.draft_ids is None else self.draft_ids[tokens], log_probs

        tokens, log_probs = extend(token[:, None], torch.zeros_like(token[:, None]))
        limits = {"depth": self.depth, "nodes": self.total_tokens}
        tree = grow_tree(token, (tokens[:, 0], log_probs[:, 0]), extend, budget, self.top_k, **limits)
        passes.end()
        self.cache.offset = 0
        return tree
