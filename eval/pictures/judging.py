"""What captions name (given words, coloured shapes of drawn scenes, any concrete thing), by picture and in total."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from mmspec.eval.harness.intervals import wilson_interval
from mmspec.eval.pictures.picture import Picture
from mmspec.vision.scenes.reading import COLOUR_WORDS, SHAPE_WORDS
from mmspec.vision.scenes.vocabulary import BACKGROUNDS

_IRREGULAR = {
    "child": "children",
    "foot": "feet",
    "goose": "geese",
    "man": "men",
    "mouse": "mice",
    "ox": "oxen",
    "person": "people",
    "tooth": "teeth",
    "woman": "women",
}
_COMPOUNDS = (
    "boat house",
    "bus stop",
    "car park",
    "guinea pig",
    "horse chestnut",
    "hot dog",
    "mountain bike",
    "mountain goat",
    "mountain lion",
    "power plant",
    "sea lion",
    "teddy bear",
)
"""Names of other things than the words in them."""

_NEGATED = re.compile(r"\b(?:no|not|without|neither|nor|cannot|\w+n't)\b[^.,;:!?]*")
_QUOTED = re.compile(r"\"[^\"]*\"|(?<!\w)'[^']*'(?!\w)")
_STRAIGHT = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
_AFTER_ARTICLE = r"(?<![\w-])(?:an?|the|one|half an?|sliced|whole|ripe|fresh) "
_FRUIT = r"(?:slices?|fruits?|halves|half|segments?)"
_FUNCTION_WORD = r"(?:on|in|with|is|are|that|which|and an?|cut|lying|sitting)"


def names(caption: str, words: Collection[str]) -> bool:
    """Whether a caption names one of some things.

    Words count as a whole, in singular and plural. Those in quotations, in a negated part ("no dogs") and in the name
    of something else ("hot dog") do not. A word that is a colour, too ("orange"), counts only where it is a noun.

    Args:
        words: nouns in the singular, possibly of several words.
    """
    return bool(mentioned(caption, words))


def mentioned(caption: str, words: Iterable[str]) -> list[str]:
    """Those of some words that a caption names, by their first place in it; see ``names``."""
    words = tuple(words)
    text = _affirmed(caption)
    for compound in _COMPOUNDS:
        if compound not in words:
            text = re.sub(rf"\b{compound}s?\b", " ", text)
    places = {word: match.start() for word in words if (match := _pattern(word).search(text))}
    return sorted(places, key=lambda word: places[word])


def coloured_shapes(caption: str) -> list[str]:
    """Coloured shapes of drawn scenes in a caption, such as "red star": a colour followed by a shape."""
    shapes = "|".join(map(_forms, SHAPE_WORDS))
    found = re.findall(rf"(?<![\w-])(?:{'|'.join(COLOUR_WORDS)})\s+(?:{shapes})(?![\w'-])", _affirmed(caption))
    return [" ".join(match.split()) for match in found]


@cache
def _pattern(word: str) -> re.Pattern[str]:
    if word in COLOUR_WORDS:
        noun = rf"{_AFTER_ARTICLE}{word}(?=\s*(?:[.,;:!?]|$)|\s+{_FUNCTION_WORD}\b)"
        return re.compile(rf"(?<![\w-]){word}s(?![\w'-])|(?<![\w-]){word} {_FRUIT}(?![\w'-])|{noun}")
    return re.compile(rf"(?<![\w-])(?:{_forms(word)})(?![\w'-])")


def _plain(caption: str) -> str:
    """Lower case, blanks for other white space, straight quotation marks."""
    return " ".join(caption.lower().translate(_STRAIGHT).split())


def _affirmed(caption: str) -> str:
    """Plain text without quotations and what is negated."""
    return _NEGATED.sub(" ", _QUOTED.sub(" ", _plain(caption)))


def _forms(word: str) -> str:
    """A regular expression for a noun's singular and plural; the last of several words is inflected."""
    *before, last = word.split()
    plurals = [f"{last}s"]
    if last in _IRREGULAR:
        plurals = [_IRREGULAR[last]]
    elif re.search(r"(?:s|x|z|ch|sh)$", last):
        plurals = [f"{last}es"]
    elif re.search(r"[^aeiou]y$", last):
        plurals = [f"{last[:-1]}ies"]
    elif re.search(r"(?:[lr]f|af|ife)$", last):
        plurals.append(re.sub(r"fe?$", "ves", last))
    elif last.endswith("o"):
        plurals.append(f"{last}es")
    start = "".join(rf"{part}[\s-]+" for part in before)
    return start + f"(?:{'|'.join([last, *plurals])})"


_PEOPLE = ("person", "man", "woman", "child", "boy", "girl")
_ABSTRACT_WORDS = """
image picture photo photograph view scene background foreground backdrop pattern texture gradient noise colour color
shade tone hue tint grain static dot pixel speckle spot line stripe block grid surface text word letter number digit
phrase message sentence equation sum time font character sign page paper centre center middle top bottom left right
side edge corner part half area region end whole rest way variety range mix mixture blend transition effect lot bit
kind type sort series set object subject thing detail element feature content shape form lightness brightness darkness
dark light gray beige teal navy turquoise magenta violet gold silver pastel one other same figure row column circle
square triangle star cross diamond ring rectangle oval arrangement
"""
_ABSTRACT = {*_ABSTRACT_WORDS.split(), *COLOUR_WORDS, *BACKGROUNDS, *SHAPE_WORDS}
"""Heads of noun phrases that claim no concrete thing."""

