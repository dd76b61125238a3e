"""Grammars that begin after a text in the output, such as the marker of a tool call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmspec.errors import UserError
from mmspec.sampling.grammar import Grammar

AT_START = "^"
"""First character of a trigger that counts at the beginning of the output only."""


@dataclass(frozen=True)
class _State:
    """State of a sequence.

    Attributes:
        tail: last bytes of the output, in which the trigger may have begun.
        inner: state of the grammar, once it has begun; changes in place.
        over: the trigger cannot come any more, or the output has gone on otherwise than the grammar.
    """

    tail: bytes = b""
    inner: Any = None
    over: bool = False


class TriggeredGrammar:
    """A grammar as a ``TreeProcessor`` that allows all tokens up to its trigger: llama.cpp's lazy grammars.

    The trigger may end within a token, whose rest the grammar must accept: otherwise it does not apply.

    Args:
        grammar: of the output after the trigger.
        trigger: a text; with ``AT_START`` before it, it counts at the beginning of the output only.
        token: its token, if it is a special one: the same text of other tokens is then no trigger.
        tokenizer: llguidance's.
    """

    def __init__(self, grammar: Grammar, trigger: str, token: int | None, tokenizer: Any) -> None:
        self._grammar, self._token, self._tokenizer = grammar, token, tokenizer
        self.kind, self.only_ends = grammar.kind, grammar.only_ends
        self._at_start = trigger.startswith(AT_START)
        self._trigger = trigger.removeprefix(AT_START).encode()

    def start(self, history: list[int]) -> _State:
        return _State()

    def advance(self, state: _State, token: int) -> _State | None:
        if state.inner is not None:
            self._grammar.advance(state.inner, token)
            return None
        if state.over:
            return state
        if self._token is not None:
            return self._begun(b"") if token == self._token else state
        text = state.tail + self._tokenizer.decode_bytes([token])
        at = text.find(self._trigger)
        if at >= 0 and not (at and self._at_start):
            return self._begun(text[at + len(self._trigger) :])
        if self._at_start:
            return _State(text, over=not self._trigger.startswith(text))
        return _State(text[max(0, len(text) - len(self._trigger) + 1) :])

    def undo(self, state: _State, n: int) -> None:
        self._grammar.undo(state.inner, n)

    def mask(self, state: _State) -> Tensor | None:
        return None if state.inner is None else self._grammar.mask(state.inner)

    def forced(self, state: _State) -> list[int]:
        """Tokens that must come next, without EOS tokens."""
        return [] if state.inner is None else self._grammar.forced(state.inner)

    def allows(self, state: _State, token: int) -> bool:
        """Whether an output can go on with a token: not with EOS tokens, which end it."""
        return token not in self._grammar.eos if state.inner is None else self._grammar.allows(state.inner, token)

    def _begun(self, rest: bytes) -> _State:
        """The state after the trigger and the rest of the token that has completed it."""
        inner = self._grammar.start([])
        try:
            for token in self._tokenizer.tokenize_bytes(rest) if rest else ():
                self._grammar.advance(inner, token)
        except UserError:
            return _State(over=True)
        return _State(inner=inner)
