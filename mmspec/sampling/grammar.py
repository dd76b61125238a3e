"""Structured output: grammars compiled by llguidance for a tokenizer.

A grammar starts at the beginning of the output, after a trigger text such as a tool-call marker, or after reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from time import perf_counter as clock
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmspec.errors import UserError
from mmspec.sampling.reasoning import Phase, Place, ReasoningParser
from mmspec.sampling.syntax import compiled, library, shortened, source, trigger_pattern

_KEPT = 8  # cached compiled grammars, of up to about 100 MiB each
_QUICK = 0.05  # maximum seconds to recompile a grammar within a decode step
_LONGEST = 1024  # maximum bytes of a pattern's match
_MOST_SPELT = 256  # cached masks

Result = TypeVar("Result")


class BeyondEndError(UserError):
    """The grammar allows only EOS tokens before ``min_new_tokens`` is reached."""

    def __init__(self, kind: str, end: int, least: int) -> None:
        self.kind, self.end, self.least = kind, end, least
        super().__init__(self.message("min_new_tokens", kind))

    def __reduce__(self) -> Any:
        return type(self), (self.kind, self.end, self.least)

    def message(self, name: str, grammar: str) -> str:
        """The message with the caller's names of ``min_new_tokens`` and of the grammar's parameter."""
        return f"{name} must not go beyond the end of {grammar}: expected at most {self.end} here, got {self.least}"


class Grammars:
    """Compiles grammars for a tokenizer.

    Args:
        tokenizer: transformers tokenizer with a ``tokenizers`` backend.
        eos_token_ids: tokens that end an answer; only these are allowed at the end of a grammar.
        text_ids: special tokens that are text in grammars.

    Attributes:
        tokenizer: llguidance's.

    Raises:
        UserError: the tokenizer has no such backend, the model has no EOS token, or llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int], text_ids: Collection[int] = ()) -> None:
        library()
        from llguidance import TokenizerWrapper, hf

        if not eos_token_ids:
            raise UserError("structured output needs an end-of-sequence token: the model has none")
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise UserError(
                f"structured output needs a tokenizer of the library tokenizers: got {type(tokenizer).__name__}"
            )
        self._eos = sorted(eos_token_ids)
        self._width = max(len(tokenizer), self._eos[-1] + 1)
        try:
            self.tokenizer = hf.from_tokenizer(tokenizer, n_vocab=self._width, eos_token=self._eos[0])
            added = getattr(tokenizer, "added_tokens_decoder", {}).items()
            text = {number for number, one in added if not one.special or number in text_ids}
            text = {number for number in text if self.tokenizer.is_special_token(number)}
            if text:
                spelt = TokenizerWrapper(_Spelt(self.tokenizer, text))
                self.tokenizer = library().LLTokenizer(spelt, eos_token=self._eos[0])
        except Exception as error:  # Rust error types are not exported
            reason = shortened(str(error))
            raise UserError(f"llguidance cannot read the tokenizer {type(tokenizer).__name__}: {reason}") from error
        self._lock = Lock()
        self._texts: list[bytes] = []  # bytes of all tokens
        self._spelt: dict[Hashable, Tensor] = {}
        self._entries: dict[tuple[str, str], _Entry] = {}  # LRU cache, most recently used last

    def compile(self, kind: str, text: str) -> Grammar:
        """Compile a grammar for this tokenizer, or return it from the LRU cache of ``_KEPT`` grammars.

        Concurrent calls for one grammar compile it once. Raises ``UserError``: as for ``check_grammar``; or no output
        satisfies the grammar with this vocabulary.
        """
        key = (kind, str(text))
        with self._lock:
            entry = self._entries.pop(key, None) or _Entry()
            self._entries[key] = entry
            while len(self._entries) > _KEPT:
                del self._entries[next(iter(self._entries))]
        with entry.lock:
            if entry.grammar is None or entry.grammar.spent:
                form = source(kind, text)
                grammar = Grammar(kind, lambda: compiled(kind, self.tokenizer, form), self._eos, self._width)
                grammar.mask(grammar.start([]))  # raises if no first token is allowed
                entry.grammar = grammar
            return entry.grammar

    def spelt(
        self, token_bytes: Callable[[int], bytes], key: Hashable, before: bytes, holds: Callable[[bytes], bool]
    ) -> Tensor:
        """(vocab,) bool mask of tokens whose bytes, appended to ``before``, satisfy a condition.

        Args:
            token_bytes: bytes of a token; llguidance lacks tokens with byte FF.
            key: cache key of the condition; masks are cached by ``key`` and ``before``.
        """
        self._texts = self._texts or [token_bytes(token) for token in range(self._width)]
        if (key, before) not in self._spelt:
            if len(self._spelt) >= _MOST_SPELT:
                self._spelt.clear()
            self._spelt[key, before] = torch.tensor([holds(before + text) for text in self._texts], dtype=torch.bool)
        return self._spelt[key, before]


