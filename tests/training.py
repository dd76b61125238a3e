"""Runs of training that are interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mmspec.training.trainer import Trainer


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
