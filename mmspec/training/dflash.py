"""``mmspec train dflash``: objective and setup of network and drafter."""

from __future__ import annotations

import re
from dataclasses import replace
from math import exp
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.core.target import Target
from mmspec.drafters.dflash import DFlash, DFlashConfig, DFlashNetwork, attended, block_tokens, default_layer_ids
from mmspec.drafters.hidden_state import plain_embedding
from mmspec.drafters.layer import rotary_of
from mmspec.drafters.layouts.families import NAMES
from mmspec.drafters.layouts.fields import published_names, shapes_of, stack
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.training import tasks
from mmspec.training.features import Features
from mmspec.training.objectives import LossInput, LossOutput, TokenLosses, token_loss
from mmspec.training.options import NetworkOptions, NextTokenLoss, TreeOptions
from mmspec.training.tasks import DrafterTraining, TrainingTask
from mmspec.validation import inherited, option, options, part, with_fields_of

_BASE = 0.6  # weight of the loss of XPress' uncorrected logits (vllm-project/speculators)
_OWN = re.compile(  # modules that targets do not have
    r"(fc|hidden_norm|markov_\w+|confidence|refiner|predecessors|successors|selector_state|layers\.\d+\.\w+_conv)\."
)
_OPTIONAL = ("q_norm.weight", "k_norm.weight")


@options
class DFlashObjective(NextTokenLoss):
    """Loss of blocks against the target's next-token distributions (arXiv 2602.06036, section 4).

    An anchor is an answer token followed by another answer token. Its block attends to the context of all earlier
    tokens and to itself; slot k, from 1, predicts the k-th token after the anchor, given the tokens in between if there
    is a Markov head. The confidence head learns the expected acceptance of each slot by binary cross-entropy (arXiv
    2607.05147, formula 11), the selector learns the target's token by cross-entropy over the slot's candidates
    (vllm-project/speculators). XPress' uncorrected logits have an additional loss.

    Metrics: ``token_k`` and ``right_k`` are loss and accuracy of slot k, without the selector; ``confidence_k`` and
    ``selector_k`` are the losses of these heads.
    """

    anchors: int = option(24, "Blocks per conversation.", ge=1)
    gamma: float = option(4.0, "Slots have weights exp(-(k-1)/gamma).", gt=0)

    def __call__(self, network: DFlashNetwork, given: LossInput) -> LossOutput:
        """The losses; samples anchors."""
        batch = given.batch
        followed = batch.answer[:, :-1] & batch.answer[:, 1:]
        losses = TokenLosses(self.loss, given, batch.hidden[:, :-1], followed, {"base": _BASE})
        if not losses.count:
            return losses.output
        anchors = _draw(followed, self.anchors, given.generator)
        states = _states(network, given.target, batch, anchors)
        scoring = network.lm_head if network.config.head else losses.head
        alive = followed.gather(1, anchors)
        losses.count = int(alive.sum())  # blocks
        last, before = (batch.tokens.gather(1, (anchors - back).clamp(min=0)) for back in (0, 1))
        memory = network.first_memory(states, last, before)
        memory = None if memory is None else memory[alive]
        for slot in range(1, network.config.drafts + 1):
            at = (anchors + slot - 1).clamp(max=followed.shape[1] - 1)
            before, alive = alive, alive & followed.gather(1, at)
            if not bool(alive.any()):
                break
            read, previous = states[:, :, network.config.first + slot - 1][alive], batch.tokens.gather(1, at)[alive]
            memory = None if memory is None else memory[alive[before]]
            scores, goal, further, confidence = scoring(read), losses.goals(alive, at), {}, None
            if network.config.selector_rank:
                further["selector"] = selector_loss(network, scores, goal, read, previous)
            else:
                if network.config.markov_type == "xpress":  # keeps the states useful without the correction
                    further["base"] = token_loss(self.loss, goal, scores.float().log_softmax(-1))
                scores, confidence, memory = network.corrected(scores, read, previous, memory)
            if confidence is not None:
                accepted = torch.minimum(goal, scores.detach().float().softmax(-1)).sum(-1).clamp(max=1.0)
                further["confidence"] = F.binary_cross_entropy_with_logits(confidence.float(), accepted)
            losses.add(slot, scores, goal, exp(-(slot - 1) / self.gamma), **further)
        return losses.output


@options(kw_only=True)
@with_fields_of(DFlashConfig)
class DFlashOptions(DFlashObjective, NetworkOptions):
    depth: int = inherited(TreeOptions, "depth", default=15)
    layers: int | None = inherited(DFlashConfig, "layers", "Decoder layers.", default_text="2", default=None)
    from_target: bool = option(False, "Start as the target's last layers, if they are like its own.")


def setup(options: DFlashOptions, pipe: Pipeline, draft_ids: Tensor | None) -> TrainingTask:
    target = pipe.target
    start, draft_ids = tasks.started(DFlash, options.start, target, draft_ids)
    if start is not None and (start.network.config.head or rotary_of(start.network.config)[1] is not None):
        raise UserError(
            f"{options.start}: expected a drafter with the target's output layer and plain rotary positions"
        )
    config = _network_config(options, pipe, start, tasks.output_rows(target) if draft_ids is None else len(draft_ids))
    network = DFlashNetwork(config).to(target.device, torch.float32)
    if config.markov_rank:
        nn.init.zeros_(network.markov_head.weight)  # initially no correction
    if config.selector_rank:
        if draft_ids is not None:
            raise UserError("--selector-rank needs all tokens of the target: leave out --draft-vocabulary")
        nn.init.zeros_(network.successors.weight)
    if start is not None:
        tasks.load_shared_weights(start, network, options.start)
    elif options.from_target:
        copy_last_layers(network, target)
    return TrainingTask(network, options, DFlash, draft_ids, config.features(target.config.num_hidden_layers))


