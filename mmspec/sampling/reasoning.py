"""Reasoning of models before an answer: marker formats, and detection of its start and end in an output.

This module must not import torch: the command line reads the format names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NamedTuple

from mmspec.validation import condition

AUTO, NONE = "auto", "none"
MOST_BLANKS = 8
"""Maximum bytes of white space before reasoning, and between reasoning and an answer with a grammar."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning markers of a model family.

    Attributes:
        name: value of ``--reasoning-parser``.
        start, end: markers, as text or as names of special tokens.
        aliases: vLLM's parser names for these markers.
        headers: texts to remove, in this order, from the start of an answer: names of its channel.
    """

    name: str
    start: str
    end: str
    aliases: Sequence[str] = ()
    headers: Sequence[str] = ()


FORMATS = (
    ReasoningFormat(
        "think",
        "<think>",
        "</think>",
        (
            *("deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2"),
            *("nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
        ),
    ),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("kimi_vl", "◁think▷", "◁/think▷"),
    ReasoningFormat("exaone_deep", "<thought>", "</thought>"),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
    ReasoningFormat(
        "openai_gptoss",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        headers=("<|start|>assistant", "<|channel|>commentary<|message|>", "<|channel|>final<|message|>"),
    ),
)
NAMES = (AUTO, NONE, *(name for one in FORMATS for name in (one.name, *one.aliases)))
_KNOWN = " or ".join(map(repr, (AUTO, NONE, *(one.name for one in FORMATS))))
ReasoningName = Annotated[str, condition(_KNOWN, lambda value: value in NAMES)]
"""Name of a format of the reasoning, or vLLM's name of its parser."""


def reasoning_format(name: str | None, template: str) -> ReasoningFormat | None:
    """Reasoning format by name; None for no reasoning.

    Args:
        name: one of ``NAMES``; ``AUTO`` detects the format from the chat template; None is ``NONE``.
        template: the chat template.
    """
    if name == AUTO:
        return next(
            (one for one in FORMATS if one.start in template or (one.end in template and not one.headers)), None
        )  # <|end|> ends messages of other models, too
    return next((one for one in FORMATS if name in (one.name, *one.aliases)), None)


class Phase(Enum):
    """Part of an output."""

    OPEN = "reasoning may begin"
    REASONING = "reasoning"
    AFTER = "answer after reasoning"
    PLAIN = "answer without reasoning"


class Place(NamedTuple):
    """Parser state after a token of the output. ``text``: bytes that may be the start of a marker; after reasoning, the
    rest of the marker's last token."""

    phase: Phase
    text: bytes = b""

    @property
    def answers(self) -> bool:
        """Whether the answer has started."""
        return self.phase in (Phase.AFTER, Phase.PLAIN)


class ReasoningParser:
    """Reasoning parser of one output.

    Reasoning starts in the prompt, or with a start marker at the beginning of the output, after optional white space.
    It ends with the first end marker. If a marker is a special token, its plain text does not count.

    Args:
        begun: whether reasoning starts in the prompt.
        special: id of the special token with a name; None without one.

    Attributes:
        start_id, end_id: special tokens of the markers; None for text markers.
        first: the state before the first token.
    """

    def __init__(
        self,
        form: ReasoningFormat,
        begun: bool,
        token_bytes: Callable[[int], bytes],
        special: Callable[[str], int | None],
    ) -> None:
        self.form, self.token_bytes = form, token_bytes
        self.start_id, self.end_id = special(form.start), special(form.end)
        self.first = Place(Phase.REASONING if begun else Phase.OPEN)

    def advance(self, place: Place, token: int) -> Place:
        """The state after a token."""
        phase, text = place.phase, place.text + self.token_bytes(token)
        if phase is Phase.OPEN:
            if token == self.start_id:
                return Place(Phase.REASONING)
            if not self.opens(text):
                return Place(Phase.PLAIN)
            start, text_after = self.form.start.encode(), text.lstrip()
            if not text_after.startswith(start):
                return Place(Phase.OPEN, text)
            phase, text = Phase.REASONING, text_after[len(start) :]
        if phase is not Phase.REASONING:
            return place
        if self.end_id is not None:
            return Place(Phase.AFTER if token == self.end_id else phase)
        end = self.form.end.encode()
        _, found, rest = text.partition(end)
        return Place(Phase.AFTER, rest) if found else Place(phase, text[1 - len(end) :])

    def opens(self, text: bytes) -> bool:
        """Whether an output that starts with ``text`` may start with reasoning."""
        marker, start = text.lstrip(), self.form.start.encode()
        if len(text) - len(marker) > MOST_BLANKS:
            return False
        if self.start_id is None and (start.startswith(marker) or marker.startswith(start)):
            return True
        return not marker or (bool(self.form.headers) and self.is_gap(marker))

    def is_gap(self, text: bytes) -> bool:
        """Whether a text may stand between reasoning and answer: white space, or the start of the headers."""
        for header in map(str.encode, self.form.headers):
            if header.startswith(text):
                return True
            text = text.removeprefix(header)
        return not text.strip() and len(text) <= MOST_BLANKS
