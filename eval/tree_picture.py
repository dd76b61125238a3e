"""A picture of one real decode step: ``python -m mmspec.eval tree_picture --out docs/tree.svg``.

Captions held-out scenes and draws the most instructive step: many accepted and many rejected draft tokens, and narrow
enough to read.
"""

from __future__ import annotations

from pathlib import Path

import click

import mmspec
from mmspec.cli.options import OUT_FILE
from mmspec.engine.picture import draw_tree
from mmspec.engine.trace import JudgedTree
from mmspec.eval.harness.output import BenchmarkCommand
from mmspec.eval.harness.prompts import held_out_requests
from mmspec.files import write_text

_MAX_DEPTH = 6  # deeper trees are too wide to read


@click.command(cls=BenchmarkCommand)
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--drafter", default="auto", show_default=True)
@click.option("--out", type=OUT_FILE, required=True)
@click.option("--nodes", default=12, show_default=True)
def main(model: str, drafter: str, out: Path, nodes: int) -> None:
    """Draw the most instructive step of held-out captions as SVG."""
    pipe = mmspec.load(model, drafter)
    seen: list[JudgedTree] = []
    for request in held_out_requests(images=8, videos=0):
        trees = pipe.generate(**request, nodes=nodes, temperature=0.0, trace=True).trees
        ends = set(pipe.io.tokenizer.all_special_ids)
        seen += [tree for tree in trees if ends.isdisjoint([*tree.tokens, tree.bonus])]
    step = max(seen, key=_instructiveness)
    write_text(out, draw_tree(step, pipe.io.tokenizer.decode))


def _instructiveness(tree: JudgedTree) -> tuple[bool, int, int]:
    """Sort key: readable trees first, then by the smaller of accepted and rejected draft tokens."""
    depth = [0]
    for parent in tree.parents[1:]:
        depth.append(depth[parent] + 1)
    accepted, rejected = len(tree.path) - 1, len(tree.tokens) - len(tree.path)
    return max(depth) <= _MAX_DEPTH, min(accepted, rejected), accepted


if __name__ == "__main__":
    main()
