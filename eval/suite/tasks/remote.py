"""Benchmarks through the ``datasets`` library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eval.suite.tasks.local import Row
from mmspec.errors import UserError
from mmspec.extras import install


@dataclass(frozen=True)
class Hub:
    """Where ``datasets`` finds a benchmark: the repositories that lmms-eval 0.7.3 reads, or the authors' own.

    Attributes:
        path, split, config: as ``datasets.load_dataset`` takes them.
        pictures: config and field of another table that holds the images, by its ``id``.
    """

    path: str
    split: str
    config: str | None = None
    pictures: tuple[str, str] | None = None


def hub_rows(name: str, hub: Hub, limit: int | None) -> Iterator[Row]:
    """A benchmark's rows, read as they are needed.

    Raises:
        UserError: ``datasets`` is not installed, or cannot reach the data.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{name}: expected --data FOLDER with local files, or the package datasets and a network, received neither "
            f"({install('eval')})"
        ) from None
    try:
        # A benchmark read in part should not be downloaded whole.
        for number, values in enumerate(_table(datasets, hub, hub.config, streaming=limit is not None)):
            if hub.pictures is not None and number == 0:
                table = _table(datasets, hub, hub.pictures[0])
                pictures = {row["id"]: place for place, row in enumerate(table.select_columns("id"))}
            if hub.pictures is not None:
                values = {**values, "image": table[pictures[values[hub.pictures[1]]]]["image"]}
            yield Row(dict(values), f"{hub.path}, row {number}", number)
    except UserError:
        raise
    except Exception as error:  # whatever a network, a server or a changed data set leads to
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{name}: expected to read {hub.path} through datasets, or --data FOLDER ({first_line})"
        ) from error


def _table(datasets: Any, hub: Hub, config: str | None, streaming: bool = False) -> Any:
    """A table whose images stay as they are stored: all samples of a task are held at once."""
    table = datasets.load_dataset(hub.path, config, split=hub.split, streaming=streaming)
    for name, feature in (table.features or {}).items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
    return table
