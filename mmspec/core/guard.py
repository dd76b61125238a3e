"""Drafters that fail: their errors never reach a request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.core.budget import Budget
from mmspec.core.drafter import Drafter, Wrapper
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.errors import first_line
from mmspec.ops import kernels

_log = logging.getLogger("mmspec.drafting")
_REPORTED: set[tuple[str, type[Exception]]] = set()  # drafters and errors, of this process


class Guard(Wrapper):
    """Decode plainly after an error of a drafter, instead of ending the requests that it drafts for.

    A drafter that raises in a step, or proposes a tree of another shape, loses its rows and rests until the sequences
    that are running have ended, those included that join them meanwhile. Then it is tried again. If it cannot drop its
    rows, it rests for good. Each drafter's errors are logged once per type and process. Errors of a CUDA device are
    raised: nothing can be computed after them.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._failure = ""
        self._broken = False  # it cannot drop its rows

    @property
    def rests(self) -> bool:
        return bool(self._failure)

    def failure(self, row: int) -> str:
        return self._failure or self.drafter.failure(row)

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self._call("begin", prompt, output, history)

    def select(self, rows: Sequence[int]) -> None:
        self._call("select", rows)
        if not rows and not self._broken:
            self._failure = ""

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        return self._call("propose", token, budget) or TokenTree.root(token)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        self._call("observe", tree, verdict, output)

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        return self._call("continuations", row, path) or ()

    def _call(self, method: str, *arguments: Any) -> Any:
        """What a method returns; None while the drafter rests, or if it fails."""
        if self.rests:
            return None
        try:
            result = getattr(self.drafter, method)(*arguments)
            if method == "propose":
                _check(result, arguments[0])
            elif method == "continuations":
                result = [(int(token), float(p)) for token, p in result]
            return result
        except Exception as error:
            if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
                raise
            self._rest(error)
            return None

    def _rest(self, error: Exception) -> None:
        name = "+".join(type(member.key).__name__ for member in self.members)
        self._failure = f"{name}: {type(error).__name__}: {first_line(error)}"
        if (name, type(error)) not in _REPORTED:
            _REPORTED.add((name, type(error)))
            _log.warning("drafting stopped for the running requests, which go on without: %s", self._failure)
        _log.debug("a drafter failed", exc_info=error)
        try:
            self.drafter.select([])
        except Exception:
            self._broken = True


def _check(tree: Any, token: Tensor) -> None:
    """Raise ``TypeError`` or ``ValueError`` if something is not a tree for these roots, (batch,)."""
    if not isinstance(tree, TokenTree):
        raise TypeError(f"expected a TokenTree, received {type(tree).__name__}")
    if tree.batch != len(token) or tree.tokens.dtype != torch.long or tree.tokens.device != token.device:
        received = f"{tree.batch} of {tree.tokens.dtype} on {tree.tokens.device}"
        raise ValueError(f"expected {len(token)} trees of int64 tokens on {token.device}, received {received}")
    tree.check_shapes()
    if tree.nodes > 1 and not kernels.static_shapes(token.device):  # a host sync; a root alone is replaced
        tree.check_values()
