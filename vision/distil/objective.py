"""What an MSD network is trained for: the target's next hidden states and tokens, also behind its own guesses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.target import Target
from vision.distil.features import Features
from vision.drafters.network import MSDNetwork, Rotary


@dataclass(frozen=True)
class Losses:
    """``total`` is what to minimise, a scalar; ``figures`` are for people: losses and shares of guesses right."""

    total: Tensor
    figures: dict[str, float]


@dataclass(frozen=True)
class Objective:
    """Losses of a batch over several passes, each fed with the guesses of the pass before.

    The first pass sees the target's true hidden states, as when an accepted token is absorbed. Pass s sees guesses for
    the last s - 1 tokens and true states before, as a node at depth s of a tree does (the training-time test of
    EAGLE-3, arXiv 2503.01840; one pass is the training of MSD, arXiv 2505.14260).

    Attributes:
        passes: passes over a batch.
        decay: weight of a pass relative to the one before.
        hidden_weight: of the smooth L1 distance to the target's hidden state.
        token_weight: of the cross-entropy with the target's distribution of the next token.
        noise: uniform noise of this size, times 512 / length, on the hidden states of the first pass.
    """

    passes: int = 3
    decay: float = 0.8
    hidden_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.1

    def __call__(
        self,
        network: MSDNetwork,
        target: Target,
        batch: Features,
        draft_ids: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Losses:
        """Losses on the answers of ``batch``.

        Args:
            network: what is trained.
            target: for its embedding and head, both frozen.
            draft_ids: (n,) int64, the tokens of a reduced draft vocabulary; probabilities are over them alone.
            generator: source of the noise.
        """
        states = batch.hidden[:, 1:]
        # Entry j consumes token j + 1 and guesses token j + 2; both must be said by the target.
        said = batch.answer[:, 1:]
        wanted = said & F.pad(said[:, 1:], (0, 1))
        count = int(wanted.sum())
        if count == 0:
            return Losses(states.new_zeros((), dtype=torch.float32), {})
        entry = _packed(wanted)
        own = torch.arange(entry.shape[1], device=entry.device) < wanted.sum(1, keepdim=True)
        rows = torch.arange(len(entry), device=entry.device)[:, None]
        head = target.head if draft_ids is None else target.narrow_head(draft_ids)
        truth = states[rows, entry][own]
        with torch.no_grad():
            goal = head(truth).float().softmax(-1)

        rotary = Rotary(network.config.head_dim, network.config.rope_theta)
        rotary.reserve(states.shape[1], batch.embeds)
        memory = _Memory(entry)
        fed = self._noisy(batch.hidden[:, :-1], generator)
        x = network.combine(batch.embeds[:, 1:], fed, batch.visual[:, 1:])
        guesses = network(x, rotary(slice(0, states.shape[1])), memory.attend)[rows, entry]
        consumed = batch.embeds[rows, entry + 1]

        total, valid = states.new_zeros((), dtype=torch.float32), own
        figures: dict[str, float] = {}
        for number in range(self.passes):
            if number:
                x = network.combine(consumed, _shift(guesses, 1), None)
                guesses = network(x, rotary(entry), memory.attend)
                # The whole chain of guesses must lie within the answer.
                valid = valid & said[rows, (entry - number).clamp(min=0)]
            mine, here = guesses[valid], valid[own]
            if mine.shape[0] == 0:
                break
            scores = head(mine).float().log_softmax(-1)
            hidden = F.smooth_l1_loss(mine.float(), truth[here].float())
            token = -(goal[here] * scores).sum(-1).mean()
            # Means over the entries of the first pass, so that batches of several processes add up to one.
            weight = self.decay**number * mine.shape[0] / count
            total = total + weight * (self.hidden_weight * hidden + self.token_weight * token)
            right = (scores.argmax(-1) == goal[here].argmax(-1)).float().mean()
            named = {"hidden": hidden, "token": token, "right": right}
            figures |= {f"{name}_{number + 1}": float(value.detach()) for name, value in named.items()}
        return Losses(total, figures)

    def _noisy(self, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.noise == 0.0:
            return hidden
        noise = torch.rand(hidden.shape, generator=generator, device=hidden.device, dtype=torch.float32) - 0.5
        return hidden + (2 * self.noise * 512 / hidden.shape[1] * noise).to(hidden.dtype)


def _packed(wanted: Tensor) -> Tensor:
    """The entries marked in each row, in order, (batch, most of any row) int64; what fills up a row means nothing."""
    return (~wanted).long().sort(dim=1, stable=True).indices[:, : int(wanted.sum(1).max())]


class _Memory:
    """Keys and values of the passes so far.

    The first pass is over all entries; later ones are over the wanted entries alone. Pass s at entry j reads the first
    pass up to entry j - s, and of each later pass i the one entry j - (s - i), which lies on its own chain.
    """

    def __init__(self, entry: Tensor) -> None:
        self.entry = entry
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        self.keys.append(k.repeat_interleave(groups, dim=1))
        self.values.append(v.repeat_interleave(groups, dim=1))
        first, length = self.keys[0], self.keys[0].shape[2]
        number, scale = len(self.keys) - 1, 1.0 / math.sqrt(q.shape[-1])
        slot = torch.arange(length, device=q.device)
        latest = slot[None] if number == 0 else (self.entry - number).clamp(min=0)
        scores = [(q @ first.transpose(2, 3) * scale).masked_fill((slot > latest[..., None])[:, None], -torch.inf)]
        chain = range(1, number + 1)
        scores += [(q * _shift(self.keys[i], number - i)).sum(-1, keepdim=True) * scale for i in chain]
        weights = torch.cat(scores, dim=-1).float().softmax(-1).to(v.dtype)
        read = weights[..., :length] @ self.values[0]
        for i in chain:
            read = read + weights[..., length + i - 1, None] * _shift(self.values[i], number - i)
        return read


def _shift(x: Tensor, by: int) -> Tensor:
    """Entry j becomes what entry j - ``by`` was: (..., entries, features)."""
    return x if by == 0 else F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]
