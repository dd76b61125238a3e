"""The model whose output is kept exact, as the engine sees it.

A target absorbs prompts, computes logits at the nodes of trees and keeps accepted paths, for a batch of sequences that
join and leave. Its caches are its own; the engine sees logits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.tree import TokenTree
from mmspec.verify import Verdict

Feature = int | str
"""A decoder's hidden states: n is what enters layer n (transformers' ``hidden_states[n]``), ``"last"`` what leaves the
final norm."""


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
    """The output of one pass of the target.

    Attributes:
        logits: (batch, nodes, vocab), raw; after a prefill, nodes = 1: the last position of the prompt.
        features: (batch, nodes, hidden) each, the hidden states that the drafter reads; after a prefill, of the whole
            prompt.
        visual: (batch, length) bool, prefill only: positions that carry image or video features.
        embeds: (batch, length, hidden), prefill only: the input embeddings of the language model.
    """

    logits: Tensor
    features: dict[Feature, Tensor]
    visual: Tensor | None = None
    embeds: Tensor | None = None


class Target(Protocol):
    """What the engine and the drafters need of a target. Rows are the sequences in it, in the order of joining."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    features: Sequence[Feature]
    """Which hidden states a step contains."""

    def prefill(self, prompt: Prompt, room: int | Sequence[int]) -> Step:
        """Absorb prompts, which become the last rows; ``room`` is the number of tokens that may follow each of them, or
        one number per prompt."""

    def prefill_chunks(self, prompt: Prompt, room: int | Sequence[int], chunk: int | None) -> Iterator[Step | None]:
        """``prefill`` in several passes over at most ``chunk`` tokens each, as far as the model allows.

        Yields:
            None after each pass but the last, then the step. The rows join with the last pass: others may join, decode
            and leave in between.
        """

    def kind(self, prompt: Prompt) -> Hashable:
        """Prompts of one kind may decode in one batch."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; the others leave."""

    def forward_tree(self, tree: TokenTree) -> Step:
        """Logits and features at every node; absorbs nothing yet."""

    def commit(self, verdict: Verdict) -> None:
        """Absorb the accepted path of the last tree."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings, (...) int64 -> (..., hidden)."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of last hidden states, (..., hidden) -> (..., vocab)."""

    def narrow_head(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """The head for some tokens only, (n,) int64: a function (..., hidden) -> (..., n)."""
