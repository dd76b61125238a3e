"""Training objective of MSD and FLASH: the target's next hidden states and tokens, also after the drafter's own ones.

Entry j of a drafter's sequence takes token j + 1 and the target's hidden state at token j. It predicts the hidden state
at token j + 1, and with the target's head token j + 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.checks import NOT_NEGATIVE, POSITIVE, SHARE, option, whole
from mmspec.core.target import Target
from mmspec.drafters.hidden_state import packing, take
from mmspec.drafters.layer import Rotary, rotary_frequencies
from mmspec.training.features import Features
from mmspec.training.loss import LossOutput
from mmspec.training.objectives import PassCache, token_loss
from mmspec.training.options import Passes
from mmspec.vision.drafters.msd import MSDNetwork


@dataclass(frozen=True)
class Losses(Passes):
    """Settings of MSD's objective.

    Attributes:
        hidden_weight, token_weight: of the smooth L1 distance to the target's hidden state, and of the cross-entropy
            with its next-token distribution. The papers of MSD and EAGLE weight the two 1 and 0.1.
        noise: amplitude of uniform noise, times 512 / length, on the hidden states of the first pass.
    """

    hidden_weight: float = option(0.1, NOT_NEGATIVE, "Weight of the hidden-state loss.")
    token_weight: float = option(1.0, NOT_NEGATIVE, "Weight of the token loss.")
    noise: float = option(0.1, NOT_NEGATIVE, "Noise on the input hidden states.")


@dataclass(frozen=True)
class SlotLosses(Losses):
    """Settings of FLASH's objective.

    Attributes:
        glancing: predictions are replaced by the target's states before the next pass (Falcon, arXiv 2412.12639,
            replaces tokens: here the tokens of a block are the true ones anyway).
    """

    slot_decay: float = option(1.0, POSITIVE, "Weight of a slot to the one before.")
    glancing: float = option(0.0, SHARE, "Share of wrong predictions replaced by the truth, decaying to 0.")


@dataclass(frozen=True)
class HiddenStateObjective(SlotLosses):
    """Losses of a batch over several forward passes, each fed with the predictions of the pass before.

    The first pass takes the target's true hidden states, as for accepted tokens. Later passes take predicted states for
    the last tokens and true states before them, as for a node of a tree (the training-time test of EAGLE-3, arXiv
    2503.01840; a single pass is the training of MSD, arXiv 2505.14260).

    With k slots a pass predicts k states in sequence, each from the state predicted before it and the true token: a
    tree node matters only if its parent was accepted. The next pass is fed with all k. In the first pass such a chain
    starts at every entry; every k-th chain, from a random one on, continues in the later passes.

    Metrics are numbered by depth in a tree: ``right_d`` is the accuracy of tokens predicted d steps after a true state.

    Attributes:
        top_k: children per node, whose total probability ``MSDConfig.confidence`` learns.
    """

    top_k: int = option(10, whole(1))

    def __call__(
        self,
        network: MSDNetwork,
        target: Target,
        batch: Features,
        draft_ids: Tensor | None = None,
        generator: torch.Generator | None = None,
        progress: float = 1.0,
    ) -> LossOutput:
        """The losses, see ``mmspec.training.tasks.Objective``. Noise, the first chain, and the predictions that
        glancing replaces are drawn."""
        slots = network.config.slots
        read = batch.hidden if batch.layers is None else torch.cat([batch.hidden, batch.layers], dim=-1)
        entries = _entries(network, batch, self._noisy(network.states(read[:, :-1]), generator))
        head = target.head if draft_ids is None else target.narrow_head(draft_ids)
        losses = _LossSum(self, network, entries, head, self.glancing * (1.0 - progress), generator)
        if losses.count == 0:
            return LossOutput(losses.total, losses.metrics)
        rotary = Rotary(rotary_frequencies(network.config.head_dim, network.config.rope_theta))
        rotary.reserve(batch.hidden.shape[1], batch.embeds)
        cache = PassCache()
        x = network.combine(entries.embeds, entries.hidden, entries.visual)
        outputs = network(x, rotary(entries.positions), cache.attend)
        last, device = x.shape[1] - 1, x.device
        entry, valid = packing(entries.wanted, left=False)
        state, carried = network.begin(take(outputs, entry))
        for number in range(self.passes):
            states, ends = self._predict_slots(network, entries, losses, entry, state, carried, valid, number)
            if number + 1 == self.passes or not bool(ends.any()):
                break
            if number == 0:
                first = int(torch.randint(slots, (), generator=generator, device=device)) if slots > 1 else 0
                entry, ends, states = entry[:, first::slots], ends[:, first::slots], states[:, first::slots]
                cache.start_chains(entry)
            link = (entry[..., None] + torch.arange(1, slots + 1, device=device)).clamp(max=last).flatten(1)
            x = network.combine(take(entries.embeds, link), states.flatten(1, 2), None)
            outputs = network(x, rotary(entries.positions_of(link)), cache.attend)
            entry, valid = entry + slots, ends
            state, carried = network.begin(outputs[:, slots - 1 :: slots])
        return LossOutput(losses.total, losses.metrics)

    def _predict_slots(
        self,
        network: MSDNetwork,
        entries: _Entries,
        losses: _LossSum,
        entry: Tensor,
        state: Tensor,
        carried: Tensor,
        valid: Tensor,
        number: int,
    ) -> tuple[Tensor, Tensor]:
        """Predicts the states of all slots of a pass and adds their losses.

        Args:
            entry: (batch, chains) int64, the entry of each chain's first slot.
            state: (batch, chains, hidden), the states predicted in the first slot.
            carried: (batch, chains, hidden), the recurrent state between slots.
            valid: (batch, chains) bool, chains that are within an answer so far.
            number: of the pass, from 0.

        Returns:
            The input states of the next pass, (batch, chains, slots, hidden), and the chains that it can continue,
            (batch, chains) bool.
        """
        slots, last = network.config.slots, entries.wanted.shape[1] - 1
        # Later passes continue one chain in ``slots``.
        share, states = slots if number else 1, []
        for slot in range(slots):
            position = (entry + slot).clamp(max=last)
            own = slot > 0 and network.config.rank > 0
            if slot:
                carried = network.cell(take(entries.embeds, position), carried)
                state = state if own else network.guess(carried)
            weight = self.decay**number * self.slot_decay**slot * share
            states.append(losses.add(state, carried, own, position, valid, number * slots + slot + 1, weight))
            valid = valid & entries.wanted.gather(1, (entry + slot + 1).clamp(max=last))
        return torch.stack(states, dim=2), valid

    def _noisy(self, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.noise == 0.0:
            return hidden
        noise = torch.rand(hidden.shape, generator=generator, device=hidden.device, dtype=torch.float32) - 0.5
        return hidden + (2 * self.noise * 512 / hidden.shape[1] * noise).to(hidden.dtype)


@dataclass(frozen=True)
class _Entries:
    """The drafter's input sequences and targets of a batch, (batch, entries, ...) each.

    Attributes:
        embeds, hidden: inputs.
        truth: the hidden states to predict.
        visual: entries of visual tokens.
        wanted: entries whose input token and predicted token both belong to an answer.
        positions: of the entries; a slice if none were removed.
    """

    embeds: Tensor
    hidden: Tensor
    truth: Tensor
    visual: Tensor
    wanted: Tensor
    positions: Tensor | slice

    def positions_of(self, entry: Tensor) -> Tensor:
        """Positions of entries, (batch, n) int64 each."""
        return entry if isinstance(self.positions, slice) else self.positions.gather(1, entry)


def _entries(network: MSDNetwork, batch: Features, hidden: Tensor) -> _Entries:
    """The entries of a batch, images compressed or hidden; ``hidden``: (batch, entries, hidden)."""
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


class _LossSum:
    """Accumulates the losses of predicted states."""

    def __init__(
        self,
        objective: HiddenStateObjective,
        network: MSDNetwork,
        entries: _Entries,
        head: Callable[[Tensor], Tensor],
        glancing: float,
        generator: torch.Generator | None,
    ) -> None:
        self._objective, self._head, self._glancing, self._generator = objective, head, glancing, generator
        self._network = network
        self._states = entries.truth
        truth = entries.truth[entries.wanted]
        self.count = len(truth)
        self._index = entries.wanted.flatten().cumsum(0).view(entries.wanted.shape) - 1
        with torch.no_grad():
            self._goal = head(truth).float().softmax(-1)
        self.total = truth.new_zeros((), dtype=torch.float32)
        self.metrics: dict[str, float] = {}

    def add(
        self, state: Tensor, carried: Tensor, own: bool, entry: Tensor, valid: Tensor, depth: int, weight: float
    ) -> Tensor:
        """Add the losses of predicted states.

        Args:
            state: (batch, chains, hidden), the predictions; not predicted by slots with an output layer of their own.
            carried: (batch, chains, any), the recurrent state between slots.
            own: whether the slot has an output layer of its own.
            entry: (batch, chains) int64, the entries that they predict.
            valid: (batch, chains) bool, predictions with a loss.
            depth: suffix of the metrics' names.
            weight: of the losses.

        Returns:
            The states to continue with, (batch, chains, hidden): the predictions, some wrong ones replaced by glancing.
        """
        predicted, inner = state[valid], carried[valid]
        if len(predicted) == 0:
            return state
        objective, network = self._objective, self._network
        row = torch.arange(len(entry), device=entry.device)[:, None].expand_as(entry)[valid]
        truth, goal = self._states[row, entry[valid]], self._goal[self._index.gather(1, entry)[valid]]
        logits = network.cell.scores(inner) if own else self._head(predicted)
        scores = logits.float().log_softmax(-1)
        token = token_loss(objective.loss, goal, scores)
        loss, metrics = objective.token_weight * token, {"token": token}
        if not own:
            metrics["hidden"] = F.smooth_l1_loss(predicted.float(), truth.float())
            loss = loss + objective.hidden_weight * metrics["hidden"]
        if network.config.confidence:
            # The network's states learn nothing from it.
            logit = network.coverage(predicted.detach(), inner.detach()).float()[:, 0]
            covered = goal.gather(-1, scores.topk(min(objective.top_k, scores.shape[-1]), dim=-1).indices).sum(-1)
            metrics["coverage"] = F.binary_cross_entropy_with_logits(logit, covered.clamp(0.0, 1.0))
            loss = loss + metrics["coverage"]
        # Normalised by the entries of the first pass, so that the losses of several processes add up.
        self.total = self.total + weight * len(predicted) / self.count * loss
        right = scores.argmax(-1) == goal.argmax(-1)
        metrics["right"] = right.float().mean()
        self.metrics |= {f"{name}_{depth}": float(value.detach()) for name, value in metrics.items()}
        if self._glancing == 0.0 or own:
            return state
        drawn = torch.rand(len(predicted), generator=self._generator, device=state.device) < self._glancing
        replaced = torch.zeros_like(valid).masked_scatter(valid, drawn & ~right)
        return torch.where(replaced[..., None], take(self._states, entry).to(state.dtype), state)
