"""Benchmarks from the hub, through the ``datasets`` library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mmspec.errors import UserError, explained
from mmspec.eval.suite.tasks.local import DatasetRow
from mmspec.extras import install


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
    """A dataset of the organisation that lmms-eval 0.7.3 reads from; options as for ``HubDataset``."""
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
