"""What a task is: samples to ask, and how answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eval.harness.prompts import Conversation
from eval.suite.sample import Sample, Scorer
from eval.suite.tasks.local import Row, local_rows
from eval.suite.tasks.remote import Hub, hub_rows
from mmspec.errors import UserError


def one_turn(row: Row, question: str, references: Sequence[str], category: str = "", about: Any = None) -> Sample:
    """A row's question about its picture or clip, or about nothing."""
    conversation = Conversation((question,), row.images("image"), row.videos("video"))
    return Sample(row.id, conversation, category, (tuple(references),) if references else (), about)


@dataclass(frozen=True)
class Task:
    """A benchmark.

    Attributes:
        name: on the command line and in results.
        about: one line for ``mmspec eval --list``.
        visual: whether there is something to see, which a text model cannot.
        score: None where only the speed is measured.
        max_new_tokens: that its answers need.
        read: makes a sample of a row of the benchmark's data, the same for local files and for ``datasets``.
        hub: where ``datasets`` finds it; None where it is not known to.
        draw: gives samples without end, for tasks that the package draws itself.
    """

    name: str
    about: str
    visual: bool
    score: Scorer | None
    max_new_tokens: int
    read: Callable[[Row], Sample] | None = None
    hub: Hub | None = None
    draw: Callable[[int], Iterator[Sample]] | None = None

    def samples(self, data: Path | None, limit: int | None, frames: int = 8) -> list[Sample]:
        """The first samples.

        Args:
            data: folder of local benchmarks; None reads through ``datasets``.
            limit: how many at most; None takes all, or 64 of a task that is drawn.
            frames: per drawn video.

        Raises:
            UserError: no data, or data in another layout.
        """
        if self.draw is not None:
            return list(islice(self.draw(frames), 64 if limit is None else limit))
        assert self.read is not None
        if data is not None:
            rows = local_rows(self.name, data, limit)
        elif self.hub is not None:
            rows = hub_rows(self.name, self.hub, limit)
        else:
            raise UserError(
                f"{self.name} is read from files alone: expected --data FOLDER that holds {self.name}.jsonl"
            )
        found = [self.read(row) for row in islice(rows, limit)]
        if not found:
            raise UserError(f"{self.name}: expected at least one sample, received none")
        if len({sample.id for sample in found}) < len(found):
            found = [
                Sample(f"{k}:{s.id}", s.conversation, s.category, s.references, s.about) for k, s in enumerate(found)
            ]
        return found
