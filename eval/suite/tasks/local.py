"""Benchmarks in local files.

Layout: ``DATA/NAME.jsonl``, or a folder ``DATA/NAME/`` that holds one or several ``.jsonl`` files (read in the order of
their names). Each line is one JSON object with the fields of the benchmark's own release (``mmspec eval --list`` says
which), where images and videos are file names: relative to the ``.jsonl`` file, or in ``images/`` or ``videos/`` beside
it, with or without their ending. ``id``, else ``question_id``, else the line's number tells samples apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.errors import UserError

_IDS = ("id", "question_id", "questionId", "task_id", "prompt_id", "image_id", "img_id")
_ENDINGS = ("", ".jpg", ".png", ".jpeg", ".webp", ".mp4", ".webm", ".mkv", ".avi")


@dataclass(frozen=True)
class Row:
    """One line of a benchmark.

    Attributes:
        values: its fields.
        where: what it is called in messages.
        number: from 0.
        folder: where its files are; None where it holds them itself.
    """

    values: dict[str, Any]
    where: str
    number: int
    folder: Path | None = None

    def __getitem__(self, field: str) -> Any:
        """A field.

        Raises:
            UserError: there is none of this name.
        """
        if field not in self.values:
            raise UserError(f"{self.where}: expected a field {field!r}, received {', '.join(self.values) or 'none'}")
        return self.values[field]

    def get(self, field: str, default: Any = None) -> Any:
        """A field, or ``default`` where there is none or it is empty."""
        value = self.values.get(field)
        return default if value is None else value

    @property
    def id(self) -> str:
        return str(next((self.values[name] for name in _IDS if self.values.get(name) is not None), self.number))

    def texts(self, field: str) -> list[str]:
        """A field that holds one text or several."""
        value = self[field]
        return [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]

    def images(self, *fields: str) -> tuple[Any, ...]:
        """Images named by these fields, those left out that are not there; paths, or what ``datasets`` gives."""
        return tuple(self._files(fields, "images"))

    def videos(self, *fields: str) -> tuple[Any, ...]:
        """Videos, as ``images``."""
        return tuple(self._files(fields, "videos"))

    def _files(self, fields: tuple[str, ...], beside: str) -> Iterator[Any]:
        for field in fields:
            value = self.get(field)
            for source in value if isinstance(value, list) else [] if value is None else [value]:
                if isinstance(source, dict):  # datasets' undecoded form
                    source = source.get("bytes") or source.get("path")
                yield self._found(source, beside) if isinstance(source, str) else source

    def _found(self, name: str, beside: str) -> str:
        if self.folder is None:
            return name
        for base in (self.folder, self.folder / beside):
            for ending in _ENDINGS:
                path = base / f"{name}{ending}"
                if path.is_file():
                    return str(path)
        raise UserError(f"{self.where}: expected the file {name} in {self.folder} or its {beside}/, there is none")


def local_rows(name: str, data: Path, limit: int | None = None) -> Iterator[Row]:
    """The lines of a benchmark.

    Raises:
        UserError: no such file, or lines that are no JSON objects.
    """
    alone, folder = data / f"{name}.jsonl", data / name
    files = [alone] if alone.is_file() else sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"{name}: expected {alone} or .jsonl files in {folder}/, there are none")
    number = 0
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: expected a JSONL file in UTF-8, received {error}") from error
        for place, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {place}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where}: expected a JSON object, received {error}") from error
            if not isinstance(values, dict):
                raise UserError(f"{where}: expected a JSON object, received {type(values).__name__}")
            yield Row(values, where, number, file.parent)
            number += 1
            if number == limit:
                return
