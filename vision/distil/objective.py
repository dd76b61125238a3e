"""What a network of MSD or FLASH is trained for: the target's next states and tokens, also behind its own guesses.

Entry j of a sequence consumes token j + 1 and the target's state at token j; it guesses the state at token j + 1 and by
it token j + 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.distil.features import Features
from mmspec.target import Target
from mmspec.training.loss import LossOutput
from vision.distil.memory import Memory
from vision.drafters.latents import packing, take
from vision.drafters.network import MSDNetwork, Rotary


@dataclass(frozen=True)
class HiddenStateObjective:
    """Losses of a batch over several passes, each fed with the guesses of the pass before.

    The first pass sees the target's true hidden states, as when an accepted token is absorbed. Later passes see guesses
    for the last tokens and true states before, as a node of a tree does (the training-time test of EAGLE-3, arXiv
    2503.01840; one pass is the training of MSD, arXiv 2505.14260).

    With k slots a pass guesses k states in sequence, each from the guess before and the true token before: a node of a
    tree counts only where its parent was right. The next pass is fed with all k. In the first pass such a chain starts
    at every entry; every k-th one, from a random entry on, is followed through the later passes.

    Figures are numbered by depth in a tree: ``right_d`` is the share of right tokens, d guesses behind a true state.

    Attributes:
        passes: passes over a batch.
        decay: weight of a pass relative to the one before.
        slot_decay: weight of a slot relative to the one before.
        hidden_weight: of the smooth L1 distance to the target's hidden state.
        token_weight: of the cross-entropy with the target's distribution of the next token. The paper weighs the two 1
            and 0.1, as EAGLE does.
        noise: uniform noise of this size, times 512 / length, on the hidden states of the first pass.
        glancing: share of the wrong guesses that are replaced by the target's states before the next pass is fed with
            them, when training begins; it falls to 0 at the end (Falcon, arXiv 2412.12639, which shows tokens: here
            tokens within a block are the true ones anyway, as a node counts only where its parent is right).
    """

    passes: int = 3
    decay: float = 0.8
    slot_decay: float = 1.0
    hidden_weight: float = 0.1
    token_weight: float = 1.0
    noise: float = 0.1
    glancing: float = 0.0

    def __call__(
        self,
        network: MSDNetwork,
        target: Target,
        batch: Features,
        draft_ids: Tensor | None = None,
        generator: torch.Generator | None = None,
        progress: float = 1.0,
    ) -> LossOutput:
        """Losses on the answers of ``batch``.

        Args:
            network: what is trained.
            target: for its embedding and head, both frozen.
            draft_ids: (n,) int64, the tokens of a reduced draft vocabulary; probabilities are over them alone.
            generator: source of the noise, of the entry where chains start, and of what glancing replaces.
            progress: share of the training that is behind us.
        """
        slots = network.config.slots
        entries = _entries(network, batch, self._noisy(batch.hidden[:, :-1], generator))
        head = target.head if draft_ids is None else target.narrow_head(draft_ids)
        judge = _Judge(self, entries, head, self.glancing * (1.0 - progress), generator)
        if judge.count == 0:
            return LossOutput(judge.total, judge.metrics)
        rotary = Rotary(network.config.head_dim, network.config.rope_theta)
        rotary.reserve(batch.hidden.shape[1], batch.embeds)
        memory = Memory()
        x = network.combine(entries.embeds, entries.hidden, entries.visual)
        outputs = network(x, rotary(entries.positions), memory.attend)

        entry, valid = packing(entries.wanted, left=False)
        guess, carried = network.begin(take(outputs, entry))
        for number in range(self.passes):
            states, ends = self._slots(network, entries, judge, entry, guess, carried, valid, number)
            if number + 1 == self.passes or not bool(ends.any()):
                break
            if number == 0:
                first = int(torch.randint(slots, (), generator=generator, device=x.device)) if slots > 1 else 0
                entry, ends, states = entry[:, first::slots], ends[:, first::slots], states[:, first::slots]
                memory.follow(entry)
            link = entry[..., None] + torch.arange(1, slots + 1, device=x.device)
            link = link.clamp(max=x.shape[1] - 1).flatten(1)
            fed = network.combine(take(entries.embeds, link), states.flatten(1, 2), None)
            at = entries.positions
            outputs = network(fed, rotary(link if isinstance(at, slice) else at.gather(1, link)), memory.attend)
            entry, valid = entry + slots, ends
            guess, carried = network.begin(outputs[:, slots - 1 :: slots])
        return LossOutput(judge.total, judge.metrics)

    def _slots(
        self,
        network: MSDNetwork,
        entries: _Entries,
        judge: _Judge,
        entry: Tensor,
        guess: Tensor,
        carried: Tensor,
        valid: Tensor,
        number: int,
    ) -> tuple[Tensor, Tensor]:
        """The slots of a pass.

        Args:
            entry: (batch, chains) int64, where they start.
            guess: (batch, chains, hidden), the pass's guesses there.
            carried: (batch, chains, hidden), what their slots carry.
            valid: (batch, chains) bool, chains that lie within an answer up to there.
            number: of the pass, from 0.

        Returns:
            What the next pass is fed with, (batch, chains, slots, hidden), and which chains it can continue, (batch,
            chains) bool.
        """
        slots, last = network.config.slots, entries.wanted.shape[1] - 1
        # Later passes follow one chain in ``slots``.
        share, guesses = slots if number else 1, []
        for slot in range(slots):
            place = (entry + slot).clamp(max=last)
            if slot:
                carried = network.cell(take(entries.embeds, place), carried)
                guess = network.cell.guess(carried)
            weight = self.decay**number * self.slot_decay**slot * share
            guesses.append(judge(guess, place, valid, number * slots + slot + 1, weight))
            valid = valid & entries.wanted.gather(1, (entry + slot + 1).clamp(max=last))
        return torch.stack(guesses, dim=2), valid

    def _noisy(self, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.noise == 0.0:
            return hidden
        noise = torch.rand(hidden.shape, generator=generator, device=hidden.device, dtype=torch.float32) - 0.5
        return hidden + (2 * self.noise * 512 / hidden.shape[1] * noise).to(hidden.dtype)


@dataclass(frozen=True)
class _Entries:
    """What stands at the entries of a batch, (batch, entries, ...) each.

    ``embeds`` and ``hidden`` are consumed, ``truth`` is the state to be guessed. ``wanted`` marks the entries whose
    consumed and whose guessed token are both the target's own. ``positions`` is a slice where all entries are there.
    """

    embeds: Tensor
    hidden: Tensor
    truth: Tensor
    visual: Tensor
    wanted: Tensor
    positions: Tensor | slice


def _entries(network: MSDNetwork, batch: Features, hidden: Tensor) -> _Entries:
    """The entries of a batch, latents in place of what they stand for; ``hidden``: (batch, entries, hidden)."""
    said = batch.answer[:, 1:]
    wanted = said & F.pad(said[:, 1:], (0, 1))
    embeds, truth, visual = batch.embeds[:, 1:], batch.hidden[:, 1:], batch.visual[:, 1:]
    images = network.images(visual)
    if images is None:
        return _Entries(embeds, hidden, truth, visual, wanted, slice(0, truth.shape[1]))
    order, _ = packing(images.kept(visual), left=False)
    embeds, hidden = network.with_latents(embeds, hidden, images)
    visual, wanted = visual.gather(1, order), wanted.gather(1, order)
    return _Entries(take(embeds, order), take(hidden, order), take(truth, order), visual, wanted, order)


class _Judge:
    """Sums up losses; gives guesses back, some of the wrong ones replaced."""

    def __init__(
        self,
        objective: HiddenStateObjective,
        entries: _Entries,
        head: Callable[[Tensor], Tensor],
        glancing: float,
        generator: torch.Generator | None,
    ) -> None:
        self._objective, self._head, self._glancing, self._generator = objective, head, glancing, generator
        self._states = entries.truth
        truth = entries.truth[entries.wanted]
        self.count = len(truth)
        self._place = entries.wanted.flatten().cumsum(0).view(entries.wanted.shape) - 1
        with torch.no_grad():
            self._goal = head(truth).float().softmax(-1)
        self.total = truth.new_zeros((), dtype=torch.float32)
        self.metrics: dict[str, float] = {}

    def __call__(self, state: Tensor, entry: Tensor, valid: Tensor, depth: int, weight: float) -> Tensor:
        """Count guesses.

        Args:
            state: (batch, chains, hidden).
            entry: (batch, chains) int64, the entries whose true states they guess.
            valid: (batch, chains) bool, which of them count.
            depth: names the figures.
            weight: of their losses.

        Returns:
            (batch, chains, hidden), what to feed on.
        """
        mine = state[valid]
        if len(mine) == 0:
            return state
        row = torch.arange(len(entry), device=entry.device)[:, None].expand_as(entry)[valid]
        truth, goal = self._states[row, entry[valid]], self._goal[self._place.gather(1, entry)[valid]]
        scores = self._head(mine).float().log_softmax(-1)
        hidden = F.smooth_l1_loss(mine.float(), truth.float())
        token = -(goal * scores).sum(-1).mean()
        # Means over the entries of the first pass, so that batches of several processes add up to one.
        loss = self._objective.hidden_weight * hidden + self._objective.token_weight * token
        self.total = self.total + weight * len(mine) / self.count * loss
        right = scores.argmax(-1) == goal.argmax(-1)
        named = {"hidden": hidden, "token": token, "right": right.float().mean()}
        self.metrics |= {f"{name}_{depth}": float(value.detach()) for name, value in named.items()}
        if self._glancing == 0.0:
            return state
        drawn = torch.rand(len(mine), generator=self._generator, device=state.device) < self._glancing
        replaced = torch.zeros_like(valid).masked_scatter(valid, drawn & ~right)
        return torch.where(replaced[..., None], take(self._states, entry).to(state.dtype), state)
