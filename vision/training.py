"""``mmspec train msd`` and ``mmspec train flash``: objective and setup of network and drafter.

The drafter learns the target's next hidden states and tokens, from true states and from its own predictions. Entry j of
a drafter's sequence reads token j + 1 and the target's hidden state at token j. It predicts the hidden state at token j
+ 1 and, through the target's head, token j + 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.hidden_state import packing
from mmspec.drafters.layer import Rotary, rotary_frequencies, take
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.training import tasks
from mmspec.training.features import Features
from mmspec.training.objectives import LossInput, LossOutput, PassCache, TokenLosses
from mmspec.training.options import NetworkOptions, Passes, TreeOptions
from mmspec.training.tasks import DrafterTraining, OnlineLearner, TrainingTask
from mmspec.validation import inherited, option, options, part, with_fields_of
from mmspec.vision.drafters.msd import MSD, Flash, MSDConfig, MSDNetwork

_DEFAULT_SPAN = 256
"""Default number of visual tokens per image, if the target's configuration does not contain it."""


@options
class Losses(Passes):
    """Settings of MSD's objective: weights of the smooth L1 distance to the target's hidden state, and of the
    cross-entropy with its next-token distribution (the MSD and EAGLE papers use 1 and 0.1); amplitude of uniform noise,
    times 512 / length, on the hidden states of the first pass."""

    hidden_weight: float = option(0.1, "Weight of the hidden-state loss.", ge=0)
    token_weight: float = option(1.0, "Weight of the token loss.", ge=0)
    noise: float = option(0.1, "Noise on the input hidden states.", ge=0)


@options
class SlotLosses(Losses):
    """Settings of FLASH's objective. Glancing replaces states before the next pass (Falcon, arXiv 2412.12639, replaces
    tokens; here, blocks always contain true tokens)."""

    slot_decay: float = option(1.0, "Weight of a slot to the one before.", gt=0)
    glancing: float = option(0.0, "Share of wrong predictions replaced by the truth, decaying to 0.", ge=0, le=1)


@options(kw_only=True)
@with_fields_of(MSDConfig)
class MSDOptions(Losses, NetworkOptions):
    """Options of ``mmspec train msd``."""

    fit: bool = option(
        False, "Without --start: initialise by ridge regression of the target's hidden states; for small datasets."
    )
    hide_visual: bool | None = inherited(MSDConfig, "hide_visual", default=None)


@options(kw_only=True)
class FlashOptions(SlotLosses, MSDOptions):
    """Options of ``mmspec train flash``. FLASH grows a tree in one pass, MSD one level per pass."""

    passes: int = inherited(Passes, "passes", default=1)
    top_k: int = inherited(TreeOptions, "top_k", default=4)
    depth: int = inherited(TreeOptions, "depth", default=12)
    slots: int = inherited(MSDConfig, "slots", "Tokens per forward pass; 1 as in MSD.", default=12)
    latents: int | None = inherited(
        MSDConfig,
        "latents",
        "Latents per image; 0 keeps all visual tokens, as in MSD.",
        default_text="by --ratio",
        default=None,
    )
    ratio: float = option(9.0, "Or visual tokens per latent.", gt=0)
    span: int | None = inherited(
        MSDConfig,
        "span",
        "Visual tokens per image; longer runs are split.",
        default_text="that of the target's configuration, or 256",
        ge=1,
        le=2**20,
        default=None,
    )
    rank: int | None = inherited(
        MSDConfig,
        "rank",
        "Rank of a separate output layer for the slots after the first; 0: the target's head.",
        default=None,
    )


