"""Conversations about images and videos: reads and writes LLaVA's JSON format.

A record of a JSON array or of a JSON Lines file:

    {"id": "7", "image": "a.png" | ["a.png", "b.png"], "video": "clip.mp4" | [...],
     "conversations": [{"from": "human", "value": "<image>\\nDescribe the image."},
                       {"from": "gpt", "value": "A red star.", "token_ids": [5, 8, 2]}]}

Placeholders in human turns mark the positions of media. Media without a placeholder go to the start of the first human
turn. The optional extension ``token_ids`` has the generated tokens of an answer, including end of sequence.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from mmspec.errors import UserError, explained
from mmspec.files import read_lines, read_rows
from mmspec.validation import check

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing"), "assistant"),
    "system": "system",
}
"""Speaker names in files, and their roles in chat templates."""

MEDIA = ("image", "video")
_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None
_Turn = TypedDict("_Turn", {"from": Literal[*ROLES], "value": str, "token_ids": NotRequired[_Ids]})  # type: ignore[valid-type]
_Paths = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda given: [] if given is None else given if isinstance(given, list) else [given]),
]
_PLACEHOLDER = re.compile(r"[ \t]*\n?<(image|video)>\n?")
_ANY_PLACEHOLDER = re.compile("<image>|<video>")


@dataclass(frozen=True)
class Conversation:
    """A conversation in the format of chat templates.

    Attributes:
        messages: ``{"role": "user" | "assistant" | "system", "content": ...}``; a user's content is a list of items
            (``{"type": "image", "path": ...}``, ``{"type": "video", "path": ...}``, ``{"type": "text", "text": ...}``),
            other roles' content is a string.
        answers: generated tokens of each assistant message; None if only the text is known.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    answers: tuple[tuple[int, ...] | None, ...]

    @property
    def media(self) -> list[dict[str, Any]]:
        """The image and video items, in order."""
        items = (item for message in self.messages if message["role"] == "user" for item in message["content"])
        return [item for item in items if item["type"] in MEDIA]

    @property
    def size(self) -> int:
        """Approximate length in characters; an image counts as 1000, a video as 4000."""
        text = sum(len(text_of(message["content"])) for message in self.messages)
        return text + sum(1000 if item["type"] == "image" else 4000 for item in self.media)


@dataclass
class ConversationFile:
    """Usable conversations of a file, and the number of skipped records by reason."""

    conversations: list[Conversation]
    skipped: Counter[str] = field(default_factory=Counter)


def read(path: Path, images: Path | None = None, *, answered: bool = True) -> ConversationFile:
    """Read a JSON array or JSON Lines of conversations, with media paths relative to ``images``, by default the file's
    folder. If ``answered``, conversations without an answer and turns after the last answer are left out."""
    data = ConversationFile([])
    root = (path.parent if images is None else images).absolute()
    ids: Counter[str] = Counter()
    for number, (where, record) in enumerate(_records(path), start=1):
        with explained(where, ValueError):
            found = _conversation(record, where, root, answered)
        if isinstance(found, str):
            data.skipped[found] += 1
            continue
        name = str(record.get("id", number))
        ids[name] += 1
        again = f"#{ids[name]}" if ids[name] > 1 else ""
        data.conversations.append(Conversation(name + again, *found))
    return data


def to_record(conversation: Conversation, root: Path) -> dict[str, Any]:
    """The record of a conversation, with media paths relative to ``root``."""
    record: dict[str, Any] = {"id": conversation.id}
    for kind in MEDIA:
        paths = [os.path.relpath(item["path"], root) for item in conversation.media if item["type"] == kind]
        if paths:
            record[kind] = paths[0] if len(paths) == 1 else paths
    turns, answers = [], iter(conversation.answers)
    for message in conversation.messages:
        if message["role"] == "assistant":
            ids = next(answers)
            turn = {"from": "gpt", "value": message["content"]}
            turns.append(turn if ids is None else {**turn, "token_ids": list(ids)})
        elif message["role"] == "user":
            marked = [item.get("text", f"<{item['type']}>") for item in message["content"]]
            turns.append({"from": "human", "value": "\n".join(marked)})
        else:
            turns.append({"from": "system", "value": message["content"]})
    return {**record, "conversations": turns}


def split(conversations: Sequence[Conversation], share: float) -> tuple[list[Conversation], list[Conversation]]:
    """Split into training conversations and a held-out ``share``, at least one if above 0, by a hash of their ids."""

    def rank(conversation: Conversation) -> bytes:
        return hashlib.sha256(conversation.id.encode()).digest()

    count = max(1, round(share * len(conversations))) if share > 0 else 0
    held = {conversation.id for conversation in sorted(conversations, key=rank)[:count]}
    return [c for c in conversations if c.id not in held], [c for c in conversations if c.id in held]


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(item.get("text", "") for item in content)


def as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with strings as content, the format of text models' chat templates."""
    if any(item["type"] in MEDIA for m in messages if not isinstance(m["content"], str) for item in m["content"]):
        raise UserError("a text model reads text only: received a conversation with images or videos")
    return [{**message, "content": text_of(message["content"])} for message in messages]


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    first = next((line.lstrip() for _, line in read_lines(path) if line.strip()), "")
    if not first.startswith("["):
        yield from ((f"{path}, line {number}", row) for number, row in read_rows(path))
        return
    with explained(f"{path}: expected a JSON array or JSON Lines of conversations", ValueError, RecursionError):
        records = json.loads("".join(line for _, line in read_lines(path)))
    yield from ((f"{path}, record {number}", record) for number, record in enumerate(records, start=1))


