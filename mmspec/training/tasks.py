"""Declarations for training a kind of drafter, optimisers, and initial weights from a target or drafter."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mmspec.adaptation.adaptation import RecordedAnswer
from mmspec.core.target import Feature, Target
from mmspec.drafters.captured import TrainedDrafter
from mmspec.drafters.hidden_state import HiddenStateDrafter, plain_embedding
from mmspec.drafters.spec import TREE
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.quantisation.linear import PackedLinear
from mmspec.training import data
from mmspec.training.data import Conversation, CurriculumSampler, ExampleIndex
from mmspec.training.features import ConversationFeatures, Features, collate
from mmspec.training.objectives import LossInput, LossOutput
from mmspec.training.options import RunOptions
from mmspec.validation import part

MAX_HELD_OUT = 64  # maximum number of held-out conversations for the loss
RATES = {"muon": 3e-3, "adamw": 5e-5}  # default learning rates; AdamW's is from arXiv 2505.14260
ExtractFeatures = Callable[[Sequence[Conversation]], Features]

D = TypeVar("D", bound=TrainedDrafter)

_DECAY = 0.01  # weight decay
_ONLINE_RATE = 1e-3
_ONLINE_BATCH = 4  # answers per step


Objective = Callable[[Any, LossInput], LossOutput]  # losses of a drafter's network on the answers of a batch


class TrainingTask(NamedTuple):
    """Network, in float32 on the target's device, and objective of a kind of drafter. ``drafter`` creates it from a
    network, draft ids and tree settings; ``fit`` initialises the network from features of some conversations."""

    network: nn.Module
    objective: Objective
    drafter: Callable[..., Any]
    draft_ids: Tensor | None = None
    layers: Sequence[Feature] = ()
    fit: Callable[[Iterable[Features]], None] | None = None


class DrafterTraining(NamedTuple):
    """Plug-in of the group ``train``: options, text and set-up of a command that trains one kind of drafter."""

    options: type[RunOptions]
    setup: Callable[..., TrainingTask]
    text: str


class Optimisers:
    """Muon for the matrices of layers, AdamW at half the rate for all other parameters of a network that require
    gradients; "adamw" trains matrices by AdamW too. Muon's updates are scaled to match the RMS of AdamW's."""

    def __init__(self, network: nn.Module, kind: Literal["muon", "adamw"], rate: float) -> None:
        self.rate, self._clip = rate, 1.0 if kind == "muon" else 0.5
        trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        # Not for Muon: each row of an embedding is updated on its own.
        by_muon = {name for name, x in trained.items() if kind == "muon" and x.ndim == 2 and "embed" not in name}
        matrices = [parameter for name, parameter in trained.items() if name in by_muon]
        others = [parameter for name, parameter in trained.items() if name not in by_muon]
        self.parameters = matrices + others
        self.all: list[torch.optim.Optimizer] = []
        if matrices:
            muon = partial(torch.optim.Muon, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw")
            self.all.append(muon(matrices, lr=rate))
        if others:
            adamw = partial(torch.optim.AdamW, weight_decay=_DECAY, betas=(0.9, 0.95), fused=True)
            self.all.append(adamw(others, lr=rate / 2 if kind == "muon" else rate))
        self._base = [[group["lr"] for group in optimiser.param_groups] for optimiser in self.all]

    def step(self, factor: float) -> None:
        """Clip the gradients, take a step at ``factor`` times the learning rates, and clear the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, self._clip)
        for optimiser, base in zip(self.all, self._base, strict=True):
            for group, own in zip(optimiser.param_groups, base, strict=True):
                group["lr"] = own * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [optimiser.state_dict() for optimiser in self.all]

    def load_state_dict(self, states: list[dict]) -> None:
        for optimiser, state in zip(self.all, states, strict=True):
            optimiser.load_state_dict(state)


