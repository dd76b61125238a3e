"""Training task of a drafter: conversations, the target's features of them, a loss, and held-out acceptance length."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from mmspec.core.target import Feature
from mmspec.distil import data
from mmspec.distil.data import Conversation
from mmspec.distil.features import Features
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.training.loss import LossOutput
from mmspec.training.optimisers import LearningRates, Optimisers
from mmspec.training.plan import CurriculumSampler, ExampleIndex, linear_ramp

ExtractFeatures = Callable[[Sequence[Conversation]], Features]


class Objective(Protocol):
    """Loss of a drafter's network on the answers of conversations."""

    def __call__(
        self,
        network: Any,
        target: Any,
        batch: Features,
        draft_ids: Tensor | None = None,
        generator: torch.Generator | None = None,
        progress: float = 1.0,
        /,
    ) -> LossOutput:
        """Returns the losses on the answers of ``batch``.

        Args:
            target: for its frozen embedding and output layer.
            batch: features of conversations, with the layers that the network reads.
            draft_ids: (n,) int64, a reduced draft vocabulary, to which distributions are restricted.
            generator: of what is drawn.
            progress: of the training, from 0 to 1.
        """


MAX_HELD_OUT = 64
"""Held-out conversations that the loss is evaluated on, at most."""

RATES = {"muon": 3e-3, "adamw": 5e-5}
"""Default learning rates; AdamW's is that of arXiv 2505.14260."""


@dataclass(frozen=True)
class DrafterSetup:
    """What is specific to a kind of drafter in its training.

    Attributes:
        network: to train, in float32 on the target's device.
        objective: called with network, target, features, draft ids, generator and the run's progress.
        drafter: called with a network, draft ids and `tree`; returns the drafter.
        draft_ids: token ids of a reduced draft vocabulary, (n,) int64; None drafts all tokens.
        tree: settings of the drafter's trees.
        fit: called with the features of some training conversations before a run begins; initialises the network.
        layers: further hidden states of the target that the objective reads.
    """

    network: nn.Module
    objective: Objective
    drafter: Callable[..., Any]
    draft_ids: Tensor | None = None
    tree: Mapping[str, int] = field(default_factory=dict)
    fit: Callable[[Iterable[Features]], None] | None = None
    layers: Sequence[Feature] = ()