_END_WORDS = """
of on in with and or at that which is are was to from by for against behind under over above below near next shows
show showing depicts displays features contains appears looks has have fades changes goes turns covers fills reads
says written saying there as like than between into across along without no can could may must it its this these them
also halfway while where when be been sits stands lies then
"""
_NOUN = rf"(?!(?:{'|'.join(_END_WORDS.split())})\b)[a-z'-]+"
_NOUN_PHRASE = re.compile(rf"\b(?:an?|the|one|two|three|four|five|several|some|many)((?: {_NOUN}){{1,6}})")


def claimed_things(caption: str, vocabulary: Collection[str]) -> list[str]:
    """Concrete things that a caption claims: words of a vocabulary, people, and other heads of noun phrases.

    The head is the last word after an article or a number that is no participle. Heads such as "background" claim
    nothing, nor does quoted text. Unknown heads count, so that the share of captions that claim something is
    overestimated rather than underestimated.
    """
    text = _affirmed(caption)
    heads = []
    for match in _NOUN_PHRASE.finditer(text):
        words = match[1].split()
        while len(words) > 1 and re.search(r"(?:ing|ed)$", words[-1]) and not _is_abstract(words[-1]):
            words.pop()
        if not _is_abstract(words[-1]):
            heads.append(words[-1])
    known = mentioned(text, {*vocabulary, *_PEOPLE} - _ABSTRACT)
    return list(dict.fromkeys([*known, *heads]))


def _is_abstract(word: str) -> bool:
    singular = {word, word.removesuffix("s"), word.removesuffix("es")}
    return bool(singular & _ABSTRACT)


PROMPT = "Describe the image."
NAMED, KIND, SHAPES, THINGS = "named", "named or its kind", "coloured shapes", "things"


def caption_pictures(
    pipe: Any, pictures: Sequence[Picture], prompt: str = PROMPT, max_new_tokens: int = 96
) -> list[str]:
    """Greedy captions of pictures by a ``Pipeline``."""
    return [
        pipe.generate(prompt, images=[one.image], max_new_tokens=max_new_tokens, temperature=0.0).text.strip()
        for one in pictures
    ]


def judge(pictures: Sequence[Picture], captions: Sequence[str]) -> dict[str, Any]:
    """Results of captions of pictures whose main thing is known.

    Returns:
        ``totals`` (``named``: one of the picture's names; ``named or its kind``; ``coloured shapes`` of drawn scenes)
        with 95 % intervals; the same counts by group in ``groups``; ``confusion``, by group the number of captions that
        name a thing of each group first ("none": of no group); ``pictures``, a row each.
    """
    vocabulary = group_words(pictures)
    rows: list[dict[str, Any]] = [
        {
            "name": one.name,
            "group": one.group,
            "caption": caption,
            NAMED: names(caption, one.names),
            KIND: names(caption, (*one.names, *one.kinds)),
            SHAPES: coloured_shapes(caption),
            "read as": _read_as(caption, one.group, vocabulary),
        }
        for one, caption in zip(pictures, captions, strict=True)
    ]
    confusion: dict[str, Counter[str]] = {}
    for row in rows:
        confusion.setdefault(row["group"], Counter())[row["read as"]] += 1
    return {**_counted(rows, (NAMED, KIND, SHAPES)), "confusion": confusion, "pictures": rows}


def judge_blank(pictures: Sequence[Picture], captions: Sequence[str], vocabulary: Sequence[str]) -> dict[str, Any]:
    """Results of captions of blank pictures.

    Args:
        vocabulary: words for things, as in ``claimed_things``.

    Returns:
        ``totals`` of captions with ``coloured shapes`` and with claimed ``things``, ``groups`` and ``pictures``, as
        for ``judge``.
    """
    rows = [
        {
            "name": one.name,
            "group": one.group,
            "caption": caption,
            SHAPES: coloured_shapes(caption),
            THINGS: claimed_things(caption, vocabulary),
        }
        for one, caption in zip(pictures, captions, strict=True)
    ]
    return {**_counted(rows, (SHAPES, THINGS)), "pictures": rows}


def group_words(pictures: Sequence[Picture]) -> dict[str, set[str]]:
    """For each word of the pictures' names and kinds, and each group's own name, the groups that it stands for."""
    words: dict[str, set[str]] = {}
    for one in pictures:
        for word in (*one.names, *one.kinds, *filter(None, [one.group])):
            words.setdefault(word, set()).add(one.group)
    return words


def _read_as(caption: str, group: str, vocabulary: Mapping[str, set[str]]) -> str:
    """The group of the first thing that a caption names; the picture's own if the word stands for several."""
    for word in mentioned(caption, vocabulary):
        return group if group in vocabulary[word] else min(vocabulary[word])
    return "none"


def _counted(rows: Sequence[Mapping[str, Any]], measures: Sequence[str]) -> dict[str, Any]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    count = {m: sum(bool(row[m]) for row in rows) for m in measures}
    return {
        "totals": {m: {"count": count[m], "of": len(rows), **wilson_interval(count[m], len(rows))} for m in measures},
        "groups": {
            group: {"pictures": len(part), **{m: sum(bool(row[m]) for row in part) for m in measures}}
            for group, part in groups.items()
        },
    }
