"""A picture of one real step: ``python -m eval.tree_picture --out docs/tree.svg``.

Captions held-out scenes and draws the step that shows most: many drafts accepted, many rejected, narrow enough to read.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

import mmspec
from eval.harness.prompts import held_out_requests
from mmspec import plugins
from mmspec.cli.options import OUT_FILE
from mmspec.errors import UserError
from mmspec.loading import make_drafter
from mmspec.picture import draw_tree
from mmspec.trace import JudgedTree, Traced

_DEEPEST = 6  # drafts in a row; more would make a page's width unreadable


@click.command()
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--drafter", default="auto", show_default=True)
@click.option("--out", type=OUT_FILE, required=True)
@click.option("--nodes", default=12, show_default=True)
def main(model: str, drafter: str, out: Path, nodes: int) -> None:
    """Draw the most telling step of held-out captions as SVG."""
    home = plugins.find("models", model)() if model in plugins.names("models") else model
    made = make_drafter(drafter, str(home))
    if made is None:
        raise UserError("a picture needs drafts: expected a drafter, received none")
    traced = Traced(made)
    pipe = mmspec.load(model, drafter=traced)
    seen: list[JudgedTree] = []
    for request in held_out_requests(images=8, videos=0):
        pipe.generate(**request, nodes=nodes)
        ends = set(pipe.target.tokenizer.all_special_ids)
        seen += [tree for tree in traced.rows[0] if ends.isdisjoint([*tree.tokens, tree.bonus])]
    step = max(seen, key=_telling)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(draw_tree(step, pipe.target.tokenizer.decode))
    os.replace(part, out)


def _telling(tree: JudgedTree) -> tuple[bool, int, int]:
    depth = [0]
    for parent in tree.parents[1:]:
        depth.append(depth[parent] + 1)
    accepted, rejected = len(tree.path) - 1, len(tree.tokens) - len(tree.path)
    return max(depth) <= _DEEPEST, min(accepted, rejected), accepted


if __name__ == "__main__":
    main()