def _setup(kind: type[MSD], options: MSDOptions, pipe: Pipeline, draft_ids: Tensor | None) -> TrainingTask:
    target = pipe.target
    start, draft_ids = tasks.started(MSD, options.start, target, draft_ids)
    tokens = tasks.output_rows(target) if draft_ids is None else len(draft_ids)
    network = MSDNetwork(_network_config(options, target, start, tokens)).to(target.device, torch.float32)
    config, rank = network.config, start.network.config.rank if start else None
    if config.rank and options.passes > 1:
        raise UserError(f"passes must be 1 with rank: got {options.passes}")
    if config.reads:
        nn.init.zeros_(network.read.weight)  # initially without effect
    if start is not None:
        tasks.load_shared_weights(start, network, options.start)
    if config.rank and config.rank != rank:
        guess = start.network.cell.guess if start is not None and not rank else None
        init_low_rank_head(network, tasks.head_weight(target, draft_ids), guess)
    objective = HiddenStateObjective(**part(options, HiddenStateObjective.__dataclass_fields__))
    fit = partial(fit_projection, network) if options.fit and start is None else None
    return TrainingTask(network, objective, kind, draft_ids, config.reads, fit)


@torch.no_grad()
def init_low_rank_head(network: MSDNetwork, head: Tensor, guess: nn.Linear | None = None) -> None:
    """Initialise the output layer of ``MSDConfig.rank`` as the best low-rank approximation of the target's head, whose
    weight is (draft tokens, hidden). ``guess`` predicts its inputs from carried states; None is the identity."""
    whole = head if guess is None else head @ guess.weight.to(head)
    left, values, right = torch.linalg.svd(whole.float(), full_matrices=False)
    kept = values[: network.config.rank].sqrt()
    network.cell.head.weight.zero_()
    network.cell.narrow.weight.zero_()
    network.cell.head.weight[:, : len(kept)] = left[:, : len(kept)] * kept
    network.cell.narrow.weight[: len(kept)] = kept[:, None] * right[: len(kept)]
    network.cell.head.bias.copy_(head.new_zeros(len(head)) if guess is None else head @ guess.bias.to(head))


@torch.no_grad()
def fit_projection(network: MSDNetwork, batches: Iterable[Features], ridge: float = 0.01) -> None:
    """Initialise the projection of token embedding and hidden state as the best linear predictor of the target's next
    hidden state, by ridge regression; attention and MLP are initialised to add nothing. ``ridge``: weight of the
    penalty, relative to the mean square of the inputs."""
    width = network.config.hidden_size
    moments = torch.zeros(2 * width + 1, 3 * width + 1, dtype=torch.float64)
    for batch in batches:
        chosen = batch.answer[:, 1:] & batch.answer[:, :-1]
        inputs = torch.cat([batch.embeds[:, 1:], batch.hidden[:, :-1]], dim=-1)[chosen].double().cpu()
        inputs = F.pad(inputs, (0, 1), value=1.0)
        moments += inputs.t() @ torch.cat([inputs, batch.hidden[:, 1:][chosen].double().cpu()], dim=1)
    square, product = moments.split([2 * width + 1, width], dim=1)
    scale = square.diagonal()[:-1]
    penalty = torch.cat([scale[:width].mean().expand(width), scale[width:].mean().expand(width), scale.new_zeros(1)])
    if bool((penalty[:-1] == 0).any()):
        return  # no answers
    solved = torch.linalg.solve(square + torch.diag(ridge * penalty), product)
    network.fc.weight.copy_(solved[:-1].t())
    network.fc.bias.copy_(solved[-1])
    for branch in (network.out, network.down):
        branch.weight.zero_()


def _network_config(options: MSDOptions, target: Any, start: MSD | None, tokens: int) -> MSDConfig:
    fields = part(options, MSDConfig.__dataclass_fields__)
    if isinstance(options, FlashOptions):
        # LLaVA's configurations contain the number of tokens per image; in other families it varies.
        span = options.span or getattr(target.model_config, "image_seq_length", None) or _DEFAULT_SPAN
        latents = max(1, round(span / options.ratio)) if options.latents is None else options.latents
        latents = 0 if options.hide_visual else latents
        fields |= {"latents": latents, "span": span if latents else 0}
    rank = fields.get("rank", start.network.config.rank if start else 0)
    fields |= {"rank": rank, "head": tokens if rank else 0}
    return replace(start.network.config, **fields) if start else MSDConfig.like(target.config, **fields)


