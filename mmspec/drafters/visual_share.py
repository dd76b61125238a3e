"""The visual tokens that a draft model gets if it does not get all (SpecVLM, arXiv 2508.16201).

First those to which the target's text after them attends most, until they have a part of the attention (Top-P), then
evenly spaced ones of the others. The authors' code (github.com/zju-jiyicheng/SpecVLM) averages attention over all
layers; here it is that of one layer, two thirds of the way up.
"""

from __future__ import annotations

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
        kept = (visual.sum(1, keepdim=True) * self.share).round().long().clamp(min=1)
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
