"""Losses of next tokens."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mmspec.training.loss import IGNORE, RunningMeans, next_token_loss


def test_the_loss_is_the_mean_over_labels() -> None:
    torch.manual_seed(0)
    hidden, labels = torch.randn(2, 3, 4), torch.tensor([[IGNORE, 1, 2], [0, IGNORE, IGNORE]])
    seen = []

    def head(states: torch.Tensor) -> torch.Tensor:
        seen.append(states.shape)
        return states.bfloat16()

    loss, accuracy = next_token_loss(hidden, head, labels)
    chosen = torch.stack([hidden[0, 1], hidden[0, 2], hidden[1, 0]]).bfloat16().float()
    truth = torch.tensor([1, 2, 0])
    assert seen == [(3, 4)]
    torch.testing.assert_close(loss, F.cross_entropy(chosen, truth))
    assert accuracy == pytest.approx((chosen.argmax(-1) == truth).float().mean().item())


def test_running_means_are_of_the_steps_that_have_a_metric() -> None:
    means = RunningMeans()
    for loss, metrics in ((1.0, {"a": 2.0}), (3.0, {"a": 4.0, "b": 7.0}), (5.0, {})):
        means.add(torch.tensor(loss, requires_grad=True), metrics)
    assert means.pop() == {"loss": 3.0, "a": 3.0, "b": 7.0}
    means.add(torch.tensor(2.0), {})
    assert means.pop() == {"loss": 2.0}


def test_accuracy_counts_equal_tokens_alone() -> None:
    hidden, labels = torch.eye(4)[None], torch.tensor([[0, 1, 0, IGNORE]])
    assert next_token_loss(hidden, lambda states: states, labels)[1] == pytest.approx(2 / 3)