@options
class HiddenStateObjective(SlotLosses):
    """Losses of a batch over several forward passes, each fed with the predictions of the previous pass.

    The first pass reads the target's true hidden states, as for accepted tokens. Later passes read predicted states for
    the last tokens and true states before them, as for tree nodes (training-time test of EAGLE-3, arXiv 2503.01840; a
    single pass is MSD's training, arXiv 2505.14260).

    With k slots, a pass predicts k states in sequence, each from the previous predicted state and the true token,
    because a tree node only matters if its parent was accepted. The next pass reads all k states. In the first pass, a
    chain starts at every entry; every k-th chain, from a random start, continues in later passes.

    Metrics are numbered by depth in a tree: ``right_d`` is the accuracy of tokens predicted d steps after a true state.
    ``MSDConfig.confidence`` learns the total probability of the ``top_k`` children of a node.
    """

    top_k: int = option(10, ge=1)

    def __call__(self, network: MSDNetwork, given: LossInput) -> LossOutput:
        """The losses; samples noise, first chain and glancing."""
        batch, generator = given.batch, given.generator
        slots = network.config.slots
        read = batch.hidden if batch.layers is None else torch.cat([batch.hidden, batch.layers], dim=-1)
        hidden = network.states(read[:, :-1])
        if self.noise:
            noise = torch.rand(hidden.shape, generator=generator, device=hidden.device, dtype=torch.float32) - 0.5
            hidden = hidden + (2 * self.noise * 512 / hidden.shape[1] * noise).to(hidden.dtype)
        entries = _entries(network, batch, hidden)
        weights = {"token": self.token_weight, "hidden": self.hidden_weight}
        losses = TokenLosses(self.loss, given, entries.truth, entries.wanted, weights)
        if not losses.count:
            return losses.output
        chains = _Chains(self, network, entries, losses, self.glancing * (1.0 - given.progress), generator)
        rotary = Rotary(rotary_frequencies(network.config.head_dim, network.config.rope_theta))
        rotary.reserve(batch.hidden.shape[1], batch.embeds)
        cache = PassCache()
        x = network.combine(entries.embeds, entries.hidden, entries.visual)
        outputs = network(x, rotary(entries.positions), cache.attend)
        last, device = x.shape[1] - 1, x.device
        entry, valid = packing(entries.wanted, left=False)
        state, carried = network.begin(take(outputs, entry))
        for number in range(self.passes):
            states, ends = chains.predict(entry, state, carried, valid, number)
            if number + 1 == self.passes or not bool(ends.any()):
                break
            if number == 0:
                first = int(torch.randint(slots, (), generator=generator, device=device)) if slots > 1 else 0
                entry, ends, states = entry[:, first::slots], ends[:, first::slots], states[:, first::slots]
                cache.start_chains(entry)
            link = (entry[..., None] + torch.arange(1, slots + 1, device=device)).clamp(max=last).flatten(1)
            x = network.combine(take(entries.embeds, link), states.flatten(1, 2), None)
            at = link if isinstance(entries.positions, slice) else entries.positions.gather(1, link)
            outputs = network(x, rotary(at), cache.attend)
            entry, valid = entry + slots, ends
            state, carried = network.begin(outputs[:, slots - 1 :: slots])
        return losses.output


@dataclass(frozen=True)
class _Entries:
    """The drafter's input sequences of a batch, (batch, entries, ...) each; ``truth`` are the hidden states to predict,
    ``wanted`` the entries whose input token and predicted token both belong to an answer. ``positions`` are a slice if
    no entry was removed."""

    embeds: Tensor
    hidden: Tensor
    truth: Tensor
    visual: Tensor
    wanted: Tensor
    positions: Tensor | slice


def _entries(network: MSDNetwork, batch: Features, hidden: Tensor) -> _Entries:
    """The entries of a batch, with images compressed or hidden; ``hidden``: (batch, entries, hidden)."""
    answer = batch.answer[:, 1:]
    wanted = answer & F.pad(answer[:, 1:], (0, 1))
    embeds, truth, visual = batch.embeds[:, 1:], batch.hidden[:, 1:], batch.visual[:, 1:]
    images = network.images(visual)
    kept = network.kept(visual, images)
    if kept is None:
        return _Entries(embeds, hidden, truth, visual, wanted, slice(0, truth.shape[1]))
    order, _ = packing(kept, left=False)
    if images is not None:
        embeds, hidden = network.with_latents(embeds, hidden, images)
    visual, wanted = visual.gather(1, order), wanted.gather(1, order)
    return _Entries(take(embeds, order), take(hidden, order), take(truth, order), visual, wanted, order)


