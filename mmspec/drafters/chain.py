"""Chain variants of drafters: one child per node."""

from __future__ import annotations

from typing import Any

from mmspec.core.drafter import Drafter, fork
from mmspec.core.target import Target
from mmspec.errors import UserError

LONGEST_CHAIN = 8
"""Default number of draft tokens of drafters with a ``total_tokens`` setting."""


def as_chain(drafter: Drafter, length: int, target: Target) -> Drafter:
    """A copy of a drafter that drafts chains, one child per node.

    Args:
        length: most draft tokens of drafters with a ``total_tokens`` setting; others follow the budget.

    Raises:
        UserError: the drafter has neither a width nor a top_k.
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
