"""Medusa and Hydra drafters (arXiv 2401.10774, 2402.05109) for any target: text, vision-language and hybrid models.

Medusa's heads are independent of each other: the most probable paths by the products of their probabilities are the
tree (see ``grow_slots``), in place of the papers' fixed trees. The children of a node of Hydra depend on its path: its
tree grows level by level, one head each.

Entry j of a row is the target's state at token j. Only with a decoder layer (Hydra++) it has keys and values, at
positions that count tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec import ops
from mmspec.core.budget import Budget
from mmspec.core.target import Target
from mmspec.core.tree import TokenTree
from mmspec.drafters.growth import grow_slots, grow_tree
from mmspec.drafters.hidden_state.drafter import PositionedDrafter
from mmspec.drafters.hidden_state.entries import take
from mmspec.drafters.hidden_state.layer import rotary_of
from mmspec.drafters.medusa import MedusaConfig
from mmspec.drafters.medusa.network import MedusaNetwork
from mmspec.drafters.shape import RotaryShape
from mmspec.errors import UserError


class Medusa(PositionedDrafter):
    """Medusa drafter; trees have at most a level per head."""

    name: ClassVar[str] = "medusa"
    layout: ClassVar[str | None] = "medusa"

    config_class = MedusaConfig
    network_class = MedusaNetwork

    @staticmethod
    def shape_of(network: MedusaNetwork) -> RotaryShape:
        return network.config.layer

    def attach(self, target: Target) -> None:
        if self.published is not None and self.network.config.prefix and target is not self._target:
            self._take_shape(target)
        super().attach(target)

    def _take_shape(self, target: Any) -> None:
        """Take the shape of a published decoder layer from the target, which it was made like: files do not have it."""
        own, rope = self.network.config.layer, getattr(target.config, "rope_parameters", None) or {}
        plain = {name: value for name, value in rope.items() if not name.startswith("mrope")}
        shape = RotaryShape.like(target.config, mlp=own.mlp, rope=plain)
        expected, received = ([one.heads * one.head_dim, one.kv_heads * one.head_dim] for one in (own, shape))
        if expected != received:
            raise UserError(f"the drafter has queries and keys of widths {expected}: the target has {received}")
        self.network.take_shape(shape)
        self._rotary, self._axis = rotary_of(shape)

    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        own = self.network.config.head
        self.keep_to(own or (self.published or {}).get("vocab_size"), target)
        return target.head if own else self.target_head(target)

    def reserve(self, width: int) -> None:
        self.cache.reserve_nodes(width)
        self._rotary.reserve(max(map(len, self._history)) + self.position_slack + width, self.sample_embedding)

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        config, nodes = self.network.config, min(self.total_tokens, budget.nodes)
        deepest = max(1, min(self.depth, config.heads, budget.max_depth, nodes))
        state = self._state(len(token))
        tokens, log_probs = self._ranked(0, [head(state) for head in self.network.heads[:deepest]])
        return grow_slots(token, tokens, log_probs, budget, self.total_tokens)

    def _state(self, batch: int) -> Tensor:
        """What heads read of each row, (batch, 1, hidden)."""
        return self.network.state(self._output.data[:batch, None])

    def _ranked(self, first: int, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The target's tokens that are most probable and their log probabilities, (batch, all nodes, top_k); arguments
        as for ``MedusaNetwork.scores``."""
        tokens, log_probs = ops.top_log_probs(self.network.scores(first, states, self._scores), self.top_k)
        return self.target_tokens(tokens), log_probs


class Hydra(Medusa):
    """Hydra drafter; arguments as for ``Medusa``."""

    name: ClassVar[str] = "hydra"
    layout: ClassVar[str | None] = "hydra"

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        heads = self.network.heads
        if not self.network.config.grounded:
            return super().grow(token, budget)
        read, levels = self._state(len(token)), count()  # (batch, nodes, any): what heads read of each node

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal read
            embeds, level = self.target.embed(beam).to(read.dtype), next(levels)
            read = torch.cat([take(read, origin), embeds], dim=-1)
            return self._ranked(level, [heads[level](read)])

        deepest = min(self.depth, len(heads))
        return grow_tree(token, None, extend, budget, self.top_k, depth=deepest, nodes=self.total_tokens)
