"""Prefill of prompts: in one pass or in chunks, from the start or after a prefix whose states are known."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.cache.prefix_cache import Prefix, at_text
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.target import Feature, Prompt, TargetOutput
from mmspec.errors import UserError
from mmspec.targets.decoder import Decoder
from mmspec.targets.head import Head


@dataclass
class Prefill:
    """Prefill of one prompt into a cache of its own. Its generators yield between two passes.

    Attributes:
        prompt: one or several rows.
        visual: (batch, length) bool, positions of image or video features; None without any.
        chunk: most tokens of a pass; None prefills in one pass.
        cache: empty, or with the states of a prefix.
    """

    prompt: Prompt
    visual: Tensor | None
    names: Sequence[Feature]
    chunk: int | None
    cache: TreeCache
    decoder: Decoder
    head: Head
    embed: Callable[[Tensor], Tensor]

    def whole(self) -> Generator[None, None, TargetOutput]:
        """Prefill into an empty cache."""
        prompt, chunk, cache = self.prompt, self.chunk, self.cache
        ids, mask = prompt.input_ids, prompt.attention_mask
        batch, length = ids.shape
        positions = self._positions()
        tokens = {} if "inputs_embeds" in prompt.inputs else {"input_ids": ids}
        call = {**prompt.inputs, **tokens, "attention_mask": mask, "position_ids": positions}
        if prompt.prefill_mask is not None:
            return self._partly(call, prompt.prefill_mask)
        splits = chunk is not None and batch == 1 and length > chunk and mask is None
        inputs = self.decoder.chunk_inputs(call, cache) if splits else None
        if inputs is not None:
            features, logits = yield from self._passes(inputs, 0)
        else:
            logits, inputs, features = self.decoder.prefill(call, cache, self.names)
            cache.commit_prompt(length, mask, batch)
            self.head.check(features["last"][:, -1:], logits)
        features = {name: features[name] for name in self.names}
        # Decoders without attention, or with ALiBi, have no position_ids.
        known = inputs.get("position_ids") if self.decoder.takes_positions else positions
        return TargetOutput(logits, features, self.visual, inputs.get("inputs_embeds"), known)

    def rest(self, inputs: dict[str, Any], prefix: Prefix, first: int) -> Generator[None, None, TargetOutput]:
        """Prefill the tokens after the ``first``, whose states are in the cache.

        Args:
            inputs: the decoder's, of the whole prompt.
            prefix: which the first tokens are from.
        """
        ids = self.prompt.input_ids
        if first == ids.shape[1]:
            assert prefix.logits is not None
            logits, features = prefix.logits, prefix.features
        else:
            rest, logits = yield from self._passes(inputs, first)
            features = {name: torch.cat([prefix.features[name][:, :first], rest[name]], 1) for name in self.names}
        features = {name: features[name] for name in self.names}
        embeds = prefix.embeds
        if embeds is not None:
            embeds = torch.cat([embeds[:, :first], self.embed(ids[:, first:])], dim=1)
        return TargetOutput(logits, features, self.visual, embeds, inputs["position_ids"], first)

    def _partly(self, call: dict[str, Any], kept: Tensor) -> TargetOutput:
        """Prefill the positions that are kept alone; the others have no states. Features are padded on the left.

        Raises:
            UserError: the decoder's inputs cannot be split by position.
        """
        inputs = self.decoder.chunk_inputs(call, self.cache)
        if inputs is None:
            raise UserError(
                "visual tokens can be left out where attention is causal and each token's inputs are its own"
            )
        embeds = self.embed(call["input_ids"]) if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        # A stable sort moves the tokens that are kept to the right.
        order = kept.long().sort(dim=1, stable=True).indices[:, -int(kept.sum(1).max()) :]
        chosen = kept.gather(1, order)
        mask = None if bool(chosen.all()) else chosen.long()
        part = {"inputs_embeds": embeds.gather(1, order[:, :, None].expand(-1, -1, embeds.shape[2]))}
        positions = None
        if (given := inputs.get("position_ids")) is not None:
            positions = given.gather(-1, order.expand(given.shape[:-1] + order.shape[-1:]))
        if self.decoder.takes_positions:
            part["position_ids"] = positions
        if (visual := inputs.get("visual_pos_masks")) is not None:
            part["visual_pos_masks"] = visual.gather(1, order) & chosen
            seen = kept[visual]
            part["deepstack_visual_embeds"] = [layer[seen] for layer in inputs["deepstack_visual_embeds"]]
        features = self.decoder.forward({**part, "attention_mask": mask}, self.cache, self.names)
        self.cache.commit_prompt(order.shape[1], mask, len(order))
        logits = self.head(features["last"][:, -1:])
        return TargetOutput(
            logits, {name: features[name] for name in self.names}, self.visual, part["inputs_embeds"], positions
        )

    def _positions(self) -> Tensor | None:
        """``position_ids`` of the prompt, (batch, length) or (axes, batch, length); None if the model computes them."""
        if (positions := self.prompt.inputs.get("position_ids")) is not None:
            return positions
        # Models with several position axes (Qwen-VL) compute those of visual tokens from the prompt.
        if self.decoder.has_position_axes and self.visual is not None and bool(self.visual.any()):
            return None
        ids, mask = self.prompt.input_ids, self.prompt.attention_mask
        if mask is None:
            return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)

    def _passes(
        self, inputs: dict[str, Any], first: int
    ) -> Generator[None, None, tuple[dict[Feature, Tensor], Tensor]]:
        """Features and last logits of the tokens from ``first`` on, in passes over ``chunk`` of them."""
        length, passes = self.prompt.input_ids.shape[1], []
        chunk = self.chunk or length
        for start in range(first, length, chunk):
            if start > first:
                yield
            part = slice(start, min(start + chunk, length))
            passes.append(self.decoder.prefill_chunk(inputs, part, self.cache, self.names))
        last = passes[-1]["last"][:, -1:]
        logits = self.head(last)
        self.head.check(last, logits)
        return {name: torch.cat([features[name] for features in passes], dim=1) for name in self.names}, logits


def next_position(positions: Tensor | None, batch: int, name: str) -> Tensor:
    """(batch,) position of the first new token, from the decoder's ``position_ids`` of the prompt.

    Args:
        name: of the model's class, for the error.

    Raises:
        UserError: the decoder is not given any, or the prompt ends on an image or video of several position axes.
    """
    if positions is None:
        raise UserError(f"the decoder must be given position_ids: that of {name} is not")
    if not at_text(positions, -1):
        raise UserError("a prompt with several position axes must end on text: got an image or video token")
    if positions.ndim == 3:
        # Text after a video may have lower positions than its last frames.
        return positions[-1, :, -1] + 1
    return positions[:, -1].expand(batch) + 1
