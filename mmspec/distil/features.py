"""Features of conversations for training drafters: computed when needed, or once and kept on disk.

`Extractor` and `FeatureCache` are called alike: with conversations, for their `Features`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmspec.checkpoint import verifier_of
from mmspec.distil.data import Conversation
from mmspec.distil.extraction import Extractor, Features, Row, collate, extract
from mmspec.errors import UserError
from mmspec.transformers_target import TransformersTarget

__all__ = ["Extractor", "FeatureCache", "Features", "Row", "collate", "extract"]

_INDEX = "index.json"


class FeatureCache:
    """Features of conversations in a folder: safetensors shards of some conversations each, and `index.json`.

    A shard is written whole or not at all; whoever fills the cache again goes on with the missing ones. Calling the
    cache with conversations gives their `Features`, as the `Extractor` does that filled it.

    Args:
        folder: made if it is not there.
        extractor: computes what is missing; its target and settings must be those that the folder was begun with.
        conversations: all that are to be in it.
        dtype: of the hidden states and visual features on disk; the target's by default.
        shard: conversations per file.

    Raises:
        UserError: the folder holds features of another target, other conversations or other settings.
    """

    def __init__(
        self,
        folder: Path,
        extractor: Extractor,
        conversations: Sequence[Conversation],
        *,
        dtype: torch.dtype | None = None,
        shard: int = 256,
    ) -> None:
        self.folder, self.extractor, self.conversations = folder, extractor, conversations
        self.target: TransformersTarget = extractor.target
        self.dtype, self.shard = dtype or self.target.model.dtype, shard
        self._places = {_fingerprint(one): place for place, one in enumerate(conversations)}
        self._open = lru_cache(maxsize=256)(self._opened)
        self._check_index()

    def __len__(self) -> int:
        """Number of shards."""
        return -(-len(self.conversations) // self.shard)

    @property
    def missing(self) -> list[int]:
        """Numbers of the shards that are not there yet."""
        return [number for number in range(len(self)) if not self._path(number).exists()]

    @property
    def skipped(self) -> Counter[str]:
        """How many conversations of the shards that are there have no features, by reason."""
        total: Counter[str] = Counter()
        for number in sorted(set(range(len(self))) - set(self.missing)):
            total.update(json.loads(self._open(number)[0].metadata()["skipped"]))
        return total

    def fill(
        self, batch: int = 16, rank: int = 0, processes: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compute the missing shards.

        Args:
            batch: conversations that the target reads at once.
            rank, processes: take every `processes`-th shard from `rank` on.
            progress: called with conversations done and their total, those of the shards to be computed.
        """
        todo = [number for number in self.missing if number % processes == rank]
        total, done = sum(len(self._members(number)) for number in todo), 0
        for number in todo:
            members = self._members(number)
            before = Counter(self.extractor.skipped)
            rows: list[Row | None] = [None] * len(members)
            order = sorted(range(len(members)), key=lambda index: members[index].size)  # saves padding
            for start in range(0, len(members), batch):
                places = order[start : start + batch]
                for place, row in zip(places, self.extractor.rows([members[p] for p in places]), strict=True):
                    rows[place] = None if row is None else self._packed(row)
                done += len(places)
                if progress:
                    progress(done, total)
            self._write(number, rows, self.extractor.skipped - before)

    def __call__(self, conversations: Sequence[Conversation]) -> Features:
        """Features of a batch; see `Extractor`.

        Raises:
            UserError: a conversation that is not in the cache, or a damaged shard.
        """
        rows = [self._row(conversation) for conversation in conversations]
        return collate([row for row in rows if row is not None], self.target)

    def _members(self, number: int) -> Sequence[Conversation]:
        return self.conversations[number * self.shard : (number + 1) * self.shard]

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"

    def _packed(self, row: Row) -> Row:
        hidden, shown = (x.to("cpu", self.dtype) for x in (row.hidden, row.shown))
        return Row(row.tokens.to("cpu", torch.int32), hidden, shown, row.visual.cpu(), row.answer.cpu())

    def _write(self, number: int, rows: Sequence[Row | None], skipped: Counter[str]) -> None:
        there = [row for row in rows if row is not None]
        width = self.target.config.hidden_size
        empty = Row(
            torch.zeros(0, dtype=torch.int32),
            torch.zeros(0, width, dtype=self.dtype),
            torch.zeros(0, width, dtype=self.dtype),
            torch.zeros(0, dtype=torch.bool),
            torch.zeros(0, dtype=torch.bool),
        )
        tensors = {
            name: torch.cat([getattr(row, name) for row in [empty, *there]])
            for name in ("tokens", "hidden", "shown", "visual", "answer")
        }
        tensors["lengths"] = torch.tensor([0 if row is None else len(row.tokens) for row in rows])
        tensors["shown_lengths"] = torch.tensor([0 if row is None else len(row.shown) for row in rows])
        part = self._path(number).with_suffix(".part")
        save_file(tensors, part, {"skipped": json.dumps(skipped)})
        os.replace(part, self._path(number))

    def _row(self, conversation: Conversation) -> Row | None:
        place = self._places.get(_fingerprint(conversation))
        if place is None:
            raise UserError(f"{self.folder}: expected features of conversation {conversation.id}, there are none")
        number, index = divmod(place, self.shard)
        file, ends, shown_ends = self._open(number)
        span, shown = (slice(int(e[index]), int(e[index + 1])) for e in (ends, shown_ends))
        if span.start == span.stop:
            return None
        part = {name: file.get_slice(name)[span] for name in ("tokens", "hidden", "visual", "answer")}
        # torch cannot cut an empty slice out of a file of no rows.
        features = file.get_slice("shown")[shown] if shown.start < shown.stop else part["hidden"][:0]
        return Row(part["tokens"].long(), part["hidden"], features, part["visual"], part["answer"])

    def _opened(self, number: int) -> tuple[Any, Tensor, Tensor]:
        """A shard's file, and where its conversations' positions and visual features end."""
        try:
            file = safe_open(self._path(number), "pt")
            ends = [file.get_tensor(name).cumsum(0) for name in ("lengths", "shown_lengths")]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self._path(number)}: expected a whole shard of features, received {error}") from error
        rows, shown = (torch.nn.functional.pad(end, (1, 0)) for end in ends)
        return file, rows, shown

    def _check_index(self) -> None:
        prints = hashlib.sha256("".join(self._places).encode()).hexdigest()
        wanted = {
            "verifier": verifier_of(self.target),
            "conversations": {"number": len(self.conversations), "sha256": prints},
            "settings": {**self.extractor.settings, "dtype": str(self.dtype), "shard": self.shard},
        }
        path = self.folder / _INDEX
        if path.exists():
            try:
                found = json.loads(path.read_text())
                different = [name for name in wanted if found.get(name) != wanted[name]]
            except (OSError, ValueError, AttributeError) as error:
                raise UserError(f"{path}: expected the index of a feature cache, received {error}") from error
            if different:
                name = different[0]
                raise UserError(
                    f"{self.folder} holds features of another {name}: expected {wanted[name]}, received "
                    f"{found.get(name)}"
                )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(wanted, indent=2) + "\n")
        os.replace(part, path)


def _fingerprint(conversation: Conversation) -> str:
    content = json.dumps([conversation.messages, conversation.answers], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
