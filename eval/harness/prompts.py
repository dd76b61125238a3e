"""Conversations of studies and of the embedded suite, and the held-out prompts of the embedded models.

A held-out set in ``eval/heldout`` was drawn once from the distribution of these models' training data, and no model was
trained or tuned on it. ``NAME.jsonl`` has a row per conversation:

- ``id``, the seed it was drawn from, and ``category``
- ``turns``, its questions
- ``images``, the number of images in the first question, or ``frames``, of a clip of one frame per second
- ``references``, accepted answers by turn; they are letters of ``options`` where a row has these, and the edited
  functions of ``code-edits``
- ``parts``, instead: for each thing that the answer has to mention, its accepted wordings

``NAME.webp`` has all images and frames of a set, tiles of 96 x 96 pixels in the order of the rows, 32 side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from PIL import Image

from mmspec.errors import UserError, nearest
from mmspec.files import read_rows
from mmspec.vision.video import Video

_HELD_OUT = Path(__file__).parents[1] / "heldout"
_TILE, _COLUMNS = 96, 32
_FRAMES = 8
"""Frames of a clip to caption; the set has each clip with 16 frames, too."""


@dataclass(frozen=True)
class Questions:
    """A user's questions about the media of the first turn.

    Attributes:
        questions: one per turn.
        images, videos: attached to the first question; anything that the target accepts.
    """

    questions: tuple[str, ...]
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()

    def request(self, answers: list[str]) -> dict[str, Any]:
        """The request for the next answer, given the answers so far.

        A single question without media stays plain text, for models without a chat template.
        """
        first: Any = self.questions[0]
        if not (answers or self.images or self.videos):
            return {"prompt": first, "images": [], "videos": []}
        if self.images or self.videos:
            media = [{"type": "image"} for _ in self.images] + [{"type": "video"} for _ in self.videos]
            first = [*media, {"type": "text", "text": first}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
        for answer, question in zip(answers, self.questions[1:], strict=False):
            messages += [{"role": "assistant", "content": answer.strip()}, {"role": "user", "content": question}]
        return {"prompt": messages, "images": list(self.images), "videos": list(self.videos)}


def held_out(name: str) -> Iterator[tuple[dict[str, Any], Questions]]:
    """The rows of a held-out set, each with its conversation."""
    sheet = _HELD_OUT / f"{name}.webp"
    tiles = _tiles(sheet) if sheet.exists() else iter(())
    for _, row in read_rows(_HELD_OUT / f"{name}.jsonl"):
        images = tuple(islice(tiles, row.get("images", 0)))
        frames = list(islice(tiles, row.get("frames", 0)))
        times = [float(second) for second in range(len(frames))]
        clips = (Video(frames, times, float(len(frames)), "clip"),) if frames else ()
        yield row, Questions(tuple(row["turns"]), images, clips)


def held_out_requests(name: str, count: int) -> list[dict[str, Any]]:
    """The first questions of a held-out set's conversations, each with its media.

    ``images`` and ``clips`` are to be captioned, ``mixed`` has captions and questions, ``prompts`` has texts of all
    kinds that the embedded hybrid model was trained on; ``warm-up-images`` and ``warm-up-prompts`` have others. Raises
    ``UserError``: an unknown or too small set.
    """
    known = sorted(file.stem for file in _HELD_OUT.glob("*.jsonl"))
    if name not in known:
        raise UserError(f"unknown held-out set: expected one of {', '.join(known)}, got {name!r}{nearest(name, known)}")
    found = [one for row, one in held_out(name) if row.get("frames", _FRAMES) == _FRAMES]
    if count > len(found):
        raise UserError(f"expected at most {len(found)} held-out {name}, got {count}")
    requests = [(one, {"images": list(one.images), "videos": list(one.videos)}) for one in found[:count]]
    return [{"prompt": one.questions[0]} | {kind: own[kind] for kind in own if own[kind]} for one, own in requests]


def warm_up_requests(count: int, visual: bool) -> list[dict[str, Any]]:
    """Captioning requests or, if not visual, texts that no other set has; repeated to reach ``count``."""
    name = "warm-up-images" if visual else "warm-up-prompts"
    return list(islice(cycle(held_out_requests(name, 8)), count))


def _tiles(sheet: Path) -> Iterator[Image.Image]:
    with Image.open(sheet) as file:
        image = file.convert("RGB")
    for top in range(0, image.height, _TILE):
        for left in range(0, _COLUMNS * _TILE, _TILE):
            yield image.crop((left, top, left + _TILE, top + _TILE))
