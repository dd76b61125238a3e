"""Prompt reduction for draft models: which visual tokens and text chunks to keep.

Visual tokens (SpecVLM, arXiv 2508.16201): keep the tokens with the highest attention from the text after them until
they cover a share of the total attention (Top-P), then evenly spaced tokens of the rest. The authors' code
(github.com/zju-jiyicheng/SpecVLM) averages attention over all layers; this module reads one layer, at 2/3 of the depth.

Long text (RAPID, arXiv 2502.20330): keep the beginning, the end, which contains the question, and the chunks in between
that are most similar to the end. RAPID retrieves chunks by another model's embeddings; this module compares tokens,
weighted by rarity. RAPID's modified target distribution is not implemented because it is not lossless.
"""

from __future__ import annotations

from collections import Counter
from math import log

import torch
from torch import Tensor

from mmspec.core.target import Feature, Target, TargetOutput
from mmspec.errors import UserError
from mmspec.targets.prompt_attention import attention_layers, prompt_attention
from mmspec.targets.transformers_target import TransformersTarget

TOP_P = 0.4  # in the authors' code
_QUERIES = 32  # maximum number of last prompt tokens whose attention is read


class VisualShare:
    """Selection of visual tokens.

    Args:
        share: share of each row's visual tokens to keep.
        top_p: share of the attention that the most attended tokens must cover; 0 selects evenly spaced tokens only.

    Attributes:
        layer: layer whose attention is read; None if no attention is read.
    """

    def __init__(self, share: float, top_p: float = TOP_P) -> None:
        for name, value in ("share of the prompt", share), ("part of the attention", top_p):
            if not 0 <= value <= 1:
                raise UserError(f"the {name} must be from 0 to 1: got {value}")
        self.share, self.top_p = share, top_p
        self.layer: int | None = None
        self._target: TransformersTarget | None = None

    def attach(self, target: Target) -> None:
        """Select the layer of this target whose attention is read."""
        self._target, self.layer = None, None
        if 0 < self.share < 1 and self.top_p > 0 and isinstance(target, TransformersTarget):
            layers = attention_layers(target.config)
            self._target, self.layer = target, layers[len(layers) * 2 // 3] if layers else None

    @property
    def features(self) -> tuple[Feature, ...]:
        """Features that the output of a prefill must contain."""
        return () if self.layer is None else (self.layer,)

    def selected(self, visual: Tensor, output: TargetOutput, first: int) -> Tensor:
        """The visual tokens to keep.

        Args:
            visual: (batch, length) bool.
            output: output of the target's prefill.
            first: row of the first prompt in the target's cache.
        """
        kept = (visual.sum(1, keepdim=True).float() * self.share).round().long().clamp(min=1)
        after = visual.flip(1).cumsum(1).flip(1) == 0
        queries = min(int(after.sum(1).max()), _QUERIES)
        weights = None
        if self._target is not None and self.layer is not None and queries:
            weights = prompt_attention(self._target, self.layer, output, first, queries)
        if weights is None:
            return evenly(visual, kept)
        return attended(visual, weights.where(after[:, -queries:, None], 0).sum(1), kept, self.top_p)


def attended(tokens: Tensor, weights: Tensor, kept: Tensor, top_p: float) -> Tensor:
    """Select the tokens with the highest weights, then evenly spaced tokens.

    Args:
        tokens: (batch, length) bool, to select from.
        weights: (batch, length), at least 0.
        kept: (batch, 1) int64, number of tokens to select per row.
        top_p: share of a row's total weight.

    Returns:
        (batch, length) bool: the fewest tokens that cover ``top_p`` of a row's weight, at most ``kept``; then evenly
        spaced tokens up to ``kept``.
    """
    known = weights.double() * tokens
    descending, order = known.sort(dim=1, descending=True, stable=True)
    before = descending.cumsum(1) - descending  # weight of all preceding tokens
    rank = torch.arange(tokens.shape[1], device=tokens.device)
    top = (before < top_p * descending.sum(1, keepdim=True)) & (rank < kept)
    first = torch.zeros_like(tokens).scatter(1, order, top)
    return first | evenly(tokens & ~first, kept - first.sum(1, keepdim=True))


def evenly(tokens: Tensor, kept: Tensor) -> Tensor:
    """Select ``kept``, (batch, 1) int64, evenly spaced ``tokens`` per row: (batch, length) bool in and out."""
    count = tokens.sum(1, keepdim=True).clamp(min=1)
    rank = tokens.long().cumsum(1)  # from 1
    return tokens & (rank * kept // count > (rank - 1) * kept // count)


LONG = 1024  # minimum length of a prompt to shorten
CHUNK = 64
BEGINNING, END = 64, 128  # always kept


def relevant(ids: Tensor, text: Tensor, share: float) -> Tensor:
    """The text tokens to keep.

    Args:
        ids: (batch, length) int64.
        text: (batch, length) bool, tokens to select from, without padding and visual tokens.
        share: share of the chunks between beginning and end to keep; 0 and 1 keep all.
    """
    kept = text.clone()
    for row in range(len(ids)) if 0 < share < 1 else ():
        places = text[row].nonzero()[:, 0]
        if len(places) >= LONG:
            kept[row, places] = _selected(ids[row, places].tolist(), share).to(kept.device)
    return kept


def _selected(tokens: list[int], share: float) -> Tensor:
    last = len(tokens) - END
    begins = range(BEGINNING, last, CHUNK)
    chunks = [set(tokens[begin : min(begin + CHUNK, last)]) for begin in begins]
    seen_in, asked = Counter(token for chunk in chunks for token in chunk), set(tokens[last:])
    common = [sum(log(len(chunks) / seen_in[token]) for token in sorted(chunk & asked)) for chunk in chunks]
    best = sorted(range(len(chunks)), key=common.__getitem__, reverse=True)[: max(1, round(share * len(chunks)))]
    kept = torch.zeros(len(tokens), dtype=torch.bool)
    kept[:BEGINNING] = kept[last:] = True
    for number in best:
        kept[begins[number] : min(begins[number] + CHUNK, last)] = True
    return kept