class _Spelt:
    """Tokenizer interface for llguidance that turns some special tokens into ordinary tokens.

    llguidance treats every added token like ``<tool_call>`` as special, and text in a grammar never matches special
    tokens. Qwen's models emit ``<tool_call>`` as this token and could not call tools. ``text``: these tokens.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, text: Container[int]) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id, self._tokenizer = tokenizer.eos_token, tokenizer
        self.tokens = [tokenizer.decode_bytes([one]) for one in ids]
        self.special_token_ids = [one for one in ids if tokenizer.is_special_token(one) and one not in text]

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self._tokenizer.tokenize_bytes(text)
        return ids


@dataclass
class _Entry:
    """Cache entry of a grammar that may still be compiling."""

    lock: Lock = field(default_factory=Lock)
    grammar: Grammar | None = None


@dataclass
class _State:
    """Matcher of one sequence, and its consumed tokens."""

    matcher: Any
    tokens: list[int] = field(default_factory=list)


class Grammar:
    """A compiled grammar as a ``TreeProcessor``, which also checks drafts before verification.

    A sequence's masks depend only on its tokens. EOS tokens are allowed only where the grammar may end, even if they
    are ordinary text such as a line break, as they would cut the output. They are never consumed. Sequences use copies
    of one matcher, which share its lexer and the lexer's limits. After a sequence has reached a lexer limit, the
    grammar is recompiled within the decode step if that is quick, so that results depend only on the tokens.

    Args:
        build: compiles a new llguidance matcher.
        eos: EOS tokens; matchers handle only the first.
        width: size of the tokenizer's vocabulary.

    Attributes:
        spent: whether the lexer has reached a limit, so that later requests need a new lexer.
    """

    def __init__(self, kind: str, build: Callable[[], Any], eos: Sequence[int], width: int) -> None:
        self.kind, self._build, self.eos, self._width = kind, build, list(eos), width
        start = clock()
        self._first = build()
        self._quick = clock() - start <= _QUICK
        self.spent = False

    def start(self, history: list[int]) -> _State:
        return _State(self._first.deep_copy())

    def advance(self, state: _State, token: int) -> None:
        if token in self.eos:
            raise self._forbidden(state, token)
        self._tried(state, lambda matcher: matcher.try_consume_tokens([token]) or None, self._forbidden(state, token))
        state.tokens.append(token)

    def undo(self, state: _State, n: int) -> None:
        del state.tokens[len(state.tokens) - n :]
        if not state.matcher.rollback(n):
            self._restore(state)

    def mask(self, state: _State) -> Tensor:
        bits = np.frombuffer(self._tried(state, lambda matcher: matcher.compute_bitmask(), None), np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, count=self._width, bitorder="little")).view(torch.bool)
        # EOS tokens that are also ordinary text are not allowed as text: each ends the answer.
        allowed[self.eos] = state.matcher.is_accepting()
        if not bool(allowed.any()):
            raise UserError(
                f"the {self.kind} needs an EOS token, which ends an answer, after {len(state.tokens)} tokens of output"
            )
        return allowed

    def only_ends(self, allowed: Tensor) -> bool:
        """Whether a mask allows EOS tokens only."""
        return int(allowed.sum()) == int(allowed[self.eos].sum())

    def forced(self, state: _State) -> list[int]:
        """Tokens that must come next, without EOS tokens."""
        tokens: list[int] = state.matcher.compute_ff_tokens()
        return tokens[: next((place for place, token in enumerate(tokens) if token in self.eos), len(tokens))]

    def allows(self, state: _State, token: int) -> bool:
        """Whether the grammar can continue with a token; False for EOS tokens."""
        return token not in self.eos and state.matcher.validate_tokens([token]) == 1

    def _tried(self, state: _State, call: Callable[[Any], Result | None], otherwise: UserError | None) -> Result:
        """Call a function of the matcher and return its result.

        A matcher that has reached a limit stays in the error state and is replaced in the state. Raises ``UserError``:
        the call failed, if possible also with a new lexer; ``otherwise`` if the matcher gives no reason.
        """
        for again in (True, False):
            result = call(state.matcher)
            if result is not None and not state.matcher.is_error():
                return result
            reason = state.matcher.get_error() or _lexer_error(state.matcher)
            again = again and reason.startswith("lexer error") and self._renew()
            self._restore(state)
            if not again:
                break
        after = f"after {len(state.tokens)} tokens of output"
        if not reason and otherwise is not None:
            raise otherwise
        if reason.startswith("NoExtension"):
            raise UserError(f"the {self.kind} allows no token of the model's vocabulary {after}")
        raise UserError(f"the {self.kind} is too complex {after}: {shortened(reason)}")

    def _renew(self) -> bool:
        """Recompile the grammar if compilation is quick; returns whether it was recompiled."""
        self.spent = not self._quick
        if self._quick:
            self._first = self._build()
        return self._quick

    def _restore(self, state: _State) -> None:
        state.matcher = self._first.deep_copy()
        state.matcher.try_consume_tokens(state.tokens)

    def _forbidden(self, state: _State, token: int) -> UserError:
        return UserError(f"the {self.kind} forbids token {token} after {len(state.tokens)} tokens of output")


class _Deferred:
    """A ``TreeProcessor`` whose grammar starts within the output. ``grammar``: the grammar. Its state is ``inner`` of
    this processor's states, None before the grammar starts."""

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self.kind, self.only_ends, self.eos = grammar.kind, grammar.only_ends, grammar.eos

    def undo(self, state: Any, n: int) -> None:
        self._grammar.undo(state.inner, n)

    def mask(self, state: Any) -> Tensor | None:
        return None if state.inner is None else self._grammar.mask(state.inner)

    def forced(self, state: Any) -> list[int]:
        """Tokens that must come next, without EOS tokens."""
        return [] if state.inner is None else self._grammar.forced(state.inner)

    def allows(self, state: Any, token: int) -> bool:
        """Whether the output can continue with a token; False for EOS tokens."""
        if state.inner is not None:
            return bool(self._grammar.allows(state.inner, token))
        allowed = self.mask(state)
        return token not in self.eos and (allowed is None or bool(allowed[token]))