class DrafterTask:
    """Trains a drafter's network to predict what its target generates. Implements `TrainingTask`.

    Args:
        pipe: holds the frozen target.
        training: conversations by kind: `plan.TEXT` without and `plan.MIXED` with images or videos.
        extract: returns the target's features of conversations.
        batch: conversations per step, and per forward pass of the evaluation.
        bfloat16: compute losses under autocast; weights stay in float32.
        prompts: held-out prompts that each evaluation decodes.
        optimiser: "muon" trains matrices by Muon and the rest by AdamW at half the rate; "adamw" is the setting of
            arXiv 2505.14260.
        rate: learning rate; by default that of `RATES`.
        text_share: share of the run on text only (stage 1), after which the share of `MIXED` examples rises linearly
            to 1 (arXiv 2505.14260, section 3.3).
        seed: of the order of examples.
    """

    def __init__(
        self,
        pipe: Pipeline,
        setup: DrafterSetup,
        training: Mapping[str, Sequence[Conversation]],
        held_out: Sequence[Conversation],
        extract: ExtractFeatures,
        *,
        batch: int = 16,
        bfloat16: bool = False,
        prompts: int = 8,
        max_new_tokens: int = 96,
        optimiser: Literal["muon", "adamw"] = "muon",
        rate: float | None = None,
        text_share: float = 0.3,
        seed: int = 0,
    ) -> None:
        self.pipe, self.setup, self.network = pipe, setup, setup.network
        self.training, self._extract = training, extract
        lengths = {kind: [one.size for one in found] for kind, found in training.items()}
        self.sampler = CurriculumSampler(lengths, batch, seed, linear_ramp(text_share))
        self.optimisers = drafter_optimisers(self.network, optimiser, rate or RATES[optimiser])
        self._bfloat16 = bfloat16
        self._batch, self._max_new_tokens = batch, max_new_tokens
        prompt_messages = [first_prompt(conversation) for conversation in _spread(held_out, prompts)]
        self._prompts = prompt_messages if pipe.io.reads_media else [data.as_text(one) for one in prompt_messages]
        self._held_out = sorted(_spread(held_out, MAX_HELD_OUT), key=lambda one: one.size)

    def batch(self, examples: list[ExampleIndex]) -> Features:
        """Returns the features of these examples, padded to the longest."""
        return self._extract([self.training[kind][index] for kind, index in examples])

    def weight(self, batch: Features) -> int:
        """Returns the number of answer tokens that follow another answer token: the loss is a mean over them."""
        return int((batch.answer[:, 2:] & batch.answer[:, 1:-1]).sum())

    def loss(
        self, network: nn.Module, batch: Features, generator: torch.Generator | None, progress: float = 1.0
    ) -> LossOutput:
        """Returns the objective's loss of a batch at a progress from 0 to 1."""
        with torch.autocast(batch.hidden.device.type, torch.bfloat16, enabled=self._bfloat16):
            return self.setup.objective(network, self.pipe.target, batch, self.setup.draft_ids, generator, progress)

    def evaluate(self) -> dict[str, float]:
        """Returns mean loss and metrics on held-out conversations, and the mean acceptance length on their prompts."""
        metrics = self._held_out_losses()
        if self._prompts:
            metrics |= self._acceptance()
        return metrics

    def save(self, folder: Path) -> None:
        """Writes the drafter's checkpoint."""
        self._drafter().save(folder, self.pipe.target)

    def _drafter(self) -> Any:
        return self.setup.drafter(copy.deepcopy(self.network), self.setup.draft_ids, **self.setup.tree)

    @torch.no_grad()
    def _held_out_losses(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        weights: dict[str, int] = defaultdict(int)
        for start in range(0, len(self._held_out), self._batch):
            batch = self._extract(self._held_out[start : start + self._batch])
            # The same noise in every evaluation, so that they are comparable.
            output = self.loss(self.network, batch, torch.Generator(batch.hidden.device).manual_seed(0))
            for name, value in {"loss": float(output.total), **output.metrics}.items():
                sums[name] += value * self.weight(batch)
                weights[name] += self.weight(batch)
        return {name: sums[name] / weights[name] for name in sums if weights[name]}

    def _acceptance(self) -> dict[str, float]:
        """Mean acceptance length over all prompts, greedy, with trees of the drafter's own size."""
        drafter = self._drafter()
        pipe = Pipeline(self.pipe.target, self.pipe.io, drafter)
        emitted = steps = 0
        for prompt in self._prompts:
            try:
                limits = {"max_new_tokens": self._max_new_tokens, "nodes": drafter.tree_size}
                stats = pipe.generate(prompt, temperature=0.0, **limits).stats
            except UserError:
                continue  # a prompt that fills the target's context
            emitted += sum(stats.accept_lengths)
            steps += stats.num_spec_steps
        return {"mean_acceptance_length": emitted / steps} if steps else {}


def drafter_optimisers(network: nn.Module, optimiser: Literal["muon", "adamw"], rate: float) -> Optimisers:
    """Returns the optimisers of all parameters of a drafter's network."""
    muon = LearningRates(matrix=rate, other=rate / 2)
    rates = muon if optimiser == "muon" else LearningRates(matrix=None, other=rate, clip=0.5)
    # An embedding's rows are updated one by one: not a matrix in Muon's sense.
    is_matrix = lambda name, parameter: parameter.ndim == 2 and "embed" not in name  # noqa: E731
    return Optimisers([(network, 1.0)], rates, is_matrix)


def first_prompt(conversation: Conversation) -> list[dict[str, Any]]:
    """Returns the messages before the first answer."""
    roles = [message["role"] for message in conversation.messages]
    return list(conversation.messages[: roles.index("assistant")])


def frequent_tokens(answers: Iterable[Sequence[int]], count: int, always: Sequence[int], vocab: int) -> Tensor:
    """Returns a draft vocabulary of `count` tokens, sorted, int64: `always`, the most frequent tokens of answers, and,
    where these have fewer, the first of the vocabulary, which a tokenizer learnt first."""
    seen = Counter(token for answer in answers for token in answer)
    ranked = dict.fromkeys([*always, *(token for token, _ in seen.most_common()), *range(vocab)])
    return torch.tensor(sorted(list(ranked)[:count]))


def _spread(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """Up to `count` conversations, evenly spaced in the list."""
    count = min(count, len(conversations))
    return [conversations[place * len(conversations) // count] for place in range(count)]
