"""Native MTP drafter: the multi-token prediction layers of the target's checkpoint, over the levels of a tree.

All layers have an entry per token: layer k takes the token and the output of layer k - 1 at the token before, layer 0
the target's last hidden state there. Level m of a tree is predicted by layer m, deeper levels by the last one, which
takes its own outputs. Entries of accepted tokens are computed again from the target's states, in all layers.

The entries take the target's input embeddings, those of images and videos included, and are at the positions of the
tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec import ops
from mmspec.cache.rows import RowTensor
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.budget import Budget
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import AHEAD, RowState, commit_chain, write_last
from mmspec.drafters.growth import Reach, grow_tree
from mmspec.drafters.hidden_state.entries import (
    axis_positions,
    causal,
    counted_positions,
    following_embeds,
    take,
)
from mmspec.drafters.layouts import check_target
from mmspec.drafters.mtp.network import read_mtp
from mmspec.drafters.trained import TreeDrafter
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.targets.attention import NAME, PASS, TreePass
from mmspec.targets.masks import tail_mask, tree_mask, window_of
from mmspec.targets.packing import drafter_kind, pack_drafter


class MTP(TreeDrafter):
    """Native MTP drafter.

    Args:
        network: the layers, moved to the target's device and dtype.
        **tree: top_k, depth, total_tokens: see ``TreeDrafter``.

    Attributes:
        published: the target, for ``layouts.check_target``, if it is known.
    """

    name: ClassVar[str] = "mtp"
    features: Sequence[Feature] = ("last",)
    published: dict[str, Any] | None = None

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Self:
        """Load the layers of a target's checkpoint; raises ``UserError`` if invalid."""
        network, verifier = read_mtp(folder)
        drafter = cls(network.eval().requires_grad_(False))
        drafter.published = verifier
        return drafter

    def attach(self, target: Target) -> None:
        if target is self._target:
            return  # captured graphs refer to the current weights
        if self.published is not None:
            check_target(self.published, target)
        probe = target.embed(torch.zeros(1, dtype=torch.long, device=target.device))
        if (width := self.network.config.hidden_size) != probe.shape[-1]:
            raise UserError(f"mtp must have the target's hidden size {probe.shape[-1]}: the layers have {width}")
        pack_drafter(self.network, probe, drafter_kind(target, probe))
        self._target, self._scores = target, target.head
        self.reset()

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        count = self.network.count
        self.caches = [TreeCache(count, attending=[k], static_shapes=static_shapes) for k in range(count)]
        self._output = RowTensor(static_shapes)  # (rows, layers * hidden), of each layer at each row's last token
        self._position = RowTensor(static_shapes)  # (rows,) int64, of the next entry

    @property
    def parts(self) -> tuple[RowState, ...]:
        return *self.caches, self._output, self._position

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        embeds, states = following_embeds(self.target, prompt, output, history), output.features["last"]
        mask = None if prompt.attention_mask is None else prompt.attention_mask.bool()
        positions, following = _positions(output, prompt)
        self.join(len(history), self.network.attention == NAME and kernels.static_shapes(embeds.device))
        length, count = embeds.shape[1], self.network.count
        if length < count:  # layers without any entry
            short = (count - length, 0)
            mask = F.pad(torch.ones_like(prompt.input_ids).bool() if mask is None else mask, short)
            embeds, states = (F.pad(x, (0, 0, *short)) for x in (embeds, states))
            positions, length = F.pad(positions, short), count
        last = []
        for number in range(count):  # the first token that a layer has an entry of is one later than that of the last
            entries = length - number
            kept = None if mask is None else mask[:, :entries]
            cache = TreeCache(count, reserve=entries + 1, attending=[number])
            allowed = self._prompt_mask(number, cache, kept, len(history), entries, states)
            places = positions[..., number:]
            outputs = self.network(number, embeds[:, number:], states, places, allowed, cache)
            cache.commit_prompt(entries, kept, len(history))
            self.caches[number].append(cache, entries + AHEAD)
            states = outputs[:, :-1]
            last.append(outputs[:, -1])
        self._output.append(torch.cat(last, dim=-1))
        self._position.append(following)

    def _prompt_mask(
        self, number: int, cache: TreeCache, kept: Tensor | None, batch: int, entries: int, like: Tensor
    ) -> Tensor | None:
        """Attention mask of a layer over a prompt's entries; None for causal attention."""
        config = self.network.config
        cache.commit_prompt(0, None, batch)
        if kept is None and self.network.attention == NAME and window_of(config, number) is None:
            return None
        reach = causal(batch, entries, like.device, kept)
        depth = torch.arange(entries, device=like.device).expand(batch, -1)
        if kept is not None:
            depth = (kept.cumsum(1) - 1).clamp(min=0)
        return self._of_layer(number, tree_mask(config, cache, depth, None, reach, like.dtype))

    def _of_layer(self, number: int, masks: Any) -> Any:
        """A layer's mask of those by its kind."""
        return masks[self.network.config.layer_types[number]] if isinstance(masks, dict) else masks

    def reserve(self, width: int) -> None:
        for cache in self.caches:
            cache.reserve_nodes(width + self.top_k * (self.depth + 1))

    def advance(self, accepted: list[int]) -> None:
        for cache in self.caches:
            cache.advance(accepted)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Queue the accepted tokens and the target's hidden states at their parents."""
        self.queue((verdict.tokens, take(output.features["last"], verdict.path.clamp(min=0))), verdict)

    def update(self, tokens: Tensor, states: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Append accepted tokens, (batch, width), with the target's states before them, (batch, width, hidden)."""
        self._drop_nodes()
        batch, width = tokens.shape
        embeds, outputs, chain = self.target.embed(tokens), [], causal(batch, width, tokens.device)
        depth = torch.arange(width, device=tokens.device).expand(batch, -1)
        for number, before in enumerate(self._last_outputs(batch)):
            outputs.append(self._pass(number, embeds, states, depth, None, chain))
            states = torch.cat([before, outputs[-1][:, :-1]], dim=1)
        commit_chain(self.caches, length, width)
        self._position.data[:batch] += length
        write_last(self._output, torch.cat(outputs, dim=-1), length)

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        self._drop_nodes()
        states = dict(enumerate(self._last_outputs(len(token))))
        reach, last = Reach(), self.network.count - 1
        depths: list[Tensor] = []

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            """One level: the layers from the level's own on, as those above it serve the levels below."""
            nonlocal states
            level = len(depths)  # above this one, without the root
            depth, tail = torch.full_like(beam, level), torch.cat(depths, dim=1) if depths else None
            depths.append(depth)
            embeds, allowed, outputs = self.target.embed(beam), reach(origin), {}
            for number in range(min(level + 1, last), last + 1):
                above = states[number - 1] if number - 1 in states else states[number]
                outputs[number] = self._pass(number, embeds, take(above, origin), depth, tail, allowed)
                self.caches[number].offset += beam.shape[1]
            states = outputs
            return self._children(outputs[min(outputs)])

        first = self._children(states[0][:, 0])
        tree = grow_tree(token, first, extend, budget, self.top_k, depth=self.depth, nodes=self.total_tokens)
        self._drop_nodes()
        return tree

    def _drop_nodes(self) -> None:
        for cache in self.caches:
            cache.offset = 0

    def _last_outputs(self, batch: int) -> list[Tensor]:
        """Outputs of each layer at the rows' last tokens, (batch, 1, hidden)."""
        return list(self._output.data[:batch, None].chunk(self.network.count, dim=-1))

    def _pass(
        self, number: int, embeds: Tensor, states: Tensor, depth: Tensor, tail: Tensor | None, reach: Tensor
    ) -> Tensor:
        """Outputs of a layer at new nodes, (batch, nodes, hidden).

        Args:
            number, embeds, states: see ``MTPNetwork.forward``.
            depth, tail, reach: see ``tree_mask``.
        """
        cache, config, options = self.caches[number], self.network.config, {}
        if cache.static_shapes:
            cache.set_write_slots(depth.shape[1])
            masks = tail_mask(config, depth, tail, reach)
            assert cache.bounds is not None
            options = {PASS: TreePass(config, cache.bounds.first(len(depth)), depth)}
        else:
            masks = tree_mask(config, cache, depth, tail, reach, states.dtype)  # type: ignore[assignment]
        positions = self._position.data[: len(depth), None] + depth
        return self.network(number, embeds, states, positions, self._of_layer(number, masks), cache, **options)

    def _children(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return ops.top_log_probs(self._scores(states), self.top_k)


def _positions(output: TargetOutput, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Positions of a prompt's tokens, (batch, length) or (3, batch, length) int64, and of each row's next token,
    (batch,)."""
    if (found := axis_positions(prompt, output)) is not None:
        return found
    (batch, length), (at, following) = prompt.input_ids.shape, counted_positions(prompt)
    if isinstance(at, slice):
        at = torch.arange(length, device=following.device).expand(batch, -1)
    return at, following
