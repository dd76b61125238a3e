"""What a drafter is trained on and measured by: conversations, the target's features of them, a loss."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.distil import data
from mmspec.distil.data import Conversation
from mmspec.distil.features import Features
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.training.order import Example
from mmspec.training.plan import Losses

Extract = Callable[[Sequence[Conversation]], Features]
Loss = Callable[[Any, Any, Features, Tensor | None, torch.Generator | None, float], Losses]

HELD_OUT = 64
"""Held-out conversations that a report measures the loss on, at most."""


class DrafterTask:
    """Teaches a network to guess what its target says. See `trainer.Task`.

    Args:
        target: the frozen target.
        network: the drafter's, in float32 on the target's device.
        objective: called with network, target, features, draft ids, generator and the training's progress.
        drafter: from a network of its own to the drafter that runs it.
        training: conversations by kind (`order.TEXT`, `order.MIXED`).
        held_out: conversations that are not trained on.
        extract: the target's features of conversations.
        draft_ids: (n,) int64 or None, as for the objective.
        batch: conversations whose held-out loss is computed at once.
        bfloat16: compute losses under autocast; weights stay in float32.
        prompts: how many held-out prompts each report decodes.
        max_new_tokens: of those answers.
    """

    def __init__(
        self,
        target: Any,
        network: nn.Module,
        objective: Loss,
        drafter: Callable[[nn.Module], Any],
        training: Mapping[str, Sequence[Conversation]],
        held_out: Sequence[Conversation],
        extract: Extract,
        *,
        draft_ids: Tensor | None = None,
        batch: int = 16,
        bfloat16: bool = False,
        prompts: int = 8,
        max_new_tokens: int = 96,
    ) -> None:
        self.target, self.network, self.objective, self.drafter = target, network, objective, drafter
        self.training, self._extract, self.draft_ids = training, extract, draft_ids
        self.lengths = {kind: [_length(one) for one in found] for kind, found in training.items()}
        self._bfloat16 = bfloat16
        self._batch, self._max_new_tokens = batch, max_new_tokens
        asked = [question(conversation) for conversation in _spread(held_out, prompts)]
        self._prompts = asked if hasattr(target, "open_media") else [data.as_text(messages) for messages in asked]
        self._held_out = sorted(_spread(held_out, HELD_OUT), key=_length)

    def batch(self, examples: list[Example]) -> Features:
        """Features of these examples, padded to the longest."""
        return self._extract([self.training[kind][index] for kind, index in examples])

    def weight(self, batch: Features) -> int:
        """Guesses that the loss is a mean over: tokens of answers that follow another one's."""
        return int((batch.answer[:, 2:] & batch.answer[:, 1:-1]).sum())

    def loss(
        self, network: nn.Module, batch: Features, generator: torch.Generator | None, progress: float = 1.0
    ) -> Losses:
        """The objective's losses of a batch, when this share of the training is behind us."""
        with torch.autocast(batch.hidden.device.type, torch.bfloat16, enabled=self._bfloat16):
            return self.objective(network, self.target, batch, self.draft_ids, generator, progress)

    def held_out(self) -> dict[str, float]:
        """Mean loss and figures on held-out conversations, and the mean acceptance length of decoding their prompts."""
        figures = self._held_out_losses()
        if self._prompts:
            figures |= self._acceptance()
        return figures

    def save(self, folder: Path) -> None:
        """Write the drafter's checkpoint."""
        self.drafter(copy.deepcopy(self.network)).save(folder, self.target)

    @torch.no_grad()
    def _held_out_losses(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        weights: dict[str, int] = defaultdict(int)
        for start in range(0, len(self._held_out), self._batch):
            batch = self._extract(self._held_out[start : start + self._batch])
            # The same noise each time, so that reports compare.
            losses = self.loss(self.network, batch, torch.Generator(batch.hidden.device).manual_seed(0))
            for name, value in {"loss": float(losses.total), **losses.figures}.items():
                sums[name] += value * self.weight(batch)
                weights[name] += self.weight(batch)
        return {name: sums[name] / weights[name] for name in sums if weights[name]}

    def _acceptance(self) -> dict[str, float]:
        """Tokens per verify step over all prompts, greedy, with trees of the drafter's own size."""
        drafter = self.drafter(copy.deepcopy(self.network))
        pipe = Pipeline(self.target, drafter)
        emitted = steps = 0
        for prompt in self._prompts:
            try:
                stats = pipe.generate(prompt, max_new_tokens=self._max_new_tokens, nodes=drafter.total_tokens).stats
            except UserError:
                continue  # a prompt that fills the target's context
            emitted += sum(stats.accept_lengths)
            steps += stats.num_spec_steps
        return {"mean_acceptance_length": emitted / steps} if steps else {}


def question(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages before the first answer."""
    roles = [message["role"] for message in conversation.messages]
    return list(conversation.messages[: roles.index("assistant")])


def frequent(answers: Iterable[Sequence[int]], count: int, always: Sequence[int]) -> Tensor:
    """The draft vocabulary: `always`, and the most frequent tokens of answers, `count` at most; sorted, int64."""
    seen = Counter(token for answer in answers for token in answer)
    ranked = [*dict.fromkeys(always), *(token for token, _ in seen.most_common() if token not in always)]
    return torch.tensor(sorted(ranked[:count]))


def _spread(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """So many of them, from all places in the list."""
    count = min(count, len(conversations))
    return [conversations[place * len(conversations) // count] for place in range(count)]


def _length(conversation: Conversation) -> int:
    """About how long a conversation is: media count most."""
    text = sum(len(str(message["content"])) for message in conversation.messages)
    return text + 4000 * len(conversation.media)
