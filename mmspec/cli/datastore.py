"""``mmspec datastore``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import FILE, OUT_FOLDER
from mmspec.errors import UserError, shown
from mmspec.files import read_lines, read_rows

_CHARACTERS = 1 << 20  # characters of a text file to encode at once


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
    """Tokens of each text of a file."""
    if file.suffix == ".jsonl":
        for number, row in read_rows(file):
            yield _tokens(row, f"{file}, line {number}", processor, vocab_size)
        return
    lines, size = [], 0
    for _, line in read_lines(file):
        lines.append(line)
        size += len(line)
        if size >= _CHARACTERS:
            yield processor.text_ids("".join(lines), add_special_tokens=False)
            lines, size = [], 0
    yield processor.text_ids("".join(lines), add_special_tokens=False)


def _tokens(row: dict[str, Any], where: str, processor: Any, vocab_size: int) -> list[int]:
    """Tokens of a JSON Lines row, with recorded token ids of answers if present."""
    turns = row.get("conversations", [{"value": row.get("text")}])
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{where}: expected an object with text or conversations, received another")
    tokens: list[int] = []

    def are_tokens(given: Any) -> bool:
        return isinstance(given, list) and all(type(one) is int and 0 <= one < vocab_size for one in given)

    for turn in turns:
        value, recorded = turn.get("value"), turn.get("token_ids")
        if not isinstance(value, str):
            raise UserError(f"{where}: expected an object with text or conversations, received another")
        if not (recorded is None or are_tokens(recorded)):
            raise UserError(f"{where}: expected token_ids in [0, {vocab_size - 1}], received {shown(recorded)}")
        tokens += recorded or processor.text_ids(value, add_special_tokens=False)
    return tokens
