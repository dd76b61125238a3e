"""Thoughts of models that reason before they answer: how models mark them, and where they end in an output.

This module must not import torch: the command line reads its names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from mmspec.checks import Rule

AUTO, NONE = "auto", "none"
MOST_BLANKS = 8
"""Bytes of white space before thoughts, and between them and an answer with a grammar."""


@dataclass(frozen=True)
class ThoughtFormat:
    """How a model marks its thoughts.

    Attributes:
        name: of ``--reasoning-parser``.
        start, end: the markers: texts, or special tokens of these names.
        aliases: names of vLLM's parsers for these markers.
    """

    name: str
    start: str
    end: str
    aliases: Sequence[str] = ()


FORMATS = (
    ThoughtFormat(
        "think",
        "<think>",
        "</think>",
        (
            *("deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2"),
            *("nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
        ),
    ),
    ThoughtFormat("mistral", "[THINK]", "[/THINK]"),
    ThoughtFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ThoughtFormat("kimi_vl", "◁think▷", "◁/think▷"),
    ThoughtFormat("exaone_deep", "<thought>", "</thought>"),
)
NAMES = (AUTO, NONE, *(name for one in FORMATS for name in (one.name, *one.aliases)))
REASONING = Rule(
    f"None or {' or '.join(map(repr, (AUTO, NONE, *(one.name for one in FORMATS))))}",  # and vLLM's names
    lambda value: value is None or value in NAMES,
)


def thought_format(name: str | None, template: str) -> ThoughtFormat | None:
    """The format of a model's thoughts.

    Args:
        name: one of ``NAMES``; ``AUTO`` recognises the format of the chat template; None is ``NONE``.
        template: the chat template.
    """
    if name == AUTO:
        return next((one for one in FORMATS if one.start in template or one.end in template), None)
    return next((one for one in FORMATS if name in (one.name, *one.aliases)), None)


class Phase(Enum):
    """Part of an output."""

    OPEN = "thoughts may begin"
    THOUGHTS = "thoughts"
    AFTER = "answer after thoughts"
    PLAIN = "answer without thoughts"


class Place(NamedTuple):
    """Place in an output.

    Attributes:
        text: bytes that a marker may begin with; after thoughts, the rest of the marker's last token.
    """

    phase: Phase
    text: bytes = b""

    @property
    def answers(self) -> bool:
        """Whether the answer has begun."""
        return self.phase in (Phase.AFTER, Phase.PLAIN)


class Thoughts:
    """Where the thoughts of an output begin and end.

    An output begins with them where the prompt has begun them, or with the start marker, white space aside. They end
    with the first end marker. A marker that is a special token counts as this token only.

    Args:
        begun: whether the prompt has begun them.
        token_bytes: bytes of a token.
        special: id of the special token of a name, if there is one.

    Attributes:
        start_id, end_id: tokens that the markers are; None where they are text.
        first: the place before the first token.
    """

    def __init__(
        self,
        form: ThoughtFormat,
        begun: bool,
        token_bytes: Callable[[int], bytes],
        special: Callable[[str], int | None],
    ) -> None:
        self.form, self.token_bytes = form, token_bytes
        self.start_id, self.end_id = special(form.start), special(form.end)
        self.first = Place(Phase.THOUGHTS if begun else Phase.OPEN)

    def advance(self, place: Place, token: int) -> Place:
        """The place after a token."""
        phase, text = place.phase, place.text + self.token_bytes(token)
        if phase is Phase.OPEN:
            if token == self.start_id:
                return Place(Phase.THOUGHTS)
            if not self.opens(text):
                return Place(Phase.PLAIN)
            start, text_after = self.form.start.encode(), text.lstrip()
            if not text_after.startswith(start):
                return Place(Phase.OPEN, text)
            phase, text = Phase.THOUGHTS, text_after[len(start) :]
        if phase is not Phase.THOUGHTS:
            return place
        if self.end_id is not None:
            return Place(Phase.AFTER if token == self.end_id else phase)
        end = self.form.end.encode()
        _, found, rest = text.partition(end)
        return Place(Phase.AFTER, rest) if found else Place(phase, text[1 - len(end) :])

    def opens(self, text: bytes) -> bool:
        """Whether an output that begins like this may begin with thoughts."""
        marker, start = text.lstrip(), self.form.start.encode()
        if len(text) - len(marker) > MOST_BLANKS:
            return False
        return not marker or (self.start_id is None and (start.startswith(marker) or marker.startswith(start)))
