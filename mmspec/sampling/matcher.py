"""Per-sequence state of a tree processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.errors import UserError
from mmspec.ops.transfer import on_device
from mmspec.sampling.grammar import BeyondEndError


class Matcher:
    """Runs a tree processor on one sequence and its drafted trees.

    Args:
        processor: shared with other sequences.
        prompt: prompt tokens of the sequence.
        least: number of new tokens before which a grammar must not have come to its end.
    """

    def __init__(self, processor: Any, prompt: Sequence[int], least: int = 0) -> None:
        self._processor = processor
        self._name = type(processor).__name__
        self._state = processor.start(list(prompt))
        self._first, self._least = len(prompt), least
        self._length = len(prompt)  # tokens in the state, without drafts
        self._drafts: list[int] = []  # in the state, after these tokens
        self._before: list[tuple[Any, ...]] = []  # of each draft: (previous state,), or () if changed in place
        self._to_undo = 0  # pending undo of in-place tokens
        self._masks: dict[int, Tensor] = {}  # by node of the last tree
        self._children: list[dict[int, int]] = []

    def walk(
        self, history: Sequence[int], children: list[dict[int, int]], vocab: int
    ) -> tuple[dict[int, Tensor], dict[int, Exception]]:
        """Masks of allowed tokens by node, and exceptions by node where the processor failed.

        Subtrees of forbidden and failed nodes are skipped.

        Args:
            history: all tokens of the sequence, up to the root.
            children: ``{token: node}`` by node.

        Raises:
            Exception: the processor failed on tokens emitted since the last walk.
        """
        self._follow(history)
        masks: dict[int, Tensor] = {}
        failures: dict[int, Exception] = {}
        waiting: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        while waiting:
            node, path = waiting.pop()
            try:
                self._go(path)
                masks[node] = self._mask(vocab)
            except Exception as error:
                failures[node] = error
                continue
            for token, child in reversed(children[node].items()):
                if _allows(masks[node], token):
                    waiting.append((child, (*path, token)))
                else:
                    failures[child] = self._forbidden(token)
        self._go(())
        self._settle()
        self._masks, self._children = masks, children
        return masks, failures

    def at(self, history: Sequence[int], path: Sequence[int]) -> Any:
        """State after the drafts ``path`` that follow ``history``; valid until the next call."""
        self._follow(history)
        self._go(path)
        self._settle()
        return self._state

    def allowed(self, history: Sequence[int], path: Sequence[int], vocab: int) -> Tensor:
        """(vocab,) bool on the CPU, allowed tokens after the drafts ``path`` that follow ``history``."""
        self.at(history, path)
        return self._mask(vocab)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits processor interface of plain decoding: ``input_ids`` (1, length) int64, ``scores`` (1, vocab)."""
        masks, failures = self.walk(input_ids[0].tolist(), [{}], scores.shape[-1])
        if failures:
            raise failures[0]
        return scores.masked_fill(~on_device(masks[0], scores.device), -torch.inf)

    def _follow(self, history: Sequence[int]) -> None:
        """Advance the state by the tokens emitted since the last call."""
        if len(history) == self._length:
            return
        node: int | None = 0
        for token in history[self._length :]:
            if node in self._masks:
                if not _allows(self._masks[node], token):
                    raise self._forbidden(token)
                node = self._children[node].get(token)
        self._go(history[self._length :])
        self._drafts, self._before, self._length = [], [], len(history)
        self._masks, self._children = {}, []

    def _go(self, path: Sequence[int]) -> None:
        """Move the state to other drafts: undo back to the common prefix, then advance."""
        common = 0
        for drafted, token in zip(self._drafts, path, strict=False):
            if drafted != token:
                break
            common += 1
        while len(self._drafts) > common:
            self._back()
        for token in path[common:]:
            self._advance(token)

    def _advance(self, token: int) -> None:
        self._settle()
        after = self._processor.advance(self._state, token)
        self._drafts.append(token)
        self._before.append(() if after is None else (self._state,))
        if after is not None:
            self._state = after

    def _back(self) -> None:
        """Undo the last draft: restore the previous state, or defer an in-place undo until the state is used."""
        self._drafts.pop()
        if before := self._before.pop():
            self._state, self._to_undo = before[0], 0
        else:
            self._to_undo += 1

    def _settle(self) -> None:
        if self._to_undo:
            self._processor.undo(self._state, self._to_undo)
            self._to_undo = 0

    def _mask(self, vocab: int) -> Tensor:
        self._settle()
        allowed = self._processor.mask(self._state)
        if allowed is None:
            return torch.ones(vocab, dtype=torch.bool)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or allowed.ndim != 1 or len(allowed) > vocab:
            shape = f"{allowed.dtype} {tuple(allowed.shape)}" if isinstance(allowed, Tensor) else type(allowed).__name__
            raise UserError(f"{self._name}.mask must return a bool tensor of at most ({vocab},): got {shape}")
        if not allowed.any():
            raise UserError(f"{self._name}.mask must allow at least one token: got none")
        new = self._length + len(self._drafts) - self._first
        if new < self._least and self._processor.only_ends(allowed):
            raise BeyondEndError(self._processor.kind, new, self._least)
        mask = torch.zeros(vocab, dtype=torch.bool)  # a copy: a processor may reuse its tensor
        mask[: len(allowed)] = allowed
        return mask

    def _forbidden(self, token: int) -> UserError:
        return UserError(f"{self._name} forbids token {token}, the only one allowed by other logits processors")


def _allows(mask: Tensor, token: int) -> bool:
    return token < len(mask) and bool(mask[token])