def _network_config(options: DFlashOptions, pipe: Pipeline, start: DFlash | None, drafts: int) -> DFlashConfig:
    given, decoder = part(options, DFlashConfig.__dataclass_fields__), pipe.target.config
    if "selector_rank" in given:
        given["selector_tokens"] = decoder.vocab_size * (given["selector_rank"] > 0)
    if "markov_rank" in given:
        has = given["markov_rank"] > 0
        given |= {"markov_inputs": has * decoder.vocab_size, "markov_outputs": has * drafts}
    if start is not None:
        return replace(start.network.config, **given)
    new = {"block_size": 8, "layers": 2, "target_layer_ids": default_layer_ids(decoder.num_hidden_layers), **given}
    if "mask_token_id" not in new:
        new["mask_token_id"] = tasks.mask_token(pipe)
    return DFlashConfig.like(decoder, **new)


@torch.no_grad()
def copy_last_layers(network: DFlashNetwork, target: Any) -> None:
    """Initialise the layers and the last norm from the target's last layers and norm, whose inputs include the last
    states that the drafter reads. Query and key norms without a counterpart in the target keep their initial values."""
    last = range(target.config.num_hidden_layers)[-network.config.layers :]
    theirs, own = tasks.decoder_weights(target, last), network.state_dict()
    parts = {
        ours: some
        for ours, some in published_names(own, NAMES).items()
        if not _OWN.match(ours) and (some[0] in theirs or not ours.endswith(_OPTIONAL))
    }
    for name, expected in shapes_of(own, parts, network.config).items():
        if (received := tuple(theirs[name].shape) if name in theirs else "none") != expected:
            raise UserError(
                f"--from-target needs layers like the drafter's: expected {name} {expected}, received {received}"
            )
    for ours, weight in stack(theirs, parts).items():
        own[ours].copy_(weight)
    network.hidden_norm.weight.copy_(own["layers.0.input_norm.weight"])
    network.fc.weight.zero_()[:, -network.config.hidden_size :].fill_diagonal_(1.0)


def selector_loss(network: DFlashNetwork, scores: Tensor, goal: Tensor, states: Tensor, previous: Tensor) -> Tensor:
    """Mean loss of the selector. If the target's token is not a candidate, it replaces the last candidate."""
    wanted, among = goal.argmax(-1, keepdim=True), scores.topk(network.config.selector_top_k, dim=-1).indices
    found = among == wanted
    among[:, -1:] = among[:, -1:].where(found.any(-1, keepdim=True), wanted)
    chosen = network.select(scores.gather(-1, among), among, states, previous)
    return F.cross_entropy(chosen.float(), (among == wanted).int().argmax(-1))


def _draw(possible: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Sample up to ``count`` distinct anchor positions per row, (batch, anchors) int64, padded with other positions."""
    noise = torch.rand(possible.shape, dtype=torch.float32, generator=generator, device=possible.device)
    return noise.masked_fill(~possible, -1.0).topk(min(count, int(possible.sum(1).max())), dim=1).indices


def _states(network: DFlashNetwork, target: Target, batch: Features, anchors: Tensor) -> Tensor:
    """Run the network on one block per anchor: (batch, anchors, block, hidden)."""
    config, length = network.config, batch.tokens.shape[1]
    assert batch.layers is not None, "the extractor reads the network's layers"
    rotary, _ = rotary_of(config)
    context = network.project(batch.layers)
    rotary.reserve(length + config.block_size, context)
    known = list(network.context(context, rotary(slice(0, length))))
    places = anchors[:, :, None] + torch.arange(config.block_size, device=anchors.device)
    masks = _masks(anchors, places, length, config)

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        keys, values = (torch.cat(parts, dim=2) for parts in zip(known[layer], (k, v), strict=True))
        return F.scaled_dot_product_attention(q, keys, values, masks[layer], enable_gqa=True)

    tokens = block_tokens(batch.tokens.gather(1, anchors), config).flatten(1)
    if config.embedding:
        x = network.embed_tokens(tokens)
    else:
        with torch.no_grad():
            x = plain_embedding(target, tokens).clone()
    outputs: Tensor = network(x.to(context.dtype), rotary(places.flatten(1)), attend)
    return outputs.unflatten(1, places.shape[1:])


def _masks(anchors: Tensor, places: Tensor, length: int, config: DFlashConfig) -> list[Tensor]:
    """Per-layer attention masks over the tokens before an anchor and its own block, (batch, 1, anchors * block, length
    + anchors * block) bool."""
    tokens = torch.arange(length, device=anchors.device)
    before = (tokens < anchors[:, :, None]).repeat_interleave(config.block_size, dim=1)
    number = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(config.block_size)
    own = (number[:, None] == number).expand(len(anchors), -1, -1)
    flat = places.flatten(1)
    keys = torch.cat([tokens.expand(len(anchors), -1), flat], dim=1)
    seen = torch.cat([before, own], dim=2)[:, None]
    return [seen & mask[:, None] for mask in attended(flat[:, :, None] - keys[:, None], config)]


TRAINING = DrafterTraining(
    DFlashOptions,
    setup,
    """Train a DFlash drafter, which drafts a block of tokens in one pass.

    It reads several layers of the target, at image positions too.""",
)
