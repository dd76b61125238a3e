"""A picture of one real step: ``python -m eval.tree_picture --out docs/tree.svg``.

Captions a held-out scene and draws the step with the longest accepted path: the drafted tree, the path that the target
would have produced, and the bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import click

import mmspec
from eval.speed import held_out_requests
from mmspec import plugins
from mmspec.loading import make_drafter

_COLUMN, _ROW, _BOX = 128, 34, 26


@dataclass
class Observed:
    """One judged tree: tokens, parents, and the nodes and tokens of its accepted path (the bonus token last)."""

    tokens: list[int]
    parents: list[int]
    path: list[int]
    bonus: int


class Watch:
    """A drafter that notes what becomes of another one's trees."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.seen: list[Observed] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def observe(self, tree: Any, verdict: Any, step: Any) -> None:
        path, tokens = verdict.host[0]
        if path:
            self.seen.append(Observed(tree.tokens[0].tolist(), tree.parents[0].tolist(), path, tokens[-1]))
        self._drafter.observe(tree, verdict, step)


def draw(step: Observed, texts: list[str], bonus: str) -> str:
    """The step as SVG; ``texts``: what each node's token reads."""
    depth, row, rows = _layout(step.parents)
    width = (max(depth) + 2) * _COLUMN + 20
    height = rows * _ROW + 70
    accepted = set(step.path)

    def at(node: int) -> tuple[float, float]:
        return 10 + depth[node] * _COLUMN, 46 + row[node] * _ROW

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, Menlo, monospace" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="22" fill="#1f2328">{len(step.tokens) - 1} drafted tokens, one pass of the target, '
        f"{len(step.path)} tokens emitted</text>",
    ]
    for node, parent in enumerate(step.parents):
        if parent >= 0:
            parts.append(_edge(at(parent), at(node), node in accepted))
    end = step.path[-1]
    x, y = at(end)
    # The bonus token goes where no drafted child of the last accepted node is.
    below = [at(n)[1] for n, p in enumerate(step.parents) if p == end]
    target = (x + _COLUMN, max(below, default=y - _ROW) + _ROW)
    parts.append(_edge((x, y), target, True))
    for node, text in enumerate(texts):
        kind = "root" if node == 0 else "kept" if node in accepted else "rejected"
        parts.append(_box(at(node), text, kind))
    parts.append(_box(target, bonus, "bonus"))
    legend = (("root", "last token"), ("kept", "accepted"), ("bonus", "bonus"), ("rejected", "rejected"))
    parts += [_box((10 + i * _COLUMN, height - 20), label, kind) for i, (kind, label) in enumerate(legend)]
    return "\n".join([*parts, "</svg>", ""])


def _layout(parents: list[int]) -> tuple[list[int], list[int], int]:
    """Column and row of every node, rows given to leaves from top to bottom, and the number of rows."""
    depth = [0] * len(parents)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    children = {node: [n for n, p in enumerate(parents) if p == node] for node in range(len(parents))}
    row = [0] * len(parents)
    used = 0

    def place(node: int) -> None:
        nonlocal used
        row[node] = used
        for i, child in enumerate(children[node]):
            used += i > 0
            place(child)

    place(0)
    return depth, row, used + 2


def _edge(start: tuple[float, float], end: tuple[float, float], kept: bool) -> str:
    x, y = start[0] + _COLUMN - 24, start[1]
    colour, stroke = ("#1a7f37", 2.5) if kept else ("#d0d7de", 1.2)
    middle = (x + end[0]) / 2
    return (
        f'<path d="M{x} {y} C{middle} {y} {middle} {end[1]} {end[0]} {end[1]}" fill="none" stroke="{colour}" '
        f'stroke-width="{stroke}"/>'
    )


def _box(at: tuple[float, float], text: str, kind: str) -> str:
    fill, ink = {
        "root": ("#1f2328", "#ffffff"),
        "kept": ("#dafbe1", "#116329"),
        "bonus": ("#ddf4ff", "#0550ae"),
        "rejected": ("#f6f8fa", "#8c959f"),
    }[kind]
    return (
        f'<rect x="{at[0]}" y="{at[1] - _BOX / 2}" width="{_COLUMN - 24}" height="{_BOX}" rx="6" fill="{fill}"/>'
        f'<text x="{at[0] + (_COLUMN - 24) / 2}" y="{at[1] + 4.5}" text-anchor="middle" fill="{ink}">'
        f"{escape(text.strip() or repr(text))}</text>"
    )


@click.command()
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--drafter", default="auto", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--nodes", default=12, show_default=True)
def main(model: str, drafter: str, out: Path, nodes: int) -> None:
    """Draw the best step of a held-out caption as SVG."""
    home = plugins.find("models", model)() if model in plugins.names("models") else model
    watch = Watch(make_drafter(drafter, str(home)))
    pipe = mmspec.load(model, drafter=watch)
    for request in held_out_requests(images=8, videos=0):
        pipe.generate(**request, nodes=nodes)
    step = max(watch.seen, key=lambda seen: len(seen.path))
    decode = pipe.target.tokenizer.decode
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(draw(step, [decode([token]) for token in step.tokens], decode([step.bonus])))


if __name__ == "__main__":
    main()
