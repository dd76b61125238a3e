"""Commands that write drafters without gradient steps: ``export``, ``datastore build`` and ``train recycle``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import FILE, FOLDER, OUT_FOLDER, model_option
from mmspec.errors import UserError, shown
from mmspec.files import read_lines, read_rows

_CHARACTERS = 1 << 20  # characters of a text file to encode at once
_BATCH = 16  # prompts that `train recycle` answers at once


@click.command(cls=Command)
@click.option(
    "--model", required=True, metavar="NAME", help="The target, a folder or hub id; its weights are not read."
)
@click.option("--drafter", type=FOLDER, required=True, help="Folder of the drafter.")
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder to write.")
@click.option(
    "--format",
    "layout",
    type=click.Choice(["speculators", "eagle", "z-lab", "vllm", "medusa"]),
    help="EAGLE-3: speculators (default) is for vLLM, eagle for SGLang. EAGLE: eagle. DFlash: speculators (default) or "
    "z-lab. Medusa: vllm (default), or medusa for the authors' code.",
)
@click.option(
    "--tokens", type=click.IntRange(1, 64), default=3, show_default=True, help="EAGLE-3: draft tokens per step in vLLM."
)
def export(model: str, drafter: Path, out: Path, layout: str | None, tokens: int) -> None:
    """Write a drafter in a published format, for engines that read it."""
    from mmspec.drafters import layouts
    from mmspec.drafters.registry import drafter_spec, make_drafter, registered_name
    from mmspec.loading import load_config

    made: Any = make_drafter(str(drafter.resolve()))
    kind = registered_name(made)
    formats = layouts.FORMATS.get(kind or "", {})
    layout = layout or ("speculators" if "speculators" in formats else next(iter(formats), ""))
    if layout not in formats:
        known = [name for name, some in layouts.FORMATS.items() if layout in some or not layout]
        kinds, what = " and ".join(drafter_spec(name).label for name in known), f"format {layout} is"
        raise UserError(
            f"{drafter}: {what if layout else 'there are formats'} for {kinds}, the drafter is of kind {kind}"
        )
    layouts.write(made, load_config(model), out, layout, tokens)


@click.group()
def datastore() -> None:
    """Index texts for the drafter datastore:STORE."""


@datastore.command(cls=Command)
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--model", required=True, metavar="NAME", help="Model whose tokenizer encodes the texts.")
@click.option("--out", "--output", required=True, type=OUT_FOLDER, help="Folder of the store, which must not exist.")
def build(files: Sequence[Path], model: str, out: Path) -> None:
    """Index FILES: texts, or JSON Lines of {"text": ...} or of conversations as of ``mmspec train make-data``.

    Only a part of the texts is held in memory. The store is created atomically.
    """
    from rich.console import Console

    from mmspec.drafters.datastore import build_store
    from mmspec.loading import load_config, load_processor
    from mmspec.progress import show_steps

    processor, config = load_processor(model), load_config(model)
    vocab_size = config.get_text_config().vocab_size
    texts = (text for file in files for text in _texts(file, processor, vocab_size))
    with show_steps(Console(stderr=True)):
        store = build_store(texts, vocab_size, Path(model).name, out)
    size = store.tokens * store.width + store.suffixes * store.place
    click.echo(f"{out}: {store.tokens:,} tokens, {size / 2**20:.1f} MiB; use it as --drafter datastore:{out}")


def _texts(file: Path, processor: Any, vocab_size: int) -> Iterator[Sequence[int]]:
    from mmspec.training.data import turns_of
    from mmspec.validation import check

    if file.suffix == ".jsonl":
        for number, row in read_rows(file):
            where = f"{file}, line {number}"
            if "conversations" not in row:
                row = {"conversations": [{"from": "user", "value": check(f"{where}: text", str, row.get("text"))}]}
            turns = turns_of(row, where)
            if (most := max((max(turn.get("token_ids") or [0]) for turn in turns), default=0)) >= vocab_size:
                raise UserError(f"{where}: token_ids must be < {vocab_size}: got {most}")
            ids = (
                turn.get("token_ids") or processor.text_ids(turn["value"], add_special_tokens=False) for turn in turns
            )
            yield list(chain.from_iterable(ids))
        return
    text = ""
    for _, line in read_lines(file):
        text += line
        if len(text) >= _CHARACTERS:
            yield processor.text_ids(text, add_special_tokens=False)
            text = ""
    yield processor.text_ids(text, add_special_tokens=False)


@click.command(cls=Command)
@model_option
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder to write.")
@click.option("--prompts", type=FILE, help="Answer these: JSON lines with prompt, images, videos.")
@click.option("--recorded", type=FOLDER, multiple=True, help="Or features of `make-data --record`; repeatable.")
@click.option("--contexts", type=click.IntRange(1), help="With --recorded: number of most frequent contexts to keep.")
@click.option("--max-new-tokens", default=200, show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="Of the target, as in `mmspec generate`.")
def recycle(
    model: str,
    out: Path,
    prompts: Path | None,
    recorded: tuple[Path, ...],
    contexts: int | None,
    max_new_tokens: int,
    dtype: str,
) -> None:
    """Fill a recycle drafter's table with a model's top tokens, while it answers prompts or from recorded features."""
    if (prompts is None) == (not recorded):
        received = "both" if recorded else "neither"
        raise UserError(f"expected one of --prompts and --recorded, received {received}")
    if contexts and not recorded:
        raise UserError("--contexts counts occurrences in --recorded: expected both, received no --recorded")
    import torch
    from rich.console import Console

    from mmspec.cli.session import open_pipeline
    from mmspec.drafters.recycle import Recycle
    from mmspec.progress import show_progress
    from mmspec.training.features import recorded_features

    drafter = Recycle()
    console = Console(stderr=True)
    pipe = open_pipeline(console, model, drafter, "auto", dtype)
    if recorded:
        with torch.inference_mode():
            sequences = recorded_features(recorded, pipe.target).sequences()
            drafter.fit(((tokens, pipe.target.head(hidden)) for tokens, hidden in sequences), contexts)
        drafter.save(out, pipe.target)
        click.echo(f"{drafter.entries} contexts: {out}", err=True)
        return
    assert prompts is not None
    requests = []
    for number, request in read_rows(prompts):
        if "prompt" not in request:
            raise UserError(f"{prompts}, line {number}: expected an object with a prompt, received {shown(request)}")
        requests.append(request)
    with show_progress(console, "answering") as show:
        for start in range(0, len(requests), _BATCH):
            show(start, len(requests))
            # Without drafts, every table entry comes from a context of the output.
            part = requests[start : start + _BATCH]
            pipe.generate_batch(part, max_new_tokens=max_new_tokens, temperature=0.0, num_draft_tokens=0)
        show(len(requests), len(requests))
    drafter.save(out, pipe.target)
    click.echo(f"{len(requests)} prompts, {drafter.entries} contexts: {out}", err=True)
