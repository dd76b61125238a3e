"""``mmspec train eagle3``: objective and setup of network and drafter.

Entry j of a drafter's sequence reads token j + 1 and the target's states at token j, and predicts token j + 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.core.target import Target
from mmspec.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Network
from mmspec.drafters.hidden_state import packing
from mmspec.drafters.layer import rotary_of, take
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.training import tasks
from mmspec.training.objectives import LossInput, LossOutput, PassCache, TokenLosses
from mmspec.training.options import NetworkOptions, Passes, TreeOptions
from mmspec.training.tasks import DrafterTraining, TrainingTask
from mmspec.validation import inherited, option, options, part, with_fields_of


@options
class Eagle3Objective(Passes):
    """Loss against the target's next-token distribution over several passes (training-time test, arXiv 2503.01840,
    section 3.2).

    The first pass reads the target's states at all entries. In pass s, an entry reads the state predicted for it in
    pass s - 1, and attends to its s - 1 predecessors in the earlier passes and to all entries before them in the first
    pass, like a node at depth s of a tree. With a mask token (P-EAGLE, arXiv 2602.01469), entries of later passes read
    the mask token and the learned state instead.

    Each pass after the first keeps a chain with probability ``keep`` (conditional drop-token, arXiv 2602.01469, section
    4).

    The metrics ``token_d`` and ``right_d`` are loss and accuracy d steps after a true state.
    """

    passes: int = inherited(Passes, "passes", "Levels of a tree that are trained, a forward pass each.", default=5)
    keep: float = option(
        1.0, "Share of the chains that each further pass keeps (conditional drop-token, arXiv 2602.01469).", ge=0, le=1
    )

    def __call__(self, network: Eagle3Network, given: LossInput) -> LossOutput:
        """The losses; samples the chains to keep."""
        target, batch = given.target, given.batch
        answer = batch.answer[:, 1:]
        wanted = answer & F.pad(answer[:, 1:], (0, 1))
        losses = TokenLosses(self.loss, given, batch.hidden[:, 1:], wanted)
        if not losses.count:
            return losses.output
        assert batch.layers is not None, "the extractor reads the network's layers"
        embeds = _embeddings(network, target, batch.tokens[:, 1:])
        rotary, _ = rotary_of(network.config)
        rotary.reserve(embeds.shape[1], embeds)
        caches = [PassCache() for _ in network.layers]

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return caches[layer].attend(q, k, v)

        outputs = network(
            network.combine(embeds, network.project(batch.layers[:, :-1])), rotary(slice(0, embeds.shape[1])), attend
        )
        entry, valid = packing(wanted, left=False)  # one chain per wanted entry of the first pass
        state, _ = network.begin(take(outputs, entry))
        for cache in caches:
            cache.start_chains(entry)
        for number in range(self.passes):
            if number:
                entry = (entry + 1).clamp(max=wanted.shape[1] - 1)
                kept = torch.rand(valid.shape, dtype=torch.float32, generator=given.generator, device=valid.device)
                places, valid = packing((kept < self.keep) & valid & wanted.gather(1, entry), left=False)
                if places.shape[1] == 0:
                    break
                entry = entry.gather(1, places)
                for cache in caches:
                    cache.keep_chains(places)
                x = _inputs(network, target, take(embeds, entry), take(state, places))
                state, _ = network.begin(network(x, rotary(entry), attend))
            scores = network.scores(network.lm_head if network.config.head else losses.head, state[valid])
            losses.add(number + 1, scores, losses.goals(valid, entry), self.decay**number)
        return losses.output


@options(kw_only=True)
@with_fields_of(Eagle3Config)
class Eagle3Options(Eagle3Objective, NetworkOptions):
    depth: int = inherited(TreeOptions, "depth", default=8)
    parallel: bool | None = option(
        None,
        "Draft all levels in one pass (P-EAGLE): further levels have a mask token and a learnt state.",
        default_text="one pass per level",
        names=("--parallel/--sequential",),
    )


def setup(options: Eagle3Options, pipe: Pipeline, draft_ids: Tensor | None) -> TrainingTask:
    target = pipe.target
    start, draft_ids = tasks.started(Eagle3, options.start, target, draft_ids)
    if start is not None:
        if start.network.config.window or start.network.config.candidates:
            raise UserError(f"{options.start}: expected an EAGLE-3 head without a sliding window, received EAGLE-4's")
        if rotary_of(start.network.config)[1] is not None:
            raise UserError(f"{options.start}: expected a head with plain rotary positions, received M-RoPE")
    config = _network_config(options, pipe, draft_ids, start)
    network = Eagle3Network(config).to(target.device, torch.float32)
    if start is not None:
        tasks.load_shared_weights(start, network, options.start)
    else:
        with torch.no_grad():
            network.lm_head.weight.copy_(tasks.head_weight(target, draft_ids))
    return TrainingTask(network, options, Eagle3, draft_ids, config.features(target.config.num_hidden_layers))


def _network_config(
    options: Eagle3Options, pipe: Pipeline, draft_ids: Tensor | None, start: Eagle3 | None
) -> Eagle3Config:
    given: dict[str, Any] = part(options, Eagle3Config.__dataclass_fields__)
    given |= {"states": len(given["reads"])} if "reads" in given else {}
    before = None if start is None else start.network.config
    mask = None if before is None else before.mask_token_id
    if options.parallel is not None:
        mask = (tasks.mask_token(pipe) if mask is None else mask) if options.parallel else None
    head = tasks.output_rows(pipe.target) if draft_ids is None else len(draft_ids)
    if before is not None:
        return replace(before, **given, head=head if before.head else 0, mask_token_id=mask)
    new = {"fc_norm": not given.get("norm_before_fc"), "norm_output": True, **given}
    return Eagle3Config.like(pipe.target.config, **new, head=head, mask_token_id=mask)


def _inputs(network: Eagle3Network, target: Target, embeds: Tensor, state: Tensor) -> Tensor:
    """Layer inputs of a later pass, (batch, chains, 2 * hidden), from token embeddings and predicted states."""
    if (mask := network.config.mask_token_id) is None:
        return network.combine(embeds, state)
    embed = _embeddings(network, target, torch.full((1, 1), mask, dtype=torch.long, device=embeds.device))
    return network.combine(embed, network.project(network.mask_hidden)).expand(*embeds.shape[:2], -1)


def _embeddings(network: Eagle3Network, target: Target, tokens: Tensor) -> Tensor:
    """Embeddings of tokens, including placeholders, (batch, length, hidden)."""
    rows = network.config.embedding or target.config.vocab_size  # type: ignore[attr-defined]
    tokens = tokens.masked_fill(tokens >= rows, 0)
    if network.config.embedding:
        return network.embed_tokens(tokens)
    with torch.no_grad():
        return target.embed(tokens).clone()


TRAINING = DrafterTraining(
    Eagle3Options,
    setup,
    """Train an EAGLE-3 head, which reads several layers of the target, over several self-fed steps.

    With --parallel, a P-EAGLE head, which drafts all levels in one pass. Image positions are placeholder tokens to
    it.""",
)
