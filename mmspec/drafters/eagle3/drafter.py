"""EAGLE-3, EAGLE-3.1 and P-EAGLE drafter (arXiv 2503.01840, 2602.01469) for any target: text, vision-language and
hybrid models. EAGLE-4 is EAGLE-3.1 with a sliding window and an output layer that retrieves candidates.

At image positions it is fed the placeholder token's embedding, as in training by all published projects: the target's
hidden states carry the image.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.core.budget import Budget
from mmspec.core.target import Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.eagle3 import Eagle3Config
from mmspec.drafters.eagle3.network import Eagle3Network
from mmspec.drafters.growth import grow_slots
from mmspec.drafters.hidden_state.drafter import PositionedDrafter
from mmspec.drafters.hidden_state.entries import allowed_slots, causal
from mmspec.drafters.shape import TreeShape
from mmspec.errors import UserError

_WATCHED = 128
"""Verify passes after which the acceptance length of a published checkpoint is checked."""

_LEAST = 1.1
"""Mean acceptance length below which a head reads the wrong states, or is for another target."""


class Eagle3(PositionedDrafter):
    name: ClassVar[str] = "eagle3"

    config_class = Eagle3Config
    network_class = Eagle3Network
    layout = "eagle3"
    usual_tree = TreeShape(top_k=10, depth=8, total_tokens=59)
    features = ()  # known when attached
    _passes, _emitted = 0, 0.0  # with drafts, while watched

    def check_width(self, width: int) -> None:
        config = self.network.config
        if config.source != width or (not config.embedding and config.hidden_size != width):
            raise UserError(
                f"{self.name} must have the target's hidden size {width}: the drafter reads states of {config.source} "
                f"and embeddings of {config.hidden_size}"
            )

    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        network: Any = self.network
        decoder: Any = target.config  # type: ignore[attr-defined]
        self.features, self.window = network.config.features(decoder.num_hidden_layers), network.config.window
        rows = network.config.head or (self.published or {}).get("vocab_size", decoder.vocab_size)
        self.keep_to(rows, target)
        self._embed = network.embed_tokens if network.config.embedding else target.embed
        self._embedded = network.config.embedding or decoder.vocab_size
        if (network.config.mask_token_id or 0) >= self._embedded:
            raise UserError(f"mask_token_id must be a token below {self._embedded}: got {network.config.mask_token_id}")
        self.node_inputs = self._node_inputs
        if network.config.head:
            head = network.retrieve if network.config.candidates else network.lm_head
        else:
            head = self.target_head(target)
        return partial(network.scores, head)

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        # The id of a placeholder may lie outside of the table.
        embeds = self._embed(tokens.masked_fill(tokens >= self._embedded, 0))
        return self.network.combine(embeds, self.network.project(states))

    def _node_inputs(self, tokens: Tensor, predicted: Tensor) -> Tensor:
        return self.network.combine(self._embed(self.target_tokens(tokens)), predicted)

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        if self.network.config.mask_token_id is None:
            return super().grow(token, budget)
        self.cache.offset = 0
        outputs, later = self._output.data[: len(token), None], min(self.depth, budget.max_depth) - 1
        if later > 0:
            outputs = torch.cat([outputs, self._later(len(token), later)], dim=1)
        tokens, log_probs = self.children(*self.network.begin(outputs))
        return grow_slots(token, self.target_tokens(tokens), log_probs, budget, self.total_tokens)

    def _later(self, batch: int, count: int) -> Tensor:
        """Outputs of the levels after the first, (batch, count, hidden), which attend to those before."""
        network, device = self.network, self._position.data.device
        mask = torch.full((1, 1), network.config.mask_token_id, device=device)
        x = network.combine(self._embed(mask), network.project(network.mask_hidden)).expand(batch, count, -1)
        allowed = allowed_slots(self.cache, causal(batch, count, device), self.window)
        return self.run(x, self.rotation(batch, count), allowed, self.cache)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        super().observe(tree, verdict, output)
        if self.published is not None and tree.nodes > 1 and self._passes < _WATCHED:
            self._watch(verdict)

    def _watch(self, verdict: Verdict) -> None:
        """Warn once of an acceptance length near 1: shapes do not tell which layers a head was trained on."""
        if not any(path for path, _ in verdict.host):  # rows are idle
            return
        self._passes += 1
        self._emitted += sum(len(path) for path, _ in verdict.host) / len(verdict.host)
        if self._passes == _WATCHED and self._emitted < _LEAST * _WATCHED:
            reads = ", ".join(map(str, self.features))
            warnings.warn(
                f"the EAGLE-3 drafter is of little use: {self._emitted / _WATCHED:.2f} tokens per step. It may be for "
                f"another target, or read other layers of it than {reads}: try eagle3:FOLDER@LAYERS",
                RuntimeWarning,
                stacklevel=2,
            )
