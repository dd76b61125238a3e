"""Drafters as measurements handle them: named on the command line, observed."""

from __future__ import annotations

import re
from pathlib import Path
from time import perf_counter as clock
from typing import Any

from torch import Tensor, nn

from mmspec.budget import Budget
from mmspec.drafter import Drafter, fork
from mmspec.errors import UserError
from mmspec.loading import make_drafter
from mmspec.target import Prompt, Step, Target
from mmspec.tree import TokenTree
from mmspec.verify import Verdict

USUAL_NODES = 16
"""Drafted nodes per step where a drafter has no size of its own."""


def named_drafters(specs: str, home: str = "") -> dict[str, Drafter]:
    """Drafters by label.

    Args:
        specs: ``SPEC`` or ``LABEL=SPEC``, separated by commas; a spec is a name or a folder, as for ``mmspec.load``, or
            ``new:NAME``, the drafter of that name without what the target's folder holds for it.
        home: the target's folder or name.

    Raises:
        UserError: no or an unknown drafter, or a label that stands twice.
    """
    found: dict[str, Drafter] = {}
    for part in filter(None, (part.strip() for part in specs.split(","))):
        named = re.fullmatch(r"([^=/]+)=(.+)", part)
        label, spec = named.groups() if named else (Path(part).name if "/" in part else part, part)
        if label in found:
            raise UserError(f"every drafter needs a label of its own (LABEL=SPEC): {label!r} stands twice")
        drafter = make_drafter(spec.removeprefix("new:"), "" if spec.startswith("new:") else home)
        if drafter is None:
            raise UserError("plain decoding is always measured: expected a drafter, received none")
        found[label] = drafter
    if not found:
        raise UserError(f"expected at least one drafter, received {specs!r}")
    return found


def tree_sizes(drafter: Drafter, nodes: str) -> dict[str, int]:
    """Drafted nodes per step, by how they were asked for.

    Args:
        nodes: sizes separated by commas; ``default`` is the drafter's own ``total_tokens``, else ``USUAL_NODES``.

    Raises:
        UserError: anything else.
    """
    sizes = {}
    for part in filter(None, (part.strip() for part in nodes.split(","))):
        if part != "default" and not (part.isdecimal() and int(part) > 0):
            raise UserError(f"nodes must be 'default' or a whole number above 0: got {part!r}")
        sizes[part] = getattr(drafter, "total_tokens", USUAL_NODES) if part == "default" else int(part)
    if not sizes:
        raise UserError(f"expected at least one tree size, received {nodes!r}")
    return sizes


def chain(drafter: Drafter, length: int, target: Target) -> Drafter:
    """A copy that drafts one child per node, ``length`` tokens at most if it has a network of its own kind; else as
    many as the budget allows.

    Raises:
        UserError: it is not known how to make it draft chains.
    """
    copied: Any = fork(drafter, target)
    if hasattr(copied, "width"):
        copied.width = 1
    elif hasattr(copied, "top_k"):
        copied.top_k = 1
    else:
        raise UserError(f"chains need a drafter with a width or top_k: {type(drafter).__name__} has neither")
    if hasattr(copied, "total_tokens"):
        copied.depth = copied.total_tokens = length
    return copied


class Watched:
    """A drafter that notes what it does.

    Args:
        drafter: the drafter; it is asked everything.
        count_forwards: count the passes of its network too, which costs a little time.

    Attributes:
        proposals, seconds: trees drafted, and the time that took; what precedes the first tree is left out.
        forwards: passes of ``drafter.network`` while drafting trees; None where it has none, or they are not counted.
    """

    def __init__(self, drafter: Drafter, count_forwards: bool = False) -> None:
        self.drafter = drafter
        self.proposals = 0
        self.seconds = 0.0
        network = getattr(drafter, "network", None)
        self._network = network if count_forwards and isinstance(network, nn.Module) else None
        self.forwards = None if self._network is None else 0

    def attach(self, target: Target) -> None:
        self.drafter.attach(target)

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        self.drafter.begin(prompt, step, history)

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        handle = None if self._network is None else self._network.register_forward_hook(self._count)
        start = clock()
        try:
            return self.drafter.propose(token, budget)
        finally:
            self.seconds += clock() - start
            self.proposals += 1
            if handle is not None:
                handle.remove()

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        self.drafter.observe(tree, verdict, step)

    def _count(self, *_: Any) -> None:
        self.forwards = (self.forwards or 0) + 1
