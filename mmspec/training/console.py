"""Training commands on the console: progress bar, and a clean stop on SIGINT or SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mmspec.progress import show_progress

if TYPE_CHECKING:
    from mmspec.training.trainer import Trainer


def train_with_progress(trainer: Trainer, console: Console, title: str = "training") -> bool:
    """Trains with a progress bar; returns whether the run is complete.

    SIGINT and SIGTERM stop the run after the current step and its checkpoint.
    """
    with _progress_bar(console, title) as trainer.notify, _stop_signals() as stopped:
        trainer.train(stopped)
    if not trainer.done:
        console.print(f"{title} stopped at step {trainer.step}; run the same command again to resume", markup=False)
    return trainer.done


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether SIGINT or SIGTERM was received."""
    received = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress_bar(console: Console, title: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that shows a row of the training log."""
    with show_progress(console, title) as bar:
        shown: dict[str, str] = {}

        def show(row: dict[str, Any]) -> None:
            if "stage" in row:
                shown["stage"] = f"stage {row['stage']}"
            if row["event"] == "train":
                shown["loss"] = f"loss {row['loss']:.3f}"
            if "mean_acceptance_length" in row:
                shown["acceptance"] = f"acceptance {row['mean_acceptance_length']:.2f}"
            metrics = " ".join([f"step {row['step']}", *shown.values()])
            bar(row["progress"], 1.0, metrics)

        yield show
