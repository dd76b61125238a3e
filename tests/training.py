"""Batches of features and plain losses, for tests of training objectives; runs of training that are interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.training.features import Features
from mmspec.training.objectives import LossOutput
from mmspec.training.trainer import Trainer

Spans = Sequence[Sequence[tuple[int, int]]]


def random_batch(answers: Spans, lengths: Sequence[int], layers: int = 0, width: int = 48) -> Features:
    """Random features of conversations, whose image is their second and third token. Padding is NaN."""
    g, longest = torch.Generator().manual_seed(0), max(lengths)
    visual, answer = torch.zeros(2, len(lengths), longest, dtype=torch.bool).unbind(0)
    visual[:, 1:3] = True
    for row, spans in enumerate(answers):
        for begin, end in spans:
            answer[row, begin:end] = True
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(3, 90, answer.shape, generator=g)
    hidden, embeds, read = (
        torch.randn(*answer.shape, size, generator=g).masked_fill(~keep[..., None], torch.nan)
        for size in (width, width, layers * width)
    )
    return Features(tokens, hidden, embeds, visual, answer, keep, read if layers else None)


def plain_loss(kind: str, goal: Tensor, logits: Tensor) -> Tensor:
    """The loss of a draft's logits against the target's distribution, (vocab,) both."""
    scores = logits.log_softmax(-1)
    kl, accepted = -(goal * scores).sum(), torch.minimum(goal, scores.exp()).sum()
    if kind == "tv":
        return 0.1 * kl + 0.9 * (goal - scores.exp()).abs().sum()
    share = (-3 * accepted.detach()).exp() if kind == "lk" else 1.0
    return share * kl + (1 - share) * (1 - accepted)


def assert_losses(
    output: LossOutput,
    losses: Mapping[str, Sequence[Sequence[Tensor]]],
    decay: Callable[[int], float],
    weights: Mapping[str, float] = MappingProxyType({}),
) -> Tensor:
    """Compare an objective's output with losses by name, of every draft of each depth; returns their total.

    Args:
        decay: weight of a depth, from 0 on. Losses are normalised by the number of drafts of the first depth.
        weights: of the losses by name; 1 for others.
    """
    total, expected = torch.zeros(()), {}
    for name, depths in losses.items():
        for depth, found in enumerate(depths):
            summed = torch.stack(list(found)).sum()
            expected[f"{name}_{depth + 1}"] = float(summed.detach()) / len(found)
            total = total + weights.get(name, 1.0) * decay(depth) * summed / len(depths[0])
    assert {name: value for name, value in output.metrics.items() if not name.startswith("right")} == pytest.approx(
        expected, rel=1e-4
    )
    torch.testing.assert_close(output.total, total, rtol=1e-4, atol=1e-5)
    return total


def assert_gradients(ours: Tensor, theirs: Tensor, parameters: Sequence[Tensor], others: Any = None) -> None:
    """Compare the gradients of two totals; ``others`` are the second total's parameters, by default the first's."""
    found = torch.autograd.grad(ours, list(parameters))
    expected = torch.autograd.grad(theirs, list(parameters if others is None else others))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=1e-3)


@contextmanager
def terminated_at(step: int) -> Iterator[None]:
    """A run in this process receives SIGTERM in the step after this number of steps."""
    learn = Trainer._train_step

    def terminated(run: Trainer) -> dict[str, Any]:
        if run.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", terminated)
        yield
