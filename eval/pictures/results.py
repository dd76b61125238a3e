"""Results of captions: per picture, in total with 95 % intervals, and which group is taken for which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mmspec.eval.harness.intervals import wilson_interval
from mmspec.eval.pictures.judging import claimed_things, coloured_shapes, mentioned, names
from mmspec.eval.pictures.picture import Picture

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
