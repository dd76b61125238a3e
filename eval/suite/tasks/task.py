"""Evaluation tasks: where samples come from and how answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mmspec.errors import UserError
from mmspec.eval.harness.prompts import Conversation
from mmspec.eval.suite.sample import Sample, Scorer
from mmspec.eval.suite.tasks.rows import DatasetRow, HubDataset, hub_rows, local_rows


def single_turn(
    row: DatasetRow, question: str, references: Sequence[str], category: str = "", metadata: Any = None
) -> Sample:
    """A sample with one question about the row's image or video, if it has any."""
    conversation = Conversation((question,), row.images("image"), row.videos("video"))
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
    """

    name: str
    description: str
    visual: bool
    score: Scorer | None
    max_new_tokens: int
    read: Callable[[DatasetRow], Sample] | None = None
    hub: HubDataset | None = None
    rows: Callable[[], Iterator[Sample]] | None = None

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
            rows = local_rows(self.name, data, limit)
        elif self.hub is not None:
            rows = hub_rows(self.name, self.hub, limit)
        else:
            raise UserError(f"{self.name} is read from local files only: expected --data FOLDER with {self.name}.jsonl")
        read = [self.read(row) for row in islice(rows, limit)]
        if not read:
            raise UserError(f"{self.name}: expected at least one sample, received none")
        if len({sample.id for sample in read}) < len(read):
            read = [
                Sample(f"{k}:{s.id}", s.conversation, s.category, s.references, s.metadata) for k, s in enumerate(read)
            ]
        return read
