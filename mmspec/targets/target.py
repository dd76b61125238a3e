"""Interface between engine and target: prompts, steps, and the target's methods.

A target prefills prompts, computes logits at the nodes of trees and commits accepted paths, for a batch of sequences
that join and leave. It owns its caches; the engine sees logits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.speculation.budget import CostTable
from mmspec.speculation.tree import TokenTree
from mmspec.speculation.verify import Verdict

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

    def to(self, device: torch.device, dtype: torch.dtype) -> Prompt:
        """The prompt on a device, floating point inputs (pixel values) in a dtype."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype) if value.is_floating_point() else value.to(device)

        inputs = {name: moved(value) for name, value in self.inputs.items()}
        return replace(self, input_ids=moved(self.input_ids), attention_mask=moved(self.attention_mask), inputs=inputs)

    @staticmethod
    def stack(prompts: Sequence[Prompt]) -> Prompt | None:
        """Several prompts in one batch; None where their inputs do not fit together.

        Inputs of the shape of ``input_ids`` are padded as these are; others, which belong to images or videos, follow
        each other along the first axis.
        """
        first = prompts[0]
        if any(one.inputs.keys() != first.inputs.keys() or one.padding_in_history for one in prompts):
            return None
        longest = max(one.input_ids.shape[1] for one in prompts)

        def padded(one: Prompt, values: Tensor) -> Tensor:
            return F.pad(values, (longest - one.input_ids.shape[1], 0))

        inputs = {}
        for name in first.inputs:
            values = [one.inputs[name] for one in prompts]
            if not all(isinstance(value, Tensor) for value in values):
                return None
            if all(value.shape == one.input_ids.shape for one, value in zip(prompts, values, strict=True)):
                values = [padded(one, value) for one, value in zip(prompts, values, strict=True)]
            if any(value.shape[1:] != values[0].shape[1:] or not value.ndim for value in values):
                return None
            inputs[name] = torch.cat(values)
        masks = [
            torch.ones_like(one.input_ids) if one.attention_mask is None else one.attention_mask for one in prompts
        ]
        mask = torch.cat([padded(one, mask) for one, mask in zip(prompts, masks, strict=True)])
        ids = torch.cat([padded(one, one.input_ids) for one in prompts])
        return Prompt(ids, None if bool(mask.all()) else mask, inputs)


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
    """Interface of a target: weights, passes, and caches by row.

    Rows are the decoding sequences, in the order of joining. ``TransformersTarget`` implements it for models of
    transformers; any other class with these members works in a ``Pipeline`` too. Text and media are left to the
    ``Processor``.
    """

    features: Sequence[Feature]
    """Which hidden states a step contains."""

    cost: CostTable | None
    """Measured seconds of a verify pass, None before they are known."""

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """Floating point type of a prompt's inputs."""

    @property
    def context_limit(self) -> int | None:
        """Most tokens of prompt and output; None where there is no limit."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""

    def fork(self) -> Target:
        """The same weights without sequences."""

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
