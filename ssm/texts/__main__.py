"""Write examples as conversations: `python -m mmspec.ssm.texts --count N --split heldout --out FILE.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mmspec.cli.options import OUT_FILE
from mmspec.files import atomic
from mmspec.ssm.texts.examples import KINDS, SPLITS, example


@click.command()
@click.option("--count", type=click.IntRange(1), default=1000, show_default=True, help="Number of examples.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Index of the first example.")
@click.option("--split", type=click.Choice(SPLITS), default="train", show_default=True, help="Split of the examples.")
@click.option("--kind", type=click.Choice(list(KINDS)), help="Kind of the examples; by default a mix.")
@click.option("--out", type=OUT_FILE, required=True, help="File to write.")
def main(count: int, first: int, split: str, kind: str | None, out: Path) -> None:
    """Write generated examples as conversations, an input of `mmspec train make-data --prompts`."""
    with atomic(out) as part, part.open("w", encoding="utf-8") as file:
        for index in range(first, first + count):
            item = example(index, split, kind)
            turns = ({"from": "human", "value": item.prompt}, {"from": "gpt", "value": item.answer})
            file.write(json.dumps({"id": f"{split}-{kind or 'mix'}-{index}", "conversations": turns}) + "\n")


if __name__ == "__main__":
    main()
