"""SVG of one decode step: drafted tree, accepted path and bonus token."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from mmspec.engine.trace import JudgedTree

_COLUMN, _WIDE, _ROW, _BOX, _LONGEST = 108, 88, 34, 26, 10

STYLE = """
.mm-tree { font: 13px ui-monospace, Menlo, Consolas, monospace; --ground: #ffffff; --ink: #1f2328; --edge: #d0d7de;
  --root: #1f2328; --root-ink: #ffffff; --kept: #dafbe1; --kept-ink: #116329; --path: #1a7f37; --bonus: #ddf4ff;
  --bonus-ink: #0550ae; --rejected: #f6f8fa; --rejected-ink: #818b98; }
.dark .mm-tree { --ground: transparent; --ink: #d1d7e0; --edge: #3d444d; --root: #d1d7e0; --root-ink: #15191f;
  --kept: #133a20; --kept-ink: #7ee787; --path: #3fb950; --bonus: #12324f; --bonus-ink: #79c0ff; --rejected: #1f242c;
  --rejected-ink: #7d8590; }
.mm-tree .ground { fill: var(--ground); } .mm-tree .caption { fill: var(--ink); }
.mm-tree path { fill: none; stroke: var(--edge); stroke-width: 1.2; }
.mm-tree path.kept { stroke: var(--path); stroke-width: 2.5; }
.mm-tree g text { text-anchor: middle; }
.mm-tree .root rect { fill: var(--root); } .mm-tree .root text { fill: var(--root-ink); }
.mm-tree .kept rect { fill: var(--kept); stroke: var(--path); stroke-width: 1.5; }
.mm-tree .kept text { fill: var(--kept-ink); font-weight: 600; }
.mm-tree .bonus rect { fill: var(--bonus); stroke: var(--bonus-ink); stroke-dasharray: 4 3; }
.mm-tree .bonus text { fill: var(--bonus-ink); font-weight: 600; }
.mm-tree .rejected rect { fill: var(--rejected); } .mm-tree .rejected text { fill: var(--rejected-ink); }
"""
"""CSS; dark colours inside an element of class ``dark``."""

_KINDS = {"root": "last token", "kept": "accepted", "bonus": "bonus", "rejected": "rejected"}


def draw_tree(step: JudgedTree, decode: Callable[[list[int]], str]) -> str:
    """Draw a step as SVG.

    Args:
        step: the tree and its verdict.
        decode: decodes tokens to text.
    """
    depth, row, rows = _layout(step.parents)
    width, height = (max(depth) + 2) * _COLUMN + 20, rows * _ROW + 70
    accepted = set(step.path)

    def at(node: int) -> tuple[float, float]:
        return 10 + depth[node] * _COLUMN, 46 + row[node] * _ROW

    drafted = len(step.tokens) - 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mm-tree" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        f'<text class="caption" x="10" y="22">{_count(drafted, "drafted token")}, one pass of the target, '
        f"{_count(len(step.path), 'token')} emitted</text>",
    ]
    for node, parent in enumerate(step.parents):
        if parent >= 0:
            parts.append(_edge(at(parent), at(node), node in accepted))
    end = step.path[-1]
    x, y = at(end)
    # The bonus token goes below the drafted children of the last accepted node.
    below = [at(n)[1] for n, p in enumerate(step.parents) if p == end]
    target = (x + _COLUMN, max(below, default=y - _ROW) + _ROW)
    parts.append(_edge((x, y), target, True))
    for node, token in enumerate(step.tokens):
        kind = "root" if node == 0 else "kept" if node in accepted else "rejected"
        parts.append(_box(at(node), decode([token]), kind, _tooltip(step, node, kind)))
    parts.append(_box(target, decode([step.bonus]), "bonus", f"bonus token: target {_share(step.bonus_prob)}"))
    for place, (kind, label) in enumerate(_KINDS.items()):
        parts.append(_box((10 + place * _COLUMN, height - 20), label, kind))
    return "\n".join([*parts, "</svg>", ""])


def _tooltip(step: JudgedTree, node: int, kind: str) -> str:
    """Tooltip of a node."""
    if node == 0:
        return "last token of the text so far"
    guess = f"drafter {_share(step.guesses[node])}, " if step.guesses is not None else ""
    return f"{_KINDS[kind]}: {guess}target {_share(step.probs[node])}"


def _share(probability: float) -> str:
    return f"{probability:.1%}" if 0.001 <= probability <= 0.999 else "< 0.1%" if probability < 0.5 else "> 99.9%"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _layout(parents: list[int]) -> tuple[list[int], list[int], int]:
    """Column and row of every node, and the number of rows; leaves are laid out from top to bottom."""
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
    x, y = start[0] + _WIDE, start[1]
    middle = (x + end[0]) / 2
    shape = f"M{x} {y} C{middle} {y} {middle} {end[1]} {end[0]} {end[1]}"
    return f'<path class="{"kept" if kept else "left"}" d="{shape}"/>'


def _box(at: tuple[float, float], text: str, kind: str, tooltip: str = "") -> str:
    shown = text.strip() or repr(text)
    short = shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
    title = f"<title>{escape(f'{shown!r}: {tooltip}' if tooltip else shown)}</title>"
    return (
        f'<g class="{kind}">{title}<rect x="{at[0]}" y="{at[1] - _BOX / 2}" width="{_WIDE}" height="{_BOX}" '
        f'rx="6"/><text x="{at[0] + _WIDE / 2}" y="{at[1] + 4.5}">{escape(short)}</text></g>'
    )
