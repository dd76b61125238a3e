"""The model whose output is kept exact, as the engine sees it.

A target absorbs the prompt, checks trees and keeps accepted paths. Its caches are its own; the engine sees logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.tree import TokenTree
from mmspec.verify import Verdict


@dataclass
class Prompt:
    """What generation starts from.

    Attributes:
        input_ids: (batch, length) int64, left-padded.
        attention_mask: (batch, length), 0 at padding; None when there is none.
    inputs: what else the model's forward takes at the prompt (``pixel_values``, ``image_sizes``, ...).
    padding_in_history: show logits processors the padding too, as transformers' ``generate`` does.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    padding_in_history: bool = False

    def histories(self) -> list[list[int]]:
        """The token ids that each row starts from."""
        rows = self.input_ids.tolist()
        if self.attention_mask is None or self.padding_in_history:
            return rows
        keep = self.attention_mask.tolist()
        return [[t for t, k in zip(row, mask, strict=True) if k] for row, mask in zip(rows, keep, strict=True)]


@dataclass
class Step:
    """What one pass of the target gives.

    Attributes:
        logits: (batch, nodes, vocab), raw; after a prefill, nodes = 1: the last position of the prompt.
        hidden: (batch, nodes, hidden), last hidden states after the final norm; after a prefill, of the whole prompt.
        visual: (batch, length) bool, prefill only: positions that carry image or video features.
        embeds: (batch, length, hidden), prefill only: the input embeddings that the language model was fed.
    """

    logits: Tensor
    hidden: Tensor
    visual: Tensor | None = None
    embeds: Tensor | None = None


class Target(Protocol):
    """What the engine and the drafters need of a target."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    def prefill(self, prompt: Prompt, room: int | Sequence[int]) -> Step:
        """Forget everything and absorb the prompt; ``room`` is the number of tokens that may follow it in every row, or
        in each."""

    def forward_tree(self, tree: TokenTree) -> Step:
        """Logits and hidden states at every node; absorbs nothing yet."""

    def commit(self, verdict: Verdict) -> None:
        """Absorb the accepted path of the last tree. A row whose path is empty absorbs nothing."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings, (...) int64 -> (..., hidden)."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of last hidden states, (..., hidden) -> (..., vocab)."""

    def narrow_head(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """The head for some tokens only, (n,) int64: a function (..., hidden) -> (..., n)."""
