"""Rows of benchmarks, from local files or from the hub through ``datasets``.

Local files: ``DATA/NAME.jsonl``, or a folder ``DATA/NAME/`` with one or several ``.jsonl`` files (read in alphabetical
order). Each line is a JSON object with the fields of the benchmark's own release (see ``mmspec eval --list``). Images
and videos are file names relative to the ``.jsonl`` file, or to ``images/`` or ``videos/`` next to it, with or without
extension. Samples are identified by ``id``, else ``question_id``, else the line number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mmspec.errors import UserError, explained, install
from mmspec.eval.harness.prompts import Questions
from mmspec.files import read_rows


@dataclass(frozen=True)
class Sample:
    """One conversation of a task.

    Attributes:
        id: unique within its task.
        conversation: questions and media.
        category: groups samples in Spec-Bench's results.
        references: accepted answers by turn, for at most as many turns as the conversation has.
        metadata: anything else that the scorer needs.
    """

    id: str
    conversation: Questions
    category: str = ""
    references: tuple[tuple[str, ...], ...] = ()
    metadata: Any = None


Answered = tuple[Sample, Sequence[str]]
"""A sample and the answers to its turns."""

Scorer = Callable[[Sequence[Answered]], dict[str, float]]
"""Scores by name over all answers, from 0 to 1 or as the benchmark defines them; the first is the main score."""


_IDS = ("id", "question_id", "questionId", "task_id", "prompt_id", "image_id", "img_id")
_IMAGES = (".jpg", ".png", ".jpeg", ".webp")
_ENDINGS = ("", *_IMAGES, ".mp4", ".webm", ".mkv", ".avi")


@dataclass(frozen=True)
class DatasetRow:
    """One row of a benchmark's data.

    Attributes:
        values: fields by name.
        where: file and line, for error messages.
        number: index from 0.
        folder: folder of its media files; None if fields contain the media.
    """

    values: dict[str, Any]
    where: str
    number: int
    folder: Path | None = None

    def __getitem__(self, field: str) -> Any:
        """A field.

        Raises:
            UserError: it is missing.
        """
        if field not in self.values:
            raise UserError(f"{self.where}: expected a field {field!r}, received {', '.join(self.values) or 'none'}")
        return self.values[field]

    def get(self, field: str, default: Any = None) -> Any:
        """A field, or ``default`` if it is missing or None."""
        value = self.values.get(field)
        return default if value is None else value

    @property
    def id(self) -> str:
        return str(next((self.values[name] for name in _IDS if self.values.get(name) is not None), self.number))

    def texts(self, field: str) -> list[str]:
        """A field with one text or a list of texts."""
        value = self[field]
        return [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]

    def images(self, *fields: str) -> tuple[Any, ...]:
        """Images of these fields, as paths or in the form of ``datasets``; missing fields are skipped."""
        return tuple(self._files(fields, "images"))

    def videos(self, *fields: str) -> tuple[Any, ...]:
        """Videos of these fields, as for ``images``."""
        return tuple(self._files(fields, "videos"))

    def _files(self, fields: tuple[str, ...], subfolder: str) -> Iterator[Any]:
        for field in fields:
            value = self.get(field)
            for source in value if isinstance(value, list) else [] if value is None else [value]:
                if isinstance(source, dict):  # an undecoded image of datasets
                    source = source.get("bytes") or source.get("path")
                yield self._find_file(source, subfolder) if isinstance(source, str) else source

    def _find_file(self, name: str, subfolder: str) -> str:
        if self.folder is None:
            return name
        for base in (self.folder, self.folder / subfolder):
            for ending in _ENDINGS:
                path = base / f"{name}{ending}"
                if path.is_file():
                    return str(path)
        raise UserError(f"{self.where}: expected the file {name} in {self.folder} or its {subfolder}/, there is none")


def local_rows(name: str, data: Path) -> Iterator[DatasetRow]:
    """The rows of a local benchmark.

    Raises:
        UserError: missing files, or lines that are not JSON objects.
    """
    single, folder = data / f"{name}.jsonl", data / name
    files = [single] if single.is_file() else sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"{name}: expected {single} or .jsonl files in {folder}/, there are none")
    rows = (row for file in files for row in rows_of(file))
    for number, row in enumerate(rows):
        yield replace(row, number=number)


def pages(name: str, data: Path) -> Iterator[DatasetRow]:
    """A row per image in ``DATA/NAME/``; its category is whether a text file of the same name exists.

    Raises:
        UserError: the folder has no images.
    """
    folder = data / name
    images = sorted(path for path in folder.glob("*") if path.suffix.lower() in _IMAGES)
    if not images:
        raise UserError(f"{name}: expected images ({', '.join(_IMAGES)}) in {folder}/, there are none")
    for number, path in enumerate(images):
        category = "with a text" if path.with_suffix(".txt").is_file() else "without a text"
        yield DatasetRow({"id": path.stem, "image": path.name, "category": category}, str(path), number, folder)


def rows_of(file: Path) -> Iterator[DatasetRow]:
    """The rows of a JSON Lines file.

    Raises:
        UserError: it cannot be read, or a line is not a JSON object.
    """
    for number, values in read_rows(file):
        yield DatasetRow(values, f"{file}, line {number}", number - 1, file.parent)


@dataclass(frozen=True)
class HubDataset:
    """A benchmark's dataset on the hub.

    Attributes:
        path, split, config: as for ``datasets.load_dataset``.
        images: for images in another table: its config, and the field with the image's ``id``.
    """

    path: str
    split: str
    config: str | None = None
    images: tuple[str, str] | None = None


def lmms_lab(name: str, *options: Any) -> HubDataset:
    """A dataset of lmms-lab, the organisation used by lmms-eval 0.7.3; options as for ``HubDataset``."""
    return HubDataset(f"lmms-lab-encoder/{name}", *options)


def hub_rows(name: str, hub: HubDataset, limit: int | None) -> Iterator[DatasetRow]:
    """The rows of a benchmark, read lazily.

    Raises:
        UserError: ``datasets`` is not installed, or the data cannot be read.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{name}: expected --data FOLDER with local files, or the package datasets and a network, received neither "
            f"({install('eval')})"
        ) from None
    # Network, server and dataset problems raise many kinds of errors.
    with explained(f"{name}: expected to read {hub.path} through datasets, or --data FOLDER", Exception):
        # Streaming avoids downloading a whole benchmark to read a part.
        for number, values in enumerate(_load_table(datasets, hub, hub.config, streaming=limit is not None)):
            if hub.images is not None and number == 0:
                image_table = _load_table(datasets, hub, hub.images[0])
                image_index = {row["id"]: index for index, row in enumerate(image_table.select_columns("id"))}
            if hub.images is not None:
                values = {**values, "image": image_table[image_index[values[hub.images[1]]]]["image"]}
            yield DatasetRow(dict(values), f"{hub.path}, row {number}", number)


