"""`mmspec train make-data`: conversations whose answers are the target's own, for training its drafters.

A drafter guesses what its target will say; it learns that best from what the target says, not from what people wrote.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import click

from mmspec.cli.options import Number
from mmspec.errors import UserError
from vision.distil import data

FILE = "data.jsonl"
_POOL = 8  # batches whose requests are sorted together, so that answers of a batch end at about the same time


@click.command("make-data")
@click.option("--target", default="tiny-llava", show_default=True, metavar="NAME", help="The model that answers.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write.")
@click.option("--scenes", type=click.IntRange(1), help="Draw this many training scenes and clips to ask about.")
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Conversations (JSON or JSON Lines); their answers are replaced by the target's.",
)
@click.option("--images", type=click.Path(file_okay=False, path_type=Path), help="Folder of the media in --prompts.")
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Answers decoded at once.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True, help="Per answer.")
@click.option("--temperature", type=Number(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of sampling.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Number of the first scene.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Go on with what --out holds already.")
def make_data(
    target: str,
    out: Path,
    scenes: int | None,
    prompts: Path | None,
    images: Path | None,
    batch: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    first: int,
    resume: bool,
) -> None:
    """Let a target answer prompts, and write the conversations to OUT/data.jsonl.

    Every question of a conversation is asked in turn, each later one after the target's own earlier answers. An
    interrupted run goes on where it stopped when the same command is given again.
    """
    if (scenes is None) == (prompts is None):
        raise UserError("expected either --scenes or --prompts, received " + ("neither" if scenes is None else "both"))
    out.mkdir(parents=True, exist_ok=True)
    jobs: Iterable[Job]
    if prompts is not None:
        asked = data.read(prompts, images, answered=False)
        jobs, total = [_job(conversation) for conversation in asked.conversations], len(asked.conversations)
        for reason, count in asked.skipped.items():
            click.echo(f"{prompts}: {count} records passed over: {reason}", err=True)
    else:
        assert scenes is not None
        from vision.distil.scenes import drawn

        jobs, total = drawn(range(first, first + scenes), out), scenes
    keywords = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    _answer_all(target, jobs, total, Store(out, resume), batch, seed, keywords)


@dataclass
class Job:
    """A conversation in the making.

    Attributes:
        id: of the conversation.
        questions: the content of each user message, as in `data.Conversation`.
        expected: a guess of the length of each answer, in characters.
        system: what stands before the first question.
        messages, answers: those so far.
    """

    id: str
    questions: list[list[dict[str, Any]]]
    expected: list[int]
    system: tuple[dict[str, Any], ...] = ()
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages += self.system

    @property
    def open(self) -> bool:
        return len(self.answers) < len(self.questions)

    @property
    def likeness(self) -> tuple[int, int]:
        """Close for questions that cost about the same to answer: visual input, then length of the answer."""
        asked = self.questions[: len(self.answers) + 1]
        return sum(item["type"] in data.MEDIA for items in asked for item in items), self.expected[len(self.answers)]

    def ask(self) -> dict[str, Any]:
        """The request for the next answer."""
        return {"prompt": [*self.messages, {"role": "user", "content": self.questions[len(self.answers)]}]}

    def hear(self, text: str, token_ids: Sequence[int]) -> None:
        """Take in the next answer."""
        self.messages.append({"role": "user", "content": self.questions[len(self.answers)]})
        self.messages.append({"role": "assistant", "content": text.strip()})
        self.answers.append(tuple(token_ids))

    def result(self) -> data.Conversation:
        return data.Conversation(self.id, tuple(self.messages), tuple(self.answers))


def _job(conversation: data.Conversation) -> Job:
    questions, expected = [], []
    for message in conversation.messages:
        if message["role"] == "user":
            questions.append(message["content"])
            expected.append(0)
        elif message["role"] == "assistant":
            expected[-1] = len(message["content"])
    system = tuple(message for message in conversation.messages[:1] if message["role"] == "system")
    return Job(conversation.id, questions, expected, system)


class Store:
    """The file of records: whole lines, each conversation once.

    Args:
        out: its folder.
        resume: keep what it holds; a half-written last line is dropped.
    """

    def __init__(self, out: Path, resume: bool) -> None:
        self.out = out
        self.path = out / FILE
        self.done: set[str] = set()
        if not resume:
            self.path.unlink(missing_ok=True)
        if self.path.exists():
            self._mend()

    def _mend(self) -> None:
        whole = 0
        with self.path.open("rb+") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.done.add(json.loads(line)["id"])
                except (ValueError, KeyError, TypeError):
                    raise UserError(
                        f"{self.path}:{number}: expected a record with an id, received {line[:60]!r}"
                    ) from None
                whole += len(line)
            file.truncate(whole)

    def append(self, conversations: Iterable[data.Conversation]) -> None:
        lines = [json.dumps(data.to_record(conversation, self.out)) + "\n" for conversation in conversations]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())


def _answer_all(
    name: str, jobs: Iterable[Job], total: int, store: Store, batch: int, seed: int, keywords: dict[str, Any]
) -> None:
    """Answer what the store does not hold yet, with a progress bar."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from mmspec.cli.session import open_pipeline

    console = Console(stderr=True)
    pipe = open_pipeline(console, name, None, "auto", "auto")
    answering = Answering(pipe, batch, seed, keywords)
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("answering", total=total, completed=0)
        for finished in answering.run(job for job in jobs if job.id not in store.done):
            store.append(finished)
            bar.update(task, advance=len(finished))
    for line in answering.failures[:1]:
        click.echo(f"{len(answering.failures)} conversations passed over or cut short, the first: {line}", err=True)
    click.echo(json.dumps({"conversations": total, "answers": answering.answers, "tokens": answering.tokens}))


class Answering:
    """Runs jobs through a pipeline, questions of a kind together.

    Attributes:
        answers, tokens: given so far.
        failures: why conversations ended early, one line each.
    """

    def __init__(self, pipe: Any, batch: int, seed: int, keywords: dict[str, Any]) -> None:
        self.pipe, self.batch, self.seed, self.keywords = pipe, batch, seed, keywords
        self.answers = self.tokens = 0
        self.failures: list[str] = []

    def run(self, jobs: Iterable[Job]) -> Iterator[list[data.Conversation]]:
        """The finished conversations of each batch."""
        stream = iter(jobs)
        while pool := list(islice(stream, _POOL * self.batch)):
            while pool:
                pool.sort(key=lambda job: job.likeness)
                for start in range(0, len(pool), self.batch):
                    group = pool[start : start + self.batch]
                    self._answer(group)
                    yield [job.result() for job in group if not job.open and job.answers]
                pool = [job for job in pool if job.open]

    def _answer(self, group: list[Job]) -> None:
        first = group[0]
        # A seed of its own for each batch: equal ones would draw alike.
        seed = zlib.crc32(f"{self.seed} {first.id} {len(first.answers)}".encode())
        try:
            said = self.pipe.generate_batch([job.ask() for job in group], seed=seed, **self.keywords)
        except UserError as error:
            if len(group) > 1:
                for job in group:
                    self._answer([job])
                return
            self.failures.append(f"{first.id}: {error}")
            del first.questions[len(first.answers) :]
            return
        for job, answer in zip(group, said, strict=True):
            job.hear(answer.text, answer.token_ids)
            self.answers += 1
            self.tokens += len(answer.token_ids)
