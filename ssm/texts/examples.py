"""Generates examples of all kinds, determined by split and index."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from mmspec.ssm.texts import problems, programs, stories

SPLITS = ("train", "heldout")

KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sums": problems.sums,
    "problem": problems.problem,
    "story": stories.story,
    "room": stories.room,
    "question": stories.question,
    "program": programs.program,
}
"""Generators of each kind; they return a prompt and its answer."""

SHARES = {"sums": 0.12, "problem": 0.43, "story": 0.1, "room": 0.08, "question": 0.07, "program": 0.2}
"""Shares of the kinds in a mix."""


@dataclass(frozen=True)
class TextExample:
    """A prompt and its answer; `kind` is one of `KINDS`."""

    kind: str
    prompt: str
    answer: str


def example(index: int, split: str = "train", kind: str | None = None) -> TextExample:
    """Returns the example of an index.

    Args:
        index: from 0.
        split: "train" or "heldout", which share no random state.
        kind: one of `KINDS`; by default drawn with `SHARES`.

    Raises:
        ValueError: unknown split or kind.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}: got {split!r}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}: got {kind!r}")
    rng = random.Random(f"{split} {index} {kind or ''}")
    drawn = kind or rng.choices(list(SHARES), list(SHARES.values()))[0]
    return TextExample(drawn, *KINDS[drawn](rng))
