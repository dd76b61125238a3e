"""``mmspec datastore``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from mmspec.cli.help import Command
from mmspec.cli.options import FILE, OUT_FOLDER
from mmspec.errors import UserError, explained

_CHARACTERS = 1 << 20  # of a text file that are encoded at once


@click.group()
def datastore() -> None:
    """Index texts for the drafter datastore:STORE."""


@datastore.command(cls=Command)
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--model", required=True, metavar="NAME", help="Whose tokenizer encodes the texts.")
@click.option("--out", "--output", required=True, type=OUT_FOLDER, help="Folder of the store, which must not exist.")
def build(files: Sequence[Path], model: str, out: Path) -> None:
    """Index FILES: texts, or JSON Lines of {"text": ...} or of conversations as of `mmspec train make-data`.

    Needs memory for a part of the texts only. The store appears when it is complete.
    """
    from rich.console import Console

    from mmspec.drafters.datastore.build import build_store
    from mmspec.loading import load_config, load_processor
    from mmspec.progress import show_steps

    processor, config = load_processor(model), load_config(model)
    vocab_size = config.get_text_config().vocab_size
    texts = (text for file in files for text in _texts(file, processor))
    with show_steps(Console(stderr=True)):
        store = build_store(texts, vocab_size, Path(model).name, out)
    size = store.tokens * store.width + store.suffixes * store.place
    click.echo(f"{out}: {store.tokens:,} tokens, {size / 2**20:.1f} MiB; use it as --drafter datastore:{out}")


def _texts(file: Path, processor: Any) -> Iterator[Sequence[int]]:
    """Tokens of each text of a file."""
    with explained(f"{file}: expected a text file in UTF-8", OSError, UnicodeDecodeError), file.open() as opened:
        if file.suffix != ".jsonl":
            while lines := opened.readlines(_CHARACTERS):
                yield processor.text_ids("".join(lines), add_special_tokens=False)
            return
        for number, line in enumerate(opened, 1):
            yield _tokens(line, f"{file}, line {number}", processor)


def _tokens(line: str, where: str, processor: Any) -> list[int]:
    """Tokens of a line of JSON Lines; those of answers as recorded, if they are."""
    with explained(f"{where}: expected a JSON object", ValueError, RecursionError):
        content = json.loads(line)
    turns = content.get("conversations", [{"value": content.get("text")}]) if isinstance(content, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{where}: expected an object with text or conversations, received another")
    tokens: list[int] = []
    for turn in turns:
        value, recorded = turn.get("value"), turn.get("token_ids")
        if not isinstance(value, str):
            raise UserError(f"{where}: expected an object with text or conversations, received another")
        tokens += recorded if recorded else processor.text_ids(value, add_special_tokens=False)
    return tokens
