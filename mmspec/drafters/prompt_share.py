"""The parts of a prompt that a draft model gets if it does not get all.

Of visual tokens (SpecVLM, arXiv 2508.16201), first those to which the target's text after them attends most, until they
have a part of the attention (Top-P), then evenly spaced ones of the others. The authors' code
(github.com/zju-jiyicheng/SpecVLM) averages attention over all layers; here it is that of one layer, two thirds of the
way up.

Of a long text (RAPID, arXiv 2502.20330), the beginning, the end, which contains the question, and between them the
chunks that have most in common with the end. RAPID retrieves chunks by embeddings of another model; here, they are
compared by their tokens, of which rare ones count more. Its other half, a target distribution that the drafter changes,
is left out: it is not lossless.
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
_QUERIES = 32  # last tokens of the prompt whose attention is read, at most


class VisualShare:
    """Selection of visual tokens.

    Args:
        share: of the visual tokens of each row.
        top_p: part of the attention to visual tokens that the first ones have; 0 selects evenly spaced ones alone.

    Attributes:
        layer: whose attention is read; None without one.

    Raises:
        UserError: a share or part that is not from 0 to 1.
    """

    def __init__(self, share: float, top_p: float = TOP_P) -> None:
        for name, value in ("share of the prompt", share), ("part of the attention", top_p):
            if not 0 <= value <= 1:
                raise UserError(f"the {name} must be from 0 to 1: got {value}")
        self.share, self.top_p = share, top_p
        self.layer: int | None = None
        self._target: TransformersTarget | None = None

    def attach(self, target: Target) -> None:
        """Read the attention of this target."""
        self._target, self.layer = None, None
        if 0 < self.share < 1 and self.top_p > 0 and isinstance(target, TransformersTarget):
            layers = attention_layers(target.config)
            self._target, self.layer = target, layers[len(layers) * 2 // 3] if layers else None

    @property
    def features(self) -> tuple[Feature, ...]:
        """Hidden states that the output of a prefill must contain."""
        return () if self.layer is None else (self.layer,)

    def selected(self, visual: Tensor, output: TargetOutput, first: int) -> Tensor:
        """The visual tokens to keep.

        Args:
            visual: (batch, length) bool.
            output: of the target's prefill.
            first: row of the first prompt in the target's cache.

        Returns:
            (batch, length) bool.
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
    """Tokens of the greatest weights, then evenly spaced ones.

    Args:
        tokens: (batch, length) bool, to select from.
        weights: (batch, length), at least 0.
        kept: (batch, 1) int64, number to select of a row.
        top_p: part of a row's weight.

    Returns:
        (batch, length) bool: the fewest that have ``top_p`` of a row's weight, or ``kept`` of them; then others up to
        ``kept``.
    """
    known = weights.double() * tokens
    descending, order = known.sort(dim=1, descending=True, stable=True)
    before = descending.cumsum(1) - descending  # weight of the tokens before each
    rank = torch.arange(tokens.shape[1], device=tokens.device)
    top = (before < top_p * descending.sum(1, keepdim=True)) & (rank < kept)
    first = torch.zeros_like(tokens).scatter(1, order, top)
    return first | evenly(tokens & ~first, kept - first.sum(1, keepdim=True))


def evenly(tokens: Tensor, kept: Tensor) -> Tensor:
    """``kept`` tokens, (batch, 1) int64, spread evenly over those of a row: (batch, length) bool, in and out."""
    count = tokens.sum(1, keepdim=True).clamp(min=1)
    rank = tokens.long().cumsum(1)  # from 1
    return tokens & (rank * kept // count > (rank - 1) * kept // count)


LONG = 1024  # tokens from which on a prompt is shortened
CHUNK = 64
BEGINNING, END = 64, 128  # always kept


def relevant(ids: Tensor, text: Tensor, share: float) -> Tensor:
    """The text tokens to keep.

    Args:
        ids: (batch, length) int64.
        text: (batch, length) bool, tokens to select from: neither padding nor visual ones.
        share: of the chunks between beginning and end; 0 and 1 keep all.

    Returns:
        (batch, length) bool.
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
