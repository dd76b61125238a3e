"""A benchmark's conversation with what its answers are judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.harness.prompts import Conversation


@dataclass(frozen=True)
class Sample:
    """One conversation of a task.

    Attributes:
        id: unique in its task.
        conversation: what is asked, and about what.
        category: by which Spec-Bench and reports group samples.
        references: accepted answers, turn by turn; no more turns than the conversation has, and none where answers
            cannot be compared with anything.
        about: what the scorer needs beside them.
    """

    id: str
    conversation: Conversation
    category: str = ""
    references: tuple[tuple[str, ...], ...] = ()
    about: Any = None


Answered = tuple[Sample, Sequence[str]]
"""A sample and the answers to its turns."""

Scorer = Callable[[Sequence[Answered]], dict[str, float]]
"""Figures of all answers together, each from 0 to 1 or as its benchmark counts; the first one stands for the task."""