@dataclass(frozen=True)
class _TriggerState:
    """State of a sequence.

    Attributes:
        text: bytes of the output up to the trigger.
        inner: state of the grammar after its start; changes in place.
        over: whether the output has diverged from the grammar.
    """

    text: bytes = b""
    inner: Any = None
    over: bool = False


class TriggeredGrammar(_Deferred):
    """A ``TreeProcessor`` that applies a grammar only after a trigger, like llama.cpp's lazy grammars.

    The trigger may end within a token. If the grammar rejects the rest of this token, the trigger does not apply.

    Args:
        grammar: grammar of the output after the trigger.
        trigger: as for ``trigger_pattern``; pattern matches longer than ``_LONGEST`` bytes may be missed.
        token: the trigger's token if it is a special token; the same text in other tokens is then not a trigger.
        tokenizer: llguidance's.
    """

    def __init__(self, grammar: Grammar, trigger: str, token: int | None, tokenizer: Any) -> None:
        super().__init__(grammar)
        self._token, self._tokenizer = token, tokenizer
        self._trigger, self._longest = trigger_pattern(trigger), _LONGEST + len(trigger.encode())

    def start(self, history: list[int]) -> _TriggerState:
        return _TriggerState()

    def advance(self, state: _TriggerState, token: int) -> _TriggerState | None:
        if state.inner is not None:
            self._grammar.advance(state.inner, token)
            return None
        if state.over:
            return state
        if self._token is not None:
            return self._begun(b"") if token == self._token else state
        return self.read(state, self._tokenizer.decode_bytes([token]))

    def read(self, state: _TriggerState, more: bytes) -> _TriggerState:
        """The state after more text, ignoring triggers that are special tokens."""
        if self._token is not None:
            return state
        text = state.text + more
        found = self._trigger.search(text, max(0, len(state.text) - self._longest))
        return _TriggerState(text) if found is None else self._begun(text[found.end() :])

    def _begun(self, rest: bytes) -> _TriggerState:
        """The state after the trigger and the rest of its last token."""
        inner = self._grammar.start([])
        try:
            for token in self._tokenizer.tokenize_bytes(rest) if rest else ():
                self._grammar.advance(inner, token)
        except UserError:
            return _TriggerState(over=True)
        return _TriggerState(inner=inner)


