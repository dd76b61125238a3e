"""`mmspec train make-data`: conversations whose answers are the target's own, for training its drafters.

A drafter guesses what its target will say; it learns that best from what the target says, not from what people wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmspec.cli.options import OUT_FOLDER, Number
from mmspec.distil import data
from mmspec.errors import UserError

if TYPE_CHECKING:
    from vision.distil.answering import Job

FILE, SETTINGS = "data.jsonl", "settings.json"


@click.command("make-data")
@click.option(
    "--model",
    "--target",
    "target",
    default="tiny-llava",
    show_default=True,
    metavar="NAME",
    help="The model that answers.",
)
@click.option("--as-told", is_flag=True, help="With --scenes: keep the scenes' own answers; no model is asked.")
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder to write.")
@click.option("--scenes", type=click.IntRange(1), help="Draw this many training scenes and clips to ask about.")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Conversations (JSON or JSON Lines); their answers are replaced by the target's.",
)
@click.option(
    "--images", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of the media in --prompts."
)
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Answers decoded at once.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True, help="Per answer.")
@click.option("--temperature", type=Number(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of sampling.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Number of the first scene.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Go on with what --out holds already.")
def make_data(
    target: str,
    as_told: bool,
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
    if as_told and scenes is None:
        raise UserError("--as-told keeps the answers of drawn scenes: expected --scenes, received --prompts")
    keywords = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    store = Store(out, {"target": None if as_told else target, **keywords}, resume)
    jobs: Iterable[Job]
    if prompts is not None:
        from vision.distil.answering import job_of

        asked = data.read(prompts, images, answered=False)
        jobs, total = [job_of(conversation) for conversation in asked.conversations], len(asked.conversations)
        for reason, count in asked.skipped.items():
            click.echo(f"{prompts}: {count} records passed over: {reason}", err=True)
    else:
        assert scenes is not None
        from vision.distil.scenes import drawn

        jobs, total = drawn(range(first, first + scenes), out), scenes
    if as_told:
        store.append(_told(job) for job in jobs if job.id not in store.done)
        return
    _answer_all(target, jobs, total, store, batch, seed, keywords)


class Store:
    """The file of records: whole lines, each conversation once.

    Args:
        out: its folder, made if it is not there.
        settings: how answers are made, as JSON values; kept in a file beside.
        resume: keep what it holds; a half-written last line is dropped.

    Attributes:
        done: ids of the records that it held at first.

    Raises:
        UserError: it holds answers made with other settings, or something else than records.
    """

    def __init__(self, out: Path, settings: dict[str, Any], resume: bool) -> None:
        self.out, self.path = out, out / FILE
        self.done: set[str] = set()
        out.mkdir(parents=True, exist_ok=True)
        if not resume:
            self.path.unlink(missing_ok=True)
        if self.path.exists():
            self._compare(settings)
            self._mend()
        part = out / (SETTINGS + ".part")
        part.write_text(json.dumps(settings, indent=2) + "\n")
        os.replace(part, out / SETTINGS)

    def _compare(self, settings: dict[str, Any]) -> None:
        try:
            before = json.loads((self.out / SETTINGS).read_text())
        except FileNotFoundError:
            return
        except ValueError as error:
            raise UserError(f"{self.out / SETTINGS}: expected the settings of a run, received {error}") from error
        if before != settings:
            raise UserError(
                f"{self.path} holds answers made with {before}: expected the same, received {settings}; give another "
                "--out or --no-resume"
            )

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


def _told(job: Job) -> data.Conversation:
    """The conversation with the answers that are known."""
    for answer in job.known:
        job.hear(answer, None)
    return job.result()


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
    from vision.distil.answering import Answering

    console = Console(stderr=True)
    pipe = open_pipeline(console, name, None, "auto", "auto")
    answering = Answering(pipe, batch, seed, keywords)
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("answering", total=total)

        def fresh() -> Iterator[Job]:
            for job in jobs:
                if job.id in store.done:
                    bar.advance(task)
                else:
                    yield job

        for finished in answering.run(fresh()):
            store.append(finished)
            bar.advance(task, len(finished))
    failed = answering.failures
    if failed and not answering.answers:
        raise UserError(failed[0])
    if failed:
        click.echo(f"{len(failed)} conversations passed over or cut short, the first: {failed[0]}", err=True)
    click.echo(json.dumps({"conversations": total, "answers": answering.answers, "tokens": answering.tokens}))
