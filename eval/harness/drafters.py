"""Drafters given on the command line, and a profiling wrapper."""

from __future__ import annotations

import os
import re
from pathlib import Path
from time import perf_counter as clock

from torch import Tensor

from mmspec.core.drafter import Drafter, Wrapper
from mmspec.core.plan import StepPlan
from mmspec.core.tree import TokenTree
from mmspec.drafters.registry import make_drafter, split
from mmspec.errors import UserError

DEFAULT_NODES = 16
"""Draft tokens per step of drafters without a tree size of their own."""


def parse_drafters(specs: str, home: str = "") -> dict[str, Drafter]:
    """Load the drafters of a ``--drafters`` option, by label.

    Args:
        specs: ``SPEC`` or ``LABEL=SPEC``, separated by commas. A spec is a name or a folder, as for ``mmspec.load``, or
            ``new:NAME``, which ignores the checkpoint in the target's folder.
        home: the target's folder or name.

    Raises:
        UserError: an unknown drafter, none at all, or a duplicate label.
    """
    drafters: dict[str, Drafter] = {}
    for part in filter(None, (part.strip() for part in split(specs, ","))):
        labelled = None if os.path.exists(part) else re.fullmatch(r"([^=/]+)=(.+)", part)
        label, spec = labelled.groups() if labelled else (Path(part).name if "/" in part else part, part)
        if label in drafters:
            raise UserError(f"every drafter needs its own label (LABEL=SPEC): {label!r} is given twice")
        drafter = make_drafter(spec, home)
        if drafter is None:
            raise UserError("plain decoding is always measured: expected a drafter, received none")
        drafters[label] = drafter
    if not drafters:
        raise UserError(f"expected at least one drafter, received {specs!r}")
    return drafters


def tree_sizes(drafter: Drafter, nodes: str) -> dict[str, int]:
    """Draft tokens per step for each entry of a ``--nodes`` option.

    Args:
        nodes: sizes separated by commas; ``default`` is the drafter's ``tree_size``, else ``DEFAULT_NODES``.

    Raises:
        UserError: anything else.
    """
    sizes = {}
    for part in filter(None, (part.strip() for part in nodes.split(","))):
        if part != "default" and not (part.isdecimal() and int(part) > 0):
            raise UserError(f"nodes must be 'default' or a whole number above 0: got {part!r}")
        sizes[part] = (drafter.tree_size or DEFAULT_NODES) if part == "default" else int(part)
    if not sizes:
        raise UserError(f"expected at least one tree size, received {nodes!r}")
    return sizes


class ProfiledDrafter(Wrapper):
    """A drafter wrapper that counts and times ``propose``.

    Attributes:
        proposals, seconds: drafted trees and the time they took, ``begin`` left out.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.proposals = 0
        self.seconds = 0.0

    @property
    def learns(self) -> bool:
        return self.drafter.learns

    @property
    def drafts_ahead(self) -> bool:
        return self.drafter.drafts_ahead

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        start = clock()
        try:
            return self.drafter.propose(token, plan)
        finally:
            self.seconds += clock() - start
            self.proposals += 1
