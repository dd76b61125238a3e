"""Means of losses and metrics for the log."""

from __future__ import annotations

import torch

from mmspec.training.loss import RunningMeans


def test_running_means_are_of_the_steps_that_have_a_metric() -> None:
    means = RunningMeans()
    for loss, metrics in ((1.0, {"a": 2.0}), (3.0, {"a": 4.0, "b": 7.0}), (5.0, {})):
        means.add(torch.tensor(loss, requires_grad=True), metrics)
    assert means.pop() == {"loss": 3.0, "a": 3.0, "b": 7.0}
    means.add(torch.tensor(2.0), {})
    assert means.pop() == {"loss": 2.0}