@dataclass(frozen=True)
class _Chains:
    """Predicts the states of a batch's chains and adds their losses; ``glancing`` is the share of wrong predictions to
    replace by the truth."""

    objective: HiddenStateObjective
    network: MSDNetwork
    entries: _Entries
    losses: TokenLosses
    glancing: float
    generator: torch.Generator | None

    def predict(
        self, entry: Tensor, state: Tensor, carried: Tensor, valid: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """Predict the states of all slots of pass ``number``: input states of the next pass, (batch, chains, slots,
        hidden), and mask of chains that it can continue.

        Args:
            entry: (batch, chains) int64, entry of each chain's first slot.
            state, carried: (batch, chains, hidden), states predicted in the first slot, and recurrent between slots.
            valid: (batch, chains) bool, chains that are still within an answer.
        """
        network, wanted = self.network, self.entries.wanted
        slots, last = network.config.slots, wanted.shape[1] - 1
        # Later passes continue one of ``slots`` chains.
        share, states = slots if number else 1, []
        for slot in range(slots):
            position = (entry + slot).clamp(max=last)
            own = slot > 0 and network.config.rank > 0
            if slot:
                carried = network.cell(take(self.entries.embeds, position), carried)
                state = state if own else network.guess(carried)
            weight = self.objective.decay**number * self.objective.slot_decay**slot * share
            states.append(self._scored(state, carried, own, position, valid, number * slots + slot + 1, weight))
            valid = valid & wanted.gather(1, (entry + slot + 1).clamp(max=last))
        return torch.stack(states, dim=2), valid

    def _scored(
        self, state: Tensor, carried: Tensor, own: bool, entry: Tensor, valid: Tensor, depth: int, weight: float
    ) -> Tensor:
        """Add the losses of predicted states at ``valid`` entries, with metrics of this ``depth``; returns the states
        to continue with, some replaced by glancing. Slots with an output layer of their ``own`` do not use ``state``;
        see ``predict``."""
        if not bool(valid.any()):
            return state
        predicted, inner, network = state[valid], carried[valid], self.network
        truth, goal = take(self.entries.truth, entry), self.losses.goals(valid, entry)
        scores, further = network.cell.scores(inner) if own else self.losses.head(predicted), {}
        if not own:
            further["hidden"] = F.smooth_l1_loss(predicted.float(), truth[valid].float())
        if network.config.confidence:
            # No gradients to the network's states.
            logit = network.coverage(predicted.detach(), inner.detach()).float()[:, 0]
            best = scores.topk(min(self.objective.top_k, scores.shape[-1]), dim=-1).indices
            covered = goal.gather(-1, best).sum(-1).clamp(0.0, 1.0)
            further["coverage"] = F.binary_cross_entropy_with_logits(logit, covered)
        self.losses.add(depth, scores, goal, weight, **further)
        if self.glancing == 0.0 or own:
            return state
        drawn = torch.rand(len(predicted), dtype=torch.float32, generator=self.generator, device=state.device)
        wrong = (drawn < self.glancing) & (scores.argmax(-1) != goal.argmax(-1))
        replaced = torch.zeros_like(valid).masked_scatter(valid, wrong)
        return torch.where(replaced[..., None], truth.to(state.dtype), state)


MSD_TRAINING = DrafterTraining(
    MSDOptions,
    partial(_setup, MSD),
    "Train an MSD drafter: first on text, then on a growing share of images and videos.",
)
FLASH_TRAINING = DrafterTraining(
    FlashOptions,
    partial(_setup, Flash),
    """Train a FLASH drafter: MSD with images compressed to latents and several tokens per forward pass.

    --latents 0 turns off compression, --slots 1 semi-autoregression. Other options are as in `train msd`.""",
)
online_flash = partial(OnlineLearner, HiddenStateObjective(passes=1, loss="lk"))
online_msd = partial(OnlineLearner, HiddenStateObjective(passes=2, loss="lk"))
