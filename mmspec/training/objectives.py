"""Shared parts of training objectives: losses against the target's distributions, and attention across passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.core.target import Target
from mmspec.drafters.layer import rotary_of
from mmspec.drafters.spec import RotaryShape
from mmspec.training.features import Features

TokenLoss = Literal["kl", "lk", "tv"]

_ETA = 3.0  # decay of the share of cross-entropy in the LK loss; the best value of arXiv 2602.23881
_ENTROPY, _DISTANCE = 0.1, 0.9  # weights of the two terms of the TV loss in deepseek-ai/DeepSpec


@dataclass(frozen=True)
class LossInput:
    """Inputs of an objective, besides the drafter's network. ``draft_ids``: (n,) int64, draft vocabulary that
    distributions are restricted to; None for all tokens."""

    target: Target
    batch: Features
    draft_ids: Tensor | None = None
    generator: torch.Generator | None = None
    progress: float = 1.0


@dataclass(frozen=True)
class LossOutput:
    """Loss of a batch: ``total``, a scalar to minimise, is a mean over the batch's loss positions."""

    total: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def token_loss(kind: TokenLoss, goal: Tensor, scores: Tensor) -> Tensor:
    """Mean token loss of drafts.

    Args:
        kind: "kl", the cross-entropy with the target's distribution; "lk", ``w * kl + (1 - w) * (1 - a)`` with the
            expected acceptance a = sum(min(p, q)) of a draft, w = exp(-3 a): the hybrid LK loss (arXiv 2602.23881);
            "tv", ``0.1 * kl + 0.9 * sum(|p - q|)``, as in DSpark (arXiv 2607.05147, formulas 9 and 10; there, the
            cross-entropy is with the target's tokens).
        goal: the target's probabilities, (drafts, tokens).
        scores: log probabilities of the drafts, (drafts, tokens).
    """
    loss = -(goal * scores).sum(-1)
    if kind == "lk":
        accepted = torch.minimum(goal, scores.exp()).sum(-1)
        share = (-_ETA * accepted.detach()).exp()
        loss = share * loss + (1.0 - share) * (1.0 - accepted)
    elif kind == "tv":
        loss = _ENTROPY * loss + _DISTANCE * (goal - scores.exp()).abs().sum(-1)
    return loss.mean()


