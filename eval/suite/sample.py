"""A benchmark's sample: a conversation with the references that its answers are scored by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.eval.harness.prompts import Conversation


@dataclass(frozen=True)
class Sample:
    """One conversation of a task.

    Attributes:
        id: unique within its task.
        conversation: questions and media.
        category: groups samples in Spec-Bench's results.
        references: accepted answers by turn, for at most as many turns as the conversation has.
        metadata: anything else that the scorer needs.
    """

    id: str
    conversation: Conversation
    category: str = ""
    references: tuple[tuple[str, ...], ...] = ()
    metadata: Any = None


Answered = tuple[Sample, Sequence[str]]
"""A sample and the answers to its turns."""

Scorer = Callable[[Sequence[Answered]], dict[str, float]]
"""Scores by name over all answers, from 0 to 1 or as the benchmark defines them; the first one is the main score."""
