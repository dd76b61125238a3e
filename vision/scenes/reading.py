"""Parses facts from captions, for scoring. Independent of the captions' templates: it shares no phrases with them."""

from __future__ import annotations

import re
from dataclasses import dataclass

COLOUR_WORDS = {"violet": "purple", "turquoise": "cyan"} | {
    name: name for name in ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"]
}
"""The colour that each word for a colour means."""

SHAPE_WORDS = {"disc": "circle", "plus sign": "cross", "hoop": "ring"} | {
    name: name for name in ["circle", "square", "triangle", "star", "cross", "diamond", "ring"]
}
"""The shape that each word for a shape means."""

_SIZES = {"small": "small", "little": "small", "tiny": "small", "large": "large", "big": "large"}

_NAME = rf"(?:(?P<size>{'|'.join(_SIZES)}) )?(?P<colour>{'|'.join(COLOUR_WORDS)}) (?P<shape>{'|'.join(SHAPE_WORDS)})\b"
_NEW = re.compile(rf"\b(?:a|an) {_NAME}", re.IGNORECASE)
_ANY = re.compile(rf"\b(?:a|an|the) {_NAME}", re.IGNORECASE)
_PLACE = re.compile(
    r"\b(?:in|at|on|halfway down on) the (?:very )?(top|upper|bottom|lower|middle|centre|left|right)"
    r"(?: (left|right|centre|middle))?\b",
    re.IGNORECASE,
)
_QUOTED = re.compile(r'"([^"]*)"')
_CLAUSE = re.compile(r"[.;](?:\s|$)")


@dataclass(frozen=True)
class Mention:
    """An object named in a text; `size` and `cell` are None if not stated."""

    colour: str
    shape: str
    size: str | None
    cell: tuple[int, int] | None


@dataclass(frozen=True)
class ReadEvent:
    """An event stated in a text. `detail` is the new colour of a "recolour", the cell of a "move" or "appear"."""

    kind: str
    colour: str
    shape: str
    detail: str | tuple[int, int] | None = None


def clauses(text: str) -> list[str]:
    """Splits a text at full stops and semicolons."""
    return [part.strip() for part in _CLAUSE.split(text) if part.strip()]


def read_objects(text: str) -> list[Mention]:
    """Returns objects introduced with "a" or "an", each with its position in the sentence's statement."""
    mentions: list[Mention] = []
    for clause in clauses(text):
        if _QUOTED.search(clause):
            continue
        names = list(_NEW.finditer(clause))
        places: list[tuple[int, int] | None] = list(read_places(clause))
        places += [None] * (len(names) - len(places))
        mentions += [_mention(name, place) for name, place in zip(names, places, strict=False)]
    return mentions


def read_places(text: str) -> list[tuple[int, int]]:
    """Returns the grid cells (row, column) that a text names, in its order."""
    cells = []
    for match in _PLACE.finditer(text):
        words = {word.lower() for word in match.groups() if word}
        row = 0 if words & {"top", "upper"} else 2 if words & {"bottom", "lower"} else 1
        col = 0 if "left" in words else 2 if "right" in words else 1
        cells.append((row, col))
    return cells


def read_sign(text: str) -> str | None:
    """Returns the first quoted text, or None."""
    match = _QUOTED.search(text)
    return match.group(1) if match else None


def read_names(text: str) -> list[Mention]:
    """Returns all objects named with "a", "an" or "the", without positions."""
    return [_mention(match, None) for match in _ANY.finditer(text)]


_VERBS: tuple[tuple[str, str], ...] = (
    ("move", r"\b(?:moves|slides|glides)\b"),
    ("grow", r"\b(?:grows|gets bigger|becomes larger)\b"),
    ("shrink", r"\b(?:shrinks|gets smaller)\b"),
    ("recolour", rf"\b(?:turns|changes its colour to) (?P<new>{'|'.join(COLOUR_WORDS)})\b"),
    ("vanish", r"\b(?:disappears|vanishes)\b"),
    ("appear", r"\b(?:appears|shows up)\b"),
)


def read_events(text: str) -> list[ReadEvent]:
    """Returns the events in a video's caption, at most one per clause."""
    events = []
    for clause in clauses(text):
        names = read_names(clause)
        for kind, verb in _VERBS:
            match = re.search(verb, clause)
            if match is None or not names:
                continue
            detail: str | tuple[int, int] | None = None
            if kind == "recolour":
                detail = COLOUR_WORDS[match.group("new")]
            elif kind in ("move", "appear"):
                places = read_places(clause[match.end() :].removeprefix(" to the left").removeprefix(" to the right"))
                detail = places[-1] if places else None
            events.append(ReadEvent(kind, names[0].colour, names[0].shape, detail))
            break
    return events


def _mention(match: re.Match[str], cell: tuple[int, int] | None) -> Mention:
    size = match.group("size")
    return Mention(
        colour=COLOUR_WORDS[match.group("colour").lower()],
        shape=SHAPE_WORDS[match.group("shape").lower()],
        size=_SIZES[size.lower()] if size else None,
        cell=cell,
    )