class OnlineLearner:
    """Trains a float32 copy of a drafter's network on features recorded during decoding, without target forward passes;
    see ``mmspec.adaptation.adaptation.Learner``."""

    def __init__(self, objective: Objective, drafter: TrainedDrafter, target: Target) -> None:
        self._objective, self._target = objective, target
        self._draft_ids = None if drafter.draft_ids is None else drafter.draft_ids.to(target.device)
        self._layers = [name for name in drafter.features if name != "last"]
        self._generator = torch.Generator(target.device).manual_seed(0)
        self.restart(drafter.network)

    def restart(self, network: nn.Module) -> None:
        """Continue from these weights, with new optimisers."""
        self._network = copy.deepcopy(network).to(self._target.device, torch.float32).requires_grad_().train()
        self._optimisers = Optimisers(self._network, "muon", _ONLINE_RATE)
        self._added = 0  # answers in this batch

    def weights(self) -> nn.Module:
        return copy.deepcopy(self._network).requires_grad_(False).eval()

    def learn(self, answer: RecordedAnswer) -> None:
        """Accumulate gradients of an answer, and take an optimiser step after the last answer of a batch."""
        target: Any = self._target
        batch, parameters = collate([self._row(answer)], target), self._optimisers.parameters
        half = batch.hidden.dtype != torch.float32
        with torch.enable_grad(), torch.autocast(batch.hidden.device.type, torch.bfloat16, enabled=half):
            loss = self._objective(self._network, LossInput(target, batch, self._draft_ids, self._generator)).total
            if not loss.requires_grad:  # answers of one or two tokens
                return
            # Only for these parameters: the target's weights may require gradients.
            gradients = torch.autograd.grad(loss / _ONLINE_BATCH, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._added += 1
        if self._added == _ONLINE_BATCH:
            self._optimisers.step(1.0)
            self._added = 0

    def _row(self, answer: RecordedAnswer) -> ConversationFeatures:
        device = self._target.device
        generated = torch.arange(len(answer.tokens)) >= answer.prompt
        # Clones made outside inference mode can be used in autograd.
        features = {name: x.clone() for name, x in answer.features.items()}
        layers = torch.cat([features[name] for name in self._layers], dim=-1) if self._layers else None
        visual = answer.visual.to(device)
        return ConversationFeatures(
            answer.tokens.to(device), features["last"], answer.shown.clone(), visual, generated.to(device), layers
        )


class DrafterTask:
    """Trains a drafter's network to predict its target's output. Evaluations use the batch size of training.

    Args:
        training: conversations by kind: ``TEXT`` without and ``MIXED`` with images or videos. After stage 1, on text
            only, the share of ``MIXED`` examples rises linearly to 1 (arXiv 2505.14260, section 3.3).
        bfloat16: compute losses under autocast; weights stay in float32.
    """

    def __init__(
        self,
        pipe: Pipeline,
        task: TrainingTask,
        training: Mapping[str, Sequence[Conversation]],
        held_out: Sequence[Conversation],
        extract: ExtractFeatures,
        options: RunOptions,
        bfloat16: bool = False,
    ) -> None:
        self.pipe, self.task, self.network = pipe, task, task.network
        self.training, self._extract = training, extract
        lengths = {kind: [one.size for one in found] for kind, found in training.items()}
        self.sampler = CurriculumSampler(lengths, options.batch, options.seed, options.text_share)
        rate = options.rate or RATES[options.optimiser]
        self.optimisers = Optimisers(self.network, options.optimiser, rate)
        self._options, self._bfloat16 = options, bfloat16
        # The messages before the first answers.
        asked = (one.messages for one in _spread(held_out, options.prompts))
        prompts = [list(takewhile(lambda message: message["role"] != "assistant", messages)) for messages in asked]
        self._prompts = prompts if pipe.processor.reads_media else [data.as_text(one) for one in prompts]
        self._held_out = sorted(_spread(held_out, MAX_HELD_OUT), key=lambda one: one.size)

    def batch(self, examples: list[ExampleIndex]) -> Features:
        """Features of these examples, padded to the longest."""
        return self._extract([self.training[kind][index] for kind, index in examples])

    def weight(self, batch: Features) -> int:
        """The number of answer tokens that follow another answer token: the loss is a mean over them."""
        return int((batch.answer[:, 2:] & batch.answer[:, 1:-1]).sum())

    def loss(
        self, network: nn.Module, batch: Features, generator: torch.Generator | None, progress: float = 1.0
    ) -> LossOutput:
        """The objective's loss of a batch at a progress from 0 to 1."""
        given = LossInput(self.pipe.target, batch, self.task.draft_ids, generator, progress)
        with torch.autocast(batch.hidden.device.type, torch.bfloat16, enabled=self._bfloat16):
            return self.task.objective(network, given)

    def evaluate(self) -> dict[str, float]:
        """Mean loss and metrics on held-out conversations, and the mean acceptance length on their prompts."""
        return self._held_out_losses() | self._acceptance()

    def save(self, folder: Path) -> None:
        self._drafter().save(folder, self.pipe.target)

    def _drafter(self) -> Any:
        return self.task.drafter(copy.deepcopy(self.network), self.task.draft_ids, **part(self._options, TREE))

    @torch.no_grad()
    def _held_out_losses(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        weights: dict[str, int] = defaultdict(int)
        for start in range(0, len(self._held_out), self._options.batch):
            batch = self._extract(self._held_out[start : start + self._options.batch])
            # Same noise in every evaluation, for comparable losses.
            output = self.loss(self.network, batch, torch.Generator(batch.hidden.device).manual_seed(0))
            for name, value in {"loss": float(output.total), **output.metrics}.items():
                sums[name] += value * self.weight(batch)
                weights[name] += self.weight(batch)
        return {name: sums[name] / weights[name] for name in sums if weights[name]}

    def _acceptance(self) -> dict[str, float]:
        """Mean acceptance length over all prompts with greedy decoding and the drafter's tree size."""
        if not self._prompts:
            return {}
        emitted, steps, drafter = 0, 0, self._drafter()
        pipe = Pipeline(self.pipe.target, self.pipe.processor, drafter)
        for prompt in self._prompts:
            limits = {"max_new_tokens": self._options.max_new_tokens, "nodes": drafter.tree_size}
            with suppress(UserError):  # the prompt fills the target's context
                stats = pipe.generate(prompt, temperature=0.0, **limits).stats
                emitted += sum(stats.accept_lengths)
                steps += stats.num_spec_steps
        return {"mean_acceptance_length": emitted / steps} if steps else {}


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
    """Weights of a target's decoder by published name, with only the given layers, renumbered from 0."""
    decoder = target.model.get_decoder()
    found: dict[str, Tensor] = {}

    def add(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_modules(prefix=prefix):
            plain = child.unpacked() if isinstance(child, PackedLinear) else child
            found.update({f"{name}.{key}": weight for key, weight in plain.named_parameters(recurse=False)})

    for name, module in decoder.named_children():
        if name != "layers":
            add(name, module)
    for number, place in enumerate(layers if hasattr(decoder, "layers") else ()):
        add(f"layers.{number}", decoder.layers[place])
    return found


def output_rows(target: Target) -> int:
    """Number of tokens of the target's output layer."""
    return target.head(target.embed(torch.zeros(1, dtype=torch.long, device=target.device))).shape[-1]


def mask_token(pipe: Pipeline) -> int:
    """A mask token: an unused special token of the tokenizer, else the last token that does not end an answer. Its
    embedding is not zero."""
    tokenizer, vocab = pipe.processor.tokenizer, pipe.target.config.vocab_size
    named = (getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad", "unk"))
    for token in [*(token for token in named if token is not None and token < vocab), *reversed(range(vocab))]:
        embedding = plain_embedding(pipe.target, torch.tensor([token], dtype=torch.long, device=pipe.target.device))
        if token not in pipe.target.eos_token_ids and bool(embedding.any()):
            return int(token)
    raise UserError("expected a target with a token for masks, received one whose embeddings are all zero")


def started(
    kind: type[D], folder: Path | None, target: Target, draft_ids: Tensor | None
) -> tuple[D | None, Tensor | None]:
    """The drafter to start from, attached to ``target``, and the draft vocabulary, by default this drafter's."""
    if folder is None:
        return None, draft_ids
    start = kind.from_checkpoint(folder)
    start.attach(target)  # rejects drafters of other targets
    return start, start.draft_ids if draft_ids is None else draft_ids


def load_shared_weights(start: HiddenStateDrafter, network: nn.Module, folder: Path | None) -> None:
    """Load the weights shared with another drafter; other weights keep their random initialisation."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    shared = {name: tensor for name, tensor in start.network.state_dict().items() if name in wanted}
    for name, tensor in shared.items():
        if tuple(tensor.shape) != wanted[name]:
            raise UserError(f"{folder}: expected {name} {wanted[name]} to start from, received {tuple(tensor.shape)}")
    network.load_state_dict(shared, strict=False)
