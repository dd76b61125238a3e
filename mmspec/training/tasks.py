"""Training task of a drafter: conversations, the target's features of them, a loss, and held-out acceptance length.

Networks may start from weights of the target, or of another drafter.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mmspec.core.target import Feature, Target
from mmspec.drafters.hidden_state import HiddenStateDrafter, plain_embedding
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.quantisation.linear import PackedLinear
from mmspec.targets.merged_layers import MergedLayer
from mmspec.training import data
from mmspec.training.data import Conversation
from mmspec.training.features import Features
from mmspec.training.loss import LossOutput
from mmspec.training.optimisers import LearningRates, Optimisers
from mmspec.training.options import RunOptions
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
        """The losses on the answers of ``batch``.

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
        drafter: called with a network, draft ids and ``tree``; returns the drafter.
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


class DrafterTraining(NamedTuple):
    """A plug-in of the group ``train``: a command that trains drafters of one kind.

    Attributes:
        setup: makes network, objective and drafter from the options, the target and the draft vocabulary.
        text: what it trains, for its help.
    """

    options: type[RunOptions]
    setup: Callable[..., DrafterSetup]
    text: str


class DrafterTask:
    """Trains a drafter's network to predict what its target generates. Implements ``TrainingTask``.

    Args:
        pipe: holds the frozen target.
        training: conversations by kind: ``plan.TEXT`` without and ``plan.MIXED`` with images or videos.
        extract: returns the target's features of conversations.
        options: of the run. Evaluations have the same batch size. "muon" trains matrices by Muon and the rest by AdamW
            at half the rate; "adamw" is the setting of arXiv 2505.14260. After the share of the run on text only (stage
            1), that of ``MIXED`` examples rises linearly to 1 (section 3.3).
        bfloat16: compute losses under autocast; weights stay in float32.
    """

    def __init__(
        self,
        pipe: Pipeline,
        setup: DrafterSetup,
        training: Mapping[str, Sequence[Conversation]],
        held_out: Sequence[Conversation],
        extract: ExtractFeatures,
        options: RunOptions,
        bfloat16: bool = False,
    ) -> None:
        self.pipe, self.setup, self.network = pipe, setup, setup.network
        self.training, self._extract = training, extract
        lengths = {kind: [one.size for one in found] for kind, found in training.items()}
        self.sampler = CurriculumSampler(lengths, options.batch, options.seed, linear_ramp(options.text_share))
        rate = options.rate or RATES[options.optimiser]
        self.optimisers = drafter_optimisers(self.network, options.optimiser, rate)
        self._options, self._bfloat16 = options, bfloat16
        prompt_messages = [first_prompt(conversation) for conversation in _spread(held_out, options.prompts)]
        self._prompts = (
            prompt_messages if pipe.processor.reads_media else [data.as_text(one) for one in prompt_messages]
        )
        self._held_out = sorted(_spread(held_out, MAX_HELD_OUT), key=lambda one: one.size)

    def batch(self, examples: list[ExampleIndex]) -> Features:
        """The features of these examples, padded to the longest."""
        return self._extract([self.training[kind][index] for kind, index in examples])

    def weight(self, batch: Features) -> int:
        """The number of answer tokens that follow another answer token: the loss is a mean over them."""
        return int((batch.answer[:, 2:] & batch.answer[:, 1:-1]).sum())

    def loss(
        self, network: nn.Module, batch: Features, generator: torch.Generator | None, progress: float = 1.0
    ) -> LossOutput:
        """The objective's loss of a batch at a progress from 0 to 1."""
        with torch.autocast(batch.hidden.device.type, torch.bfloat16, enabled=self._bfloat16):
            return self.setup.objective(network, self.pipe.target, batch, self.setup.draft_ids, generator, progress)

    def evaluate(self) -> dict[str, float]:
        """Mean loss and metrics on held-out conversations, and the mean acceptance length on their prompts."""
        metrics = self._held_out_losses()
        if self._prompts:
            metrics |= self._acceptance()
        return metrics

    def save(self, folder: Path) -> None:
        """Write the drafter's checkpoint."""
        self._drafter().save(folder, self.pipe.target)

    def _drafter(self) -> Any:
        return self.setup.drafter(copy.deepcopy(self.network), self.setup.draft_ids, **self.setup.tree)

    @torch.no_grad()
    def _held_out_losses(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        weights: dict[str, int] = defaultdict(int)
        for start in range(0, len(self._held_out), self._options.batch):
            batch = self._extract(self._held_out[start : start + self._options.batch])
            # The same noise in every evaluation, so that they are comparable.
            output = self.loss(self.network, batch, torch.Generator(batch.hidden.device).manual_seed(0))
            for name, value in {"loss": float(output.total), **output.metrics}.items():
                sums[name] += value * self.weight(batch)
                weights[name] += self.weight(batch)
        return {name: sums[name] / weights[name] for name in sums if weights[name]}

    def _acceptance(self) -> dict[str, float]:
        """Mean acceptance length over all prompts, greedy, with trees of the drafter's own size."""
        drafter = self._drafter()
        pipe = Pipeline(self.pipe.target, self.pipe.processor, drafter)
        emitted = steps = 0
        for prompt in self._prompts:
            try:
                limits = {"max_new_tokens": self._options.max_new_tokens, "nodes": drafter.tree_size}
                stats = pipe.generate(prompt, temperature=0.0, **limits).stats
            except UserError:
                continue  # a prompt that fills the target's context
            emitted += sum(stats.accept_lengths)
            steps += stats.num_spec_steps
        return {"mean_acceptance_length": emitted / steps} if steps else {}


def drafter_optimisers(network: nn.Module, optimiser: Literal["muon", "adamw"], rate: float) -> Optimisers:
    """The optimisers of all parameters of a drafter's network."""
    muon = LearningRates(matrix=rate, other=rate / 2)
    rates = muon if optimiser == "muon" else LearningRates(matrix=None, other=rate, clip=0.5)
    return Optimisers(network, rates)


def first_prompt(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages before the first answer."""
    roles = [message["role"] for message in conversation.messages]
    return list(conversation.messages[: roles.index("assistant")])


def frequent_tokens(answers: Iterable[Sequence[int]], count: int, always: Sequence[int], vocab: int) -> Tensor:
    """A draft vocabulary of ``count`` tokens, sorted, int64: ``always``, the most frequent tokens of answers, and,
    where these have fewer, the first of the vocabulary, which a tokenizer learnt first."""
    seen = Counter(token for answer in answers for token in answer)
    ranked = dict.fromkeys([*always, *(token for token, _ in seen.most_common()), *range(vocab)])
    return torch.tensor(sorted(list(ranked)[:count]))


def _spread(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """Up to ``count`` conversations, evenly spaced in the list."""
    count = min(count, len(conversations))
    return [conversations[place * len(conversations) // count] for place in range(count)]


@torch.no_grad()
def head_weight(target: Target, draft_ids: Tensor | None) -> Tensor:
    """Weight of the target's output layer for a draft vocabulary, (draft tokens, hidden) float32."""
    head = target.head if draft_ids is None else target.narrow_head(draft_ids)
    width = target.embed(torch.zeros(1, dtype=torch.long, device=target.device)).shape[-1]
    unit = torch.eye(width, device=target.device, dtype=target.dtype)
    return (head(unit) - head(torch.zeros_like(unit[:1]))).t().float()


def decoder_weights(target: Any, layers: Sequence[int]) -> dict[str, Tensor]:
    """Weights of a target's decoder under their published names, with these of its layers only, numbered from 0."""
    decoder = target.model.get_decoder()
    found: dict[str, Tensor] = {}

    def add(prefix: str, module: nn.Module) -> None:
        for name, part in module.named_modules(prefix=prefix):
            plain = part.unpacked() if isinstance(part, PackedLinear) else part
            found.update({f"{name}.{key}": weight for key, weight in plain.named_parameters(recurse=False)})

    for name, module in decoder.named_children():
        if name != "layers":
            add(name, module)
    for number, place in enumerate(layers if hasattr(decoder, "layers") else ()):
        layer = decoder.layers[place]
        if isinstance(layer, MergedLayer):
            found |= {f"layers.{number}.{name}": weight for name, weight in layer.separate().items()}
        else:
            add(f"layers.{number}", layer)
    return found


def output_rows(target: Target) -> int:
    """Tokens that the target's output layer has."""
    return target.head(target.embed(torch.zeros(1, dtype=torch.long, device=target.device))).shape[-1]


def mask_token(pipe: Pipeline) -> int:
    """A token for masks: one that answers do not contain, if the tokenizer has it, else the last that ends no answer.

    Its embedding is not zero, which attention could not turn.
    """
    tokenizer, vocab = pipe.processor.tokenizer, pipe.target.config.vocab_size
    named = (getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad", "unk"))
    for token in [*(token for token in named if token is not None and token < vocab), *reversed(range(vocab))]:
        embedding = plain_embedding(pipe.target, torch.tensor([token], device=pipe.target.device))
        if token not in pipe.target.eos_token_ids and bool(embedding.any()):
            return int(token)
    raise UserError("expected a target with a token for masks, received one whose embeddings are all zero")


def load_shared_weights(start: HiddenStateDrafter, network: nn.Module, folder: Path | None) -> None:
    """Load the weights of another drafter that the network has too; all others keep their random initialisation."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    shared = {name: tensor for name, tensor in start.network.state_dict().items() if name in wanted}
    for name, tensor in shared.items():
        if tuple(tensor.shape) != wanted[name]:
            raise UserError(f"{folder}: expected {name} {wanted[name]} to start from, received {tuple(tensor.shape)}")
    network.load_state_dict(shared, strict=False)