class TokenLosses:
    """Accumulates losses of drafts against the target's next-token distributions, and metrics.

    Args:
        hidden: (batch, length, hidden), inputs of the target's output layer, ``head`` for the draft vocabulary.
        wanted: (batch, length) bool, positions with a loss; their ``count`` normalises the losses.
        weights: weights of the losses by name, "token" for the token loss; by default 1.

    Attributes:
        output: accumulated losses, and the metrics ``token_k`` and ``right_k``, loss and accuracy k tokens ahead.
    """

    def __init__(
        self,
        kind: TokenLoss,
        given: LossInput,
        hidden: Tensor,
        wanted: Tensor,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._kind, self._weights = kind, weights
        target, draft_ids = given.target, given.draft_ids
        self.head: Any = target.head if draft_ids is None else target.narrow_head(draft_ids)
        self.count = int(wanted.sum())
        self.output = LossOutput(hidden.new_zeros((), dtype=torch.float32), {})
        self._index = wanted.flatten().cumsum(0).view(wanted.shape) - 1  # index of a position in the goals
        if self.count:
            with torch.no_grad():
                self._goals = self.head(hidden[wanted]).float().softmax(-1)

    def goals(self, valid: Tensor, position: Tensor | None = None) -> Tensor:
        """The target's distributions, (drafts, tokens), at ``valid`` positions, (batch, n) int64; None means all."""
        index = self._index if position is None else self._index.gather(1, position)
        return self._goals[index[valid]]

    def add(self, ahead: int, scores: Tensor, goal: Tensor, weight: float = 1.0, **further: Tensor) -> None:
        """Add the losses of drafts, of logits and the target's distributions, (drafts, tokens), and ``further`` losses
        of the same drafts by name."""
        loss = token_loss(self._kind, goal, scores.float().log_softmax(-1))
        right = (scores.argmax(-1) == goal.argmax(-1)).float().mean()
        losses = {"token": loss, **further}
        weighted = [self._weights.get(name, 1.0) * value for name, value in losses.items()]
        total = self.output.total + weight * len(goal) / self.count * sum(weighted)
        metrics = {f"{name}_{ahead}": float(value.detach()) for name, value in {**losses, "right": right}.items()}
        self.output = LossOutput(total, self.output.metrics | metrics)


def next_token_loss(
    kind: TokenLoss, given: LossInput, states: Callable[[], Tensor], output_layer: Any = None
) -> LossOutput:
    """Loss against the target's next-token distributions at the same positions, over answer tokens followed by another
    answer token. Metrics: ``token_1`` and ``right_1``, loss and accuracy. ``states``: returns the drafter's last hidden
    states, (batch, length, hidden); only called if needed."""
    batch = given.batch
    wanted = batch.answer[:, :-1] & batch.answer[:, 1:]
    losses = TokenLosses(kind, given, batch.hidden[:, :-1], wanted)
    if losses.count:
        scores = (output_layer or losses.head)(states()[:, :-1][wanted])
        losses.add(1, scores, losses.goals(wanted))
    return losses.output


class PassCache:
    """KV cache of all passes, with attention over them.

    The first pass has all entries. Each later pass extends chains, which start at entries of the first pass, by one
    link of ``slots`` entries. An entry attends to the first pass up to its chain's start, to the chain's earlier links,
    and causally within its own link.
    """

    _starts: Tensor | None = None

    def start_chains(self, starts: Tensor) -> None:
        """Set the entries at which chains start, after the first pass: (batch, chains) int64."""
        self._starts = starts

    def keep_chains(self, places: Tensor) -> None:
        """Keep only the chains at these indices, (batch, kept) int64."""
        assert self._starts is not None, "start_chains comes first"
        self._starts = self._starts.gather(1, places)
        for parts in (self._keys, self._values):
            for number, part in enumerate(parts[1:], start=1):
                index = places[:, None, :, None, None].expand(-1, part.shape[1], -1, *part.shape[3:])
                parts[number] = part.gather(2, index)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append a pass, (batch, heads or kv_heads, entries, head_dim) each; returns the attention output of its
        queries. The entries of later passes are ordered by chain: chains * slots."""
        groups = q.shape[1] // k.shape[1]
        k, v, q = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), q / math.sqrt(q.shape[-1])
        if self._starts is None:
            self._keys, self._values = [k], [v]
            future = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).triu(1)
            weights = (q @ k.transpose(2, 3)).masked_fill(future, -torch.inf).float().softmax(-1).to(v.dtype)
            return weights @ v
        links = self._starts.shape[1], q.shape[2] // self._starts.shape[1]
        self._keys.append(k.unflatten(2, links))
        self._values.append(v.unflatten(2, links))
        scores = self._scores(q, links)
        weights = torch.cat(scores, dim=-1).float().softmax(-1).to(v.dtype)
        first, *own = weights.split([part.shape[-1] for part in scores], dim=-1)
        output = first @ self._values[0]
        for part, value in zip(own, self._values[1:], strict=True):
            output = output + _matmul(part.unflatten(2, links), value).flatten(2, 3)
        return output

    def _scores(self, q: Tensor, links: tuple[int, int]) -> list[Tensor]:
        """Masked attention scores over the keys of each pass, (batch, heads, chains * slots, keys)."""
        assert self._starts is not None
        first, slots = self._keys[0], links[1]
        after_start = torch.arange(first.shape[2], device=q.device) > self._starts[..., None]
        after_start = after_start.repeat_interleave(slots, dim=1)[:, None]
        scores = [(q @ first.transpose(2, 3)).masked_fill(after_start, -torch.inf)]
        scores += [_matmul(q.unflatten(2, links), keys.transpose(3, 4)).flatten(2, 3) for keys in self._keys[1:]]
        if slots > 1:
            future = torch.ones(slots, slots, dtype=torch.bool, device=q.device).triu(1).repeat(links[0], 1)
            scores[-1] = scores[-1].masked_fill(future, -torch.inf)
        return scores


def causal_pass(network: Any, shape: RotaryShape, x: Tensor) -> Tensor:
    """Outputs of a network with layers of this shape over whole sequences, (batch, length, hidden)."""
    rotary, _ = rotary_of(shape)
    rotary.reserve(x.shape[1], x)
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return network(x, rotary(slice(0, x.shape[1])), attend)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product; for a single slot elementwise, which is faster than many tiny matrix products."""
    if a.shape[-2] > 1:
        return a @ b
    return a * b if b.shape[-2] == 1 else (a * b.transpose(-1, -2)).sum(-1, keepdim=True)