def _conversation(record: Any, where: str, root: Path, answered: bool) -> Any:
    """Messages and answers of a record, or the reason to skip it."""
    given = [(ROLES[turn["from"]], turn) for turn in turns_of(check(f"{where}: record", dict, record), where)]
    turns: list[Any] = []
    for role, turn in given:
        ids = turn.get("token_ids") if role == "assistant" else None
        turns.append((role, turn["value"], tuple(ids) if ids else None))
    paths = {kind: [str(root / path) for path in check(f"{where}: {kind}", _Paths, record.get(kind))] for kind in MEDIA}
    while turns and turns[0][0] == "assistant":
        del turns[0]
    turns = _merged(turns)
    if answered:
        while turns and turns[-1][0] != "assistant":
            del turns[-1]
    if all(role != "user" for role, _, _ in turns):
        return "no answer" if answered else "no question"
    if any(role != "user" and _ANY_PLACEHOLDER.search(text) for role, text, _ in turns):
        return "a media placeholder outside of a question"
    if not any(paths.values()) and any(_ANY_PLACEHOLDER.search(text) for _, text, _ in turns):
        return "a media placeholder without media"
    return _messages(turns, paths), tuple(ids for role, _, ids in turns if role == "assistant")


def turns_of(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Validated turns of a record."""
    return check(f"{where}: conversations", list[_Turn], record.get("conversations"))


def _merged(turns: list[Any]) -> list[Any]:
    """Merge consecutive turns of the same speaker: chat templates require alternating roles."""
    merged: list[Any] = []
    for role, text, ids in turns:
        if merged and merged[-1][0] == role:
            merged[-1] = (role, f"{merged[-1][1]}\n{text}", None)
        else:
            merged.append((role, text, ids))
    return merged


def _messages(turns: list[Any], paths: dict[str, list[str]]) -> tuple[dict[str, Any], ...]:
    left = {kind: list(files) for kind, files in paths.items()}
    messages = []
    for role, text, _ in turns:
        content = _items(text, left) if role == "user" else text
        messages.append({"role": role, "content": content})
    unmarked = [{"type": kind, "path": path} for kind in MEDIA for path in left[kind]]
    first = next(message for message in messages if message["role"] == "user")
    first["content"] = [*unmarked, *first["content"]]
    return tuple(messages)


def _items(text: str, left: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Split a question into items; each placeholder takes the next of the remaining media."""
    items: list[dict[str, Any]] = []
    parts = _PLACEHOLDER.split(text)  # text, kind of placeholder, text, ...
    for index, part in enumerate(parts):
        if index % 2 == 0:
            if part:
                items.append({"type": "text", "text": part})
        elif left[part]:
            items.append({"type": part, "path": left[part].pop(0)})
        else:
            raise ValueError(f"expected as many files in `{part}` as there are <{part}> placeholders, received fewer")
    return items


TEXT, MIXED = "text", "mixed"
ExampleIndex = tuple[str, int]
"""Kind of an example, ``TEXT`` (stage 1) or ``MIXED`` (stage 2), and its index among the examples of that kind."""

POOL = 8  # batches sampled together: a pool is sorted by length before it is split into batches, which saves padding


class CurriculumSampler:
    """Samples batches of examples, given their ``lengths`` by kind, in any unit. Each kind is reshuffled every epoch.
    If both kinds exist, all examples are ``TEXT`` until the progress ``text_share``; then the probability of a
    ``MIXED`` example rises linearly to 1. ``info``: stage and share, for the log."""

    def __init__(self, lengths: Mapping[str, Sequence[int]], batch: int, seed: int, text_share: float = 0.0) -> None:
        self.lengths = {kind: found for kind, found in lengths.items() if len(found)}
        if not self.lengths:
            raise UserError("training needs at least one conversation that is not held out: received none")
        self.batch, self.seed = batch, seed
        self.info: dict[str, Any] = {}
        self._text_share = text_share
        self._drawn = dict.fromkeys(self.lengths, 0)
        self._pools = 0
        self._waiting: list[list[ExampleIndex]] = []
        self._shuffled = lru_cache(maxsize=2)(self._order)

    def next(self, progress: float) -> list[ExampleIndex]:
        """The next batch of examples, given the run's progress from 0 to 1."""
        share = float(MIXED in self.lengths)
        if len(self.lengths) == 2:
            share = 0.0 if progress <= self._text_share else (progress - self._text_share) / (1.0 - self._text_share)
        self.info = {"stage": 1 if share == 0.0 else 2, "share": round(share, 4)}
        if not self._waiting:
            self._fill(share)
        return self._waiting.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": dict(self._drawn), "pools": self._pools, "waiting": list(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the next batch of a sampler of the same examples, batch size and seed."""
        self._drawn, self._pools, self._waiting = dict(state["drawn"]), state["pools"], list(state["waiting"])

    def _fill(self, share: float) -> None:
        rng = random.Random(f"{self.seed} pool {self._pools}")
        self._pools += 1
        pool = [self._draw(MIXED if rng.random() < share else TEXT) for _ in range(POOL * self.batch)]
        pool.sort(key=lambda example: self.lengths[example[0]][example[1]])
        self._waiting = [pool[start : start + self.batch] for start in range(0, len(pool), self.batch)]
        rng.shuffle(self._waiting)

    def _draw(self, kind: str) -> ExampleIndex:
        epoch, place = divmod(self._drawn[kind], len(self.lengths[kind]))
        self._drawn[kind] += 1
        return kind, self._shuffled(kind, epoch)[place]

    def _order(self, kind: str, epoch: int) -> list[int]:
        order = list(range(len(self.lengths[kind])))
        random.Random(f"{self.seed} {kind} {epoch}").shuffle(order)
        return order
