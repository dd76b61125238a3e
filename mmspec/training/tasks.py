"""Declarations for training a kind of drafter, optimisers, and initial weights from a target or drafter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mmspec.adaptation.adaptation import RecordedAnswer
from mmspec.core.target import Feature, Target
from mmspec.drafters.hidden_state import HiddenStateDrafter, plain_embedding
from mmspec.drafters.trained import TrainedDrafter
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.quantisation.linear import PackedLinear
from mmspec.targets.packed_forward import MergedLayer
from mmspec.training.features import ConversationFeatures, Features, collate
from mmspec.training.objectives import LossOutput
from mmspec.training.options import RunOptions

_DECAY = 0.01  # weight decay
_ONLINE_RATE = 1e-3
_ONLINE_BATCH = 4  # answers per step


class Objective(Protocol):
    """Protocol of losses of a drafter's network on answers."""

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
            target: provides the frozen embedding and output layer.
            batch: features of conversations, with the layers that the network reads.
            draft_ids: (n,) int64, reduced draft vocabulary that distributions are restricted to.
            generator: random generator for sampling.
            progress: training progress, from 0 to 1.
        """


@dataclass(frozen=True)
class DrafterSetup:
    """Drafter-specific parts of training.

    Attributes:
        network: network to train, in float32 on the target's device.
        objective: called with network, target, features, draft ids, generator and the run's progress.
        drafter: creates a drafter from a network, draft ids and ``tree``.
        draft_ids: token ids of a reduced draft vocabulary, (n,) int64; None drafts all tokens.
        tree: settings of the drafter's trees.
        fit: initialises the network from features of some training conversations, before a run starts.
        layers: additional target hidden states that the objective reads.
    """

    network: nn.Module
    objective: Objective
    drafter: Callable[..., Any]
    draft_ids: Tensor | None = None
    tree: Mapping[str, int] = field(default_factory=dict)
    fit: Callable[[Iterable[Features]], None] | None = None
    layers: Sequence[Feature] = ()


class DrafterTraining(NamedTuple):
    """Plug-in of the group ``train``: a command that trains one kind of drafter.

    Attributes:
        setup: creates network, objective and drafter from options, target and draft vocabulary.
        text: help text of the command.
    """

    options: type[RunOptions]
    setup: Callable[..., DrafterSetup]
    text: str


class Optimisers:
    """Muon for the matrices of layers, AdamW for all other parameters of a network that require gradients.

    Args:
        kind: "muon", where AdamW has half the rate; "adamw" trains matrices by AdamW too.
        rate: learning rate; Muon's updates are scaled to match the RMS of AdamW's.
    """

    def __init__(self, network: nn.Module, kind: Literal["muon", "adamw"], rate: float) -> None:
        self.rate, self._clip = rate, 1.0 if kind == "muon" else 0.5
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                # Not for Muon: each row of an embedding is updated on its own.
                is_matrix = kind == "muon" and parameter.ndim == 2 and "embed" not in name
                (matrices if is_matrix else others).append(parameter)
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
        """Restore the ``state_dict()`` of the same groups."""
        for optimiser, state in zip(self.all, states, strict=True):
            optimiser.load_state_dict(state)


class OnlineLearner:
    """Trains a float32 copy of a drafter's network on features recorded during decoding, without target forward passes;
    see ``mmspec.adaptation.adaptation.Learner``.

    Args:
        objective: loss of a batch of features.
        drafter: unattached drafter.
        target: provides the frozen embedding and output layer.
    """

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
            loss = self._objective(self._network, target, batch, self._draft_ids, self._generator, 1.0).total
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
    """Number of tokens of the target's output layer."""
    return target.head(target.embed(torch.zeros(1, dtype=torch.long, device=target.device))).shape[-1]


def mask_token(pipe: Pipeline) -> int:
    """A mask token: an unused special token of the tokenizer, else the last token that does not end an answer.

    Its embedding is not zero.
    """
    tokenizer, vocab = pipe.processor.tokenizer, pipe.target.config.vocab_size
    named = (getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad", "unk"))
    for token in [*(token for token in named if token is not None and token < vocab), *reversed(range(vocab))]:
        embedding = plain_embedding(pipe.target, torch.tensor([token], dtype=torch.long, device=pipe.target.device))
        if token not in pipe.target.eos_token_ids and bool(embedding.any()):
            return int(token)
    raise UserError("expected a target with a token for masks, received one whose embeddings are all zero")


def load_shared_weights(start: HiddenStateDrafter, network: nn.Module, folder: Path | None) -> None:
    """Load the weights shared with another drafter; other weights keep their random initialisation."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    shared = {name: tensor for name, tensor in start.network.state_dict().items() if name in wanted}
    for name, tensor in shared.items():
        if tuple(tensor.shape) != wanted[name]:
            raise UserError(f"{folder}: expected {name} {wanted[name]} to start from, received {tuple(tensor.shape)}")
    network.load_state_dict(shared, strict=False)
