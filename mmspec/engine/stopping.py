"""Stopping criteria, checked token by token along the accepted path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from transformers import StoppingCriteria

from mmspec.errors import UserError

FinishReason = Literal["stop", "length"]


class Stopper:
    """Stopping criteria of one request, shared by its rows.

    Args:
        max_new_tokens: maximum new tokens per row.
        context_limit: maximum length of prompt plus output per row; None for no limit.
        eos_token_ids: tokens that end a row, and are emitted.
        stop: strings that end a row as soon as its text contains one; requires ``tokenizer``.
        criteria: transformers' stopping criteria, called with one row's tokens (prompt included), shape (1, length).
        tokenizer: decodes new tokens for ``stop``.

    Raises:
        UserError: stop strings without a tokenizer.
    """

    def __init__(
        self,
        max_new_tokens: int,
        *,
        context_limit: int | None = None,
        eos_token_ids: Iterable[int] = (),
        stop: Sequence[str] = (),
        criteria: Sequence[StoppingCriteria] = (),
        tokenizer: Any = None,
    ) -> None:
        if stop and tokenizer is None:
            raise UserError("stop strings need a tokenizer: none was given")
        self.max_new_tokens = max_new_tokens
        self.context_limit = context_limit
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stop = tuple(stop)
        self.criteria = list(criteria)
        self.tokenizer = tokenizer
        # A token has at least one byte, so this many tokens cover any stop string.
        self._window = max((len(text.encode()) for text in stop), default=0) + 8

    def room(self, prompt_length: int) -> int:
        """Maximum new tokens after a prompt of ``prompt_length`` tokens, padding excluded."""
        if self.context_limit is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.context_limit - prompt_length)

    def append(
        self, history: list[int], prompt_length: int, tokens: list[int]
    ) -> tuple[list[int], FinishReason | None]:
        """Append ``tokens`` to ``history`` up to and including the first one that ends the row.

        Returns:
            The appended tokens, and why the row ended, if it did.
        """
        end = prompt_length + self.room(prompt_length)
        for count, token in enumerate(tokens, start=1):
            history.append(token)
            if token in self.eos_token_ids or self.at_stop_string(history, prompt_length) or self._criterion(history):
                return tokens[:count], "stop"
            if len(history) >= end:
                return tokens[:count], "length"
        return tokens, None

    def at_stop_string(self, history: list[int], prompt_length: int) -> bool:
        """Whether the generated text contains a stop string near its end."""
        if not self.stop:
            return False
        tail = history[max(prompt_length, len(history) - self._window) :]
        text = self.tokenizer.decode(tail)
        return any(stop in text for stop in self.stop)

    def _criterion(self, history: list[int]) -> bool:
        if not self.criteria:
            return False
        ids = torch.tensor([history])
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.criteria)