@dataclass(frozen=True)
class _ReasoningState:
    """State of a sequence.

    Attributes:
        place: place in the output; while the start of the answer is uncertain, its text includes ``tokens``.
        tokens: tokens that may belong to the answer, to white space before it, or to a marker.
        inner: state of the answer, None while its start is uncertain; may change in place.
    """

    place: Place
    tokens: tuple[int, ...] = ()
    inner: Any = None


class AfterReasoning(_Deferred):
    """A ``TreeProcessor`` that constrains the answer by a grammar and leaves the reasoning before it free.

    Up to ``MOST_BLANKS`` bytes of white space before the answer are allowed, as models write it after reasoning. The
    last token of an end marker must not contain text of the answer, unless the answer starts unconstrained. Headers of
    an answer's channel are treated like white space.

    Args:
        answer: grammar of the answer; with a ``TriggeredGrammar``, the answer starts unconstrained.
        spelt: ``Grammars.spelt`` of the model.
    """

    def __init__(
        self, answer: Grammar | TriggeredGrammar, parser: ReasoningParser, spelt: Callable[..., Tensor]
    ) -> None:
        super().__init__(answer)
        self._parser, self._spelt = parser, partial(spelt, parser.token_bytes)
        self._free = isinstance(answer, TriggeredGrammar)

    def start(self, history: list[int]) -> _ReasoningState:
        return _ReasoningState(self._parser.first)

    def advance(self, state: _ReasoningState, token: int) -> _ReasoningState | None:
        if state.inner is not None:
            after = self._grammar.advance(state.inner, token)
            return None if after is None else replace(state, inner=after)
        tokens, text = (*state.tokens, token), state.place.text + self._parser.token_bytes(token)
        if state.place.phase is Phase.AFTER:
            if self._parser.is_gap(text):
                return _ReasoningState(Place(Phase.AFTER, text), tokens)
            return self._begun(tokens)
        place = self._parser.advance(state.place, token)
        if place.phase is Phase.AFTER and self._free and place.text.strip():
            return _ReasoningState(place, inner=self._grammar.read(self._grammar.start([]), place.text.lstrip()))
        if place.phase is Phase.PLAIN:
            return self._begun(tokens)
        return _ReasoningState(place, tokens if place.phase is Phase.OPEN else ())

    def mask(self, state: _ReasoningState) -> Tensor | None:
        if state.inner is not None or self._free:
            return super().mask(state)
        phase, text, parser = state.place.phase, state.place.text, self._parser
        if phase is Phase.REASONING:
            return self._ending(text)
        opens = phase is Phase.OPEN
        allowed = self._spelt((parser.form, opens), text, parser.opens if opens else parser.is_gap).clone()
        allowed[self.eos] = False
        if opens and not text.strip() and parser.start_id is not None:
            allowed[parser.start_id] = True
        inner = self._after(state.tokens)
        if inner is not None:
            allowed |= self._grammar.mask(inner)
        return allowed

    def _begun(self, tokens: tuple[int, ...]) -> _ReasoningState:
        """The state after the first tokens of an answer."""
        if (inner := self._after(tokens)) is None:
            raise UserError(f"the {self.kind} forbids token {tokens[-1]} at the beginning of the answer")
        return _ReasoningState(Place(Phase.PLAIN), inner=inner)

    def _after(self, tokens: tuple[int, ...]) -> Any:
        """State of the answer after tokens, without white space before it; None if they cannot start an answer."""
        blanks, gap = 0, b""
        while blanks < len(tokens) and self._parser.is_gap(gap := gap + self._parser.token_bytes(tokens[blanks])):
            blanks += 1
        for first in (blanks,) if self._free else range(blanks + 1):
            inner = self._grammar.start([])
            try:
                for token in tokens[first:]:
                    after = self._grammar.advance(inner, token)
                    inner = inner if after is None else after
                return inner
            except UserError:
                pass
        return None

    def _ending(self, text: bytes) -> Tensor | None:
        """The mask within reasoning: the token that ends it must not contain text of the answer."""
        if self._parser.end_id is not None:
            return None
        end = self._parser.form.end.encode()
        begun = next(end[:n] for n in range(len(end) - 1, -1, -1) if text.endswith(end[:n]))
        wrong = self._spelt(end, begun, lambda text: bool(text.partition(end)[2].strip()))
        return ~wrong if bool(wrong.any()) else None


def _lexer_error(matcher: Any) -> str:
    """Error of a lexer that reached a limit in another sequence; the matcher itself rejects tokens without an error."""
    matcher.compute_bitmask()
    reason: str = matcher.get_error()
    return reason if reason.startswith("lexer error") else ""