def _load_table(datasets: Any, hub: HubDataset, config: str | None, streaming: bool = False) -> Any:
    """A table with undecoded images, since all samples of a task are in memory at once."""
    table = datasets.load_dataset(hub.path, config, split=hub.split, streaming=streaming)
    for name, feature in (table.features or {}).items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
    return table


def single_turn(
    row: DatasetRow, question: str, references: Sequence[str], category: str = "", metadata: Any = None
) -> Sample:
    """A sample with one question, about the row's image or video where it has one."""
    conversation = Questions((question,), row.images("image"), row.videos("video"))
    return Sample(row.id, conversation, category, (tuple(references),) if references else (), metadata)


@dataclass(frozen=True)
class EvalTask:
    """A benchmark.

    Attributes:
        name: on the command line and in results.
        description: one line for ``mmspec eval --list``.
        visual: whether samples have images or videos, which a text model cannot take.
        score: the scorer; None if only speed and equality are measured.
        max_new_tokens: default limit of its answers.
        read: converts a row to a sample, from local files and ``datasets`` alike.
        hub: where ``datasets`` finds it; None if it is only read from local files.
        rows: the samples of a task that the package contains.
        local: reads its rows from a folder of data.
    """

    name: str
    description: str
    visual: bool
    score: Scorer | None
    max_new_tokens: int
    read: Callable[[DatasetRow], Sample] | None = None
    hub: HubDataset | None = None
    rows: Callable[[], Iterator[Sample]] | None = None
    local: Callable[[str, Path], Iterator[DatasetRow]] = local_rows

    def samples(self, data: Path | None, limit: int | None) -> list[Sample]:
        """The first samples.

        Args:
            data: folder of local benchmark files; None reads through ``datasets``.
            limit: maximum number; None is all.

        Raises:
            UserError: data is missing or has another layout.
        """
        if self.rows is not None:
            return list(islice(self.rows(), limit))
        assert self.read is not None
        if data is not None:
            rows = self.local(self.name, data)
        elif self.hub is not None:
            rows = hub_rows(self.name, self.hub, limit)
        else:
            files = f"{self.name}.jsonl or {self.name}/"
            raise UserError(f"{self.name} is read from local files only: expected --data FOLDER with {files}")
        read = [self.read(row) for row in islice(rows, limit)]
        if not read:
            raise UserError(f"{self.name}: expected at least one sample, received none")
        if len({sample.id for sample in read}) < len(read):
            read = [
                Sample(f"{k}:{s.id}", s.conversation, s.category, s.references, s.metadata) for k, s in enumerate(read)
            ]
        return read
