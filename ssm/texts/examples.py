"""What an example is, and how it is drawn: the split and the index alone decide."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ssm.texts import problems, programs, stories

SPLITS = ("train", "heldout")

KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sums": problems.sums,
    "problem": problems.problem,
    "story": stories.story,
    "room": stories.room,
    "question": stories.question,
    "program": programs.program,
}
"""What each kind is made by: a prompt and its answer."""

SHARES = {"sums": 0.12, "problem": 0.43, "story": 0.1, "room": 0.08, "question": 0.07, "program": 0.2}


@dataclass(frozen=True)
class Example:
    """A request and the answer to it; `kind` is one of `KINDS`."""

    kind: str
    prompt: str
    answer: str


def example(index: int, split: str = "train", kind: str | None = None) -> Example:
    """The example of this index.

    Args:
        index: from 0.
        split: "train" or "heldout"; the two share no random state, and held-out texts are never trained on.
        kind: one of `KINDS`; by default drawn, too.

    Raises:
        ValueError: unknown split or kind.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}: got {split!r}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}: got {kind!r}")
    rng = random.Random(f"{split} {index} {kind or ''}")
    drawn = kind or rng.choices(list(SHARES), list(SHARES.values()))[0]
    return Example(drawn, *KINDS[drawn](rng))
