"""`python -m ssm.texts --count N --split heldout --out FILE.jsonl` writes examples as conversations, one a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from mmspec.cli.options import OUT_FILE
from ssm.texts.examples import KINDS, SPLITS, example


@click.command()
@click.option("--count", type=click.IntRange(1), default=1000, show_default=True, help="Examples to write.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Index of the first.")
@click.option("--split", type=click.Choice(SPLITS), default="train", show_default=True, help="Which examples.")
@click.option("--kind", type=click.Choice(list(KINDS)), help="Only this kind; by default a mix.")
@click.option("--out", type=OUT_FILE, required=True, help="File to write.")
def main(count: int, first: int, split: str, kind: str | None, out: Path) -> None:
    """Write generated requests and answers as conversations that `mmspec train make-data --prompts` reads."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        for index in range(first, first + count):
            drawn = example(index, split, kind)
            said = ({"from": "human", "value": drawn.prompt}, {"from": "gpt", "value": drawn.answer})
            file.write(json.dumps({"id": f"{split}-{kind or 'mix'}-{index}", "conversations": said}) + "\n")
    os.replace(part, out)


if __name__ == "__main__":
    main()
