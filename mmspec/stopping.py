"""When a row is finished: checked token by token along the accepted path, so that nothing after the stop is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from transformers import StoppingCriteria

from mmspec.errors import UserError

FinishReason = Literal["stop", "length"]


class Stopper:
    """The stopping rules of one request, shared by its rows.

    Args:
        max_new_tokens: emit at most this many tokens per row.
        eos_token_ids: tokens that end a row; the token itself is kept.
        stop: strings that end a row as soon as the text contains one; they need ``tokenizer``.
        criteria: transformers' stopping criteria, called with one row's tokens (prompt included), shape (1, length).
        tokenizer: turns new tokens into text for ``stop``.

    Raises:
        UserError: ``max_new_tokens`` below 1, an empty stop string, or stop strings without a tokenizer.
    """

    def __init__(
        self,
        max_new_tokens: int,
        *,
        eos_token_ids: Iterable[int] = (),
        stop: Sequence[str] = (),
        criteria: Sequence[StoppingCriteria] = (),
        tokenizer: Any = None,
    ) -> None:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1: got {max_new_tokens}")
        if any(not text for text in stop):
            raise UserError("stop strings must not be empty")
        if stop and tokenizer is None:
            raise UserError("stop strings need a tokenizer: none was given")
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stop = tuple(stop)
        self.criteria = list(criteria)
        self.tokenizer = tokenizer
        # A token carries at least one byte, so a stop string lies within this many tokens of the end.
        self._window = max((len(text.encode()) for text in stop), default=0) + 8

    def keep(self, history: list[int], prompt_length: int, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """The part of ``tokens`` up to and including the first one that ends the row, and why it ended.

        Appends what is kept to ``history`` (the row's prompt and emitted tokens).
        """
        for count, token in enumerate(tokens, start=1):
            history.append(token)
            if token in self.eos_token_ids or self.at_stop_string(history, prompt_length) or self._criterion(history):
                return tokens[:count], "stop"
            if len(history) - prompt_length >= self.max_new_tokens:
                return tokens[:count], "length"
        return tokens, None

    def at_stop_string(self, history: list[int], prompt_length: int) -> bool:
        """Whether what was generated contains a stop string near its end."""
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
