"""Structured output: JSON schemas, regular expressions and Lark grammars, compiled by llguidance for a tokenizer."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmspec.checks import Rule, is_text
from mmspec.errors import UserError
from mmspec.extras import missing

KINDS = ("json_schema", "regex", "grammar")
"""Sampling parameters that constrain the output."""

_LONGEST = 128 * 1024  # bytes of a grammar's text
_STACK = 256 * 1024 * 1024  # bytes: the compiler recurses along chains of rules, by less than 2 KiB per byte of text
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 200_000,  # about 15 ms
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # of 1 to 2 KiB
    "max_grammar_size": 500_000,
}
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # of json.dumps
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # schemas by name
_VALUES = {"const", "enum", "default", "examples"}  # no schemas
_STACK_SIZE = threading.Lock()  # the size for new threads is global

Result = TypeVar("Result")


def _is_schema(value: Any) -> bool:
    try:
        return isinstance(json.loads(value if isinstance(value, str) else json.dumps(value, allow_nan=False)), dict)
    except (ValueError, TypeError, RecursionError):
        return False


JSON_SCHEMA = Rule(
    "None or a JSON schema, as a dict or as text",
    lambda value: value is None or _is_schema(value),
    lambda value: value if value is None or isinstance(value, str) else json.dumps(value),
)
TEXT = Rule("None or text", lambda value: value is None or (is_text(value) and bool(value)))


def check_grammar(kind: str, text: str) -> None:
    """Check a grammar's syntax.

    Args:
        kind: one of ``KINDS``.
        text: the schema, pattern or grammar.

    Raises:
        UserError: it is invalid, uses what llguidance does not support, or is too large; llguidance is not installed.
    """
    library = _library()
    if (size := len(text.encode())) > _LONGEST:
        raise UserError(f"{kind} must have at most {_LONGEST} bytes: got {size}")
    source = _source(kind, text)
    error = _on_large_stack(lambda: library.LLMatcher.validate_grammar(source, limits=_limits()))
    if error and not error.startswith("WARNING"):
        raise _invalid(kind, error)


class Grammars:
    """Compiles grammars for a tokenizer.

    Args:
        tokenizer: of transformers, with a ``tokenizers`` backend.
        eos_token_ids: tokens that end an answer; the only ones allowed at the end of a grammar.

    Raises:
        UserError: the tokenizer has no such backend, there is no EOS token, or llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        _library()
        from llguidance import hf

        if not eos_token_ids:
            raise UserError("structured output needs an end-of-sequence token: the model has none")
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise UserError(
                f"structured output needs a tokenizer of the library tokenizers: got {type(tokenizer).__name__}"
            )
        self._eos = sorted(eos_token_ids)
        self._width = max(len(tokenizer), self._eos[-1] + 1)
        try:
            self._tokenizer = hf.from_tokenizer(tokenizer, n_vocab=self._width, eos_token=self._eos[0])
        except Exception as error:  # of Rust: its types are not exported
            reason = _first_line(str(error))
            raise UserError(f"llguidance cannot read the tokenizer {type(tokenizer).__name__}: {reason}") from error

    def compile(self, kind: str, text: str) -> Grammar:
        """The grammar for this tokenizer.

        Args:
            kind: one of ``KINDS``.
            text: the schema, pattern or grammar.

        Raises:
            UserError: as for ``check_grammar``; no output satisfies the grammar, or the vocabulary cannot spell any.
        """
        library = _library()
        source = _source(kind, text)

        def build() -> Any:
            return _on_large_stack(lambda: library.LLMatcher(self._tokenizer, source, log_level=0, limits=_limits()))

        grammar = Grammar(kind, build, self._eos, self._width)
        grammar.check()
        return grammar


class _State:
    """Matcher of one sequence, and the tokens that it has consumed."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.tokens: list[int] = []


class Grammar:
    """A compiled grammar, as a ``TreeProcessor`` that can also be asked about drafts before they are verified.

    The masks of a sequence depend on its tokens alone. EOS tokens are allowed where the grammar may end, and are never
    consumed.

    Args:
        kind: one of ``KINDS``, for messages.
        build: returns a new matcher of llguidance. A copy would share its lexer, and so the limits on it.
        eos: EOS tokens; matchers know the first one.
        width: size of the tokenizer's vocabulary.
    """

    def __init__(self, kind: str, build: Callable[[], Any], eos: Sequence[int], width: int) -> None:
        self._kind, self._build, self._eos, self._width = kind, build, list(eos), width
        self._unused: Any = None  # of the check

    def check(self) -> None:
        """Raises ``UserError`` if the grammar is invalid, or allows no first token."""
        state = _State(self._build())
        if state.matcher.is_error():
            raise _invalid(self._kind, state.matcher.get_error())
        self.mask(state)
        self._unused = state.matcher

    def start(self, history: list[int]) -> _State:
        matcher, self._unused = self._unused or self._build(), None
        return _State(matcher)

    def advance(self, state: _State, token: int) -> None:
        if token in self._eos:
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
        allowed[self._eos] |= allowed[self._eos[0]].item()
        return allowed

    def forced(self, state: _State) -> list[int]:
        """Tokens that must come next, without EOS tokens."""
        tokens: list[int] = state.matcher.compute_ff_tokens()
        return tokens[: next((place for place, token in enumerate(tokens) if token in self._eos), len(tokens))]

    def allows(self, state: _State, token: int) -> bool:
        """Whether the grammar can go on with a token: not with EOS tokens."""
        return token not in self._eos and state.matcher.validate_tokens([token]) == 1

    def _tried(self, state: _State, call: Callable[[Any], Result | None], otherwise: UserError | None) -> Result:
        """The result of a function of the matcher.

        A matcher that has reached a limit fails for ever, and gets there sooner after many drafts: the function is
        called again with a new one, so that the outcome depends on the tokens alone.

        Raises:
            UserError: both calls failed; ``otherwise`` if the matcher states no reason.
        """
        reason = ""
        for _ in range(2):
            result = call(state.matcher)
            if result is not None and not state.matcher.is_error():
                return result
            reason = state.matcher.get_error()
            self._restore(state)
        after = f"after {len(state.tokens)} tokens of output"
        if not reason and otherwise is not None:
            raise otherwise
        if reason.startswith("NoExtension"):
            raise UserError(f"the {self._kind} allows no token of the model's vocabulary {after}")
        raise UserError(f"the {self._kind} is too complex {after}: {_first_line(reason)}")

    def _restore(self, state: _State) -> None:
        state.matcher = self._build()
        state.matcher.try_consume_tokens(state.tokens)

    def _forbidden(self, state: _State, token: int) -> UserError:
        return UserError(f"the {self._kind} forbids token {token} after {len(state.tokens)} tokens of output")


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise missing("structured output", "llguidance", "structured") from error
    return llguidance


def _limits() -> Any:
    return _library().LLParserLimits(**_LIMITS, verbose_errors=False)


def _source(kind: str, text: str) -> str:
    """llguidance's form of a grammar."""
    make = _library().LLMatcher
    try:
        if kind == "json_schema":
            if "exclusiveMinimum" in text:
                text = json.dumps(_with_closed_bounds(json.loads(text)))
            return str(make.grammar_from_json_schema(text, defaults=_LAYOUT))
        return str(make.grammar_from_regex(text) if kind == "regex" else make.grammar_from_lark(text))
    except (ValueError, RecursionError) as error:  # of JSON that nests too deeply
        raise _invalid(kind, str(error)) from error


def _with_closed_bounds(schema: Any) -> Any:
    """A schema whose positive exclusive minima of numbers are inclusive ones of the next number with 15 decimals.

    A model that writes 1.0 where numbers must exceed 1 is led to 1.0000000000000001, which is read as the double 1.0.
    Other bounds stay as they are: llguidance forbids 0.9 where the greatest number is 0.999, and -4.9 where the least
    one is -4.99.
    """
    if isinstance(schema, list):
        return [_with_closed_bounds(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _with_closed_bounds(one) for name, one in value.items()}
        else:
            found[key] = value if key in _VALUES else _with_closed_bounds(value)
    bound, other = (_number(schema.get(key), default=-math.inf) for key in ("exclusiveMinimum", "minimum"))
    # Doubles beyond 100000 are coarser than 15 decimals.
    if 1e-9 <= bound <= 1e5 and schema.get("type") != "integer":
        above = Decimal(repr(math.nextafter(bound, math.inf))).quantize(Decimal("1e-15"), ROUND_CEILING)
        del found["exclusiveMinimum"]
        found["minimum"] = max(float(above), other)
    return found


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _invalid(kind: str, reason: str) -> UserError:
    expected = {"json_schema": "a JSON schema", "regex": "a regular expression", "grammar": "a Lark grammar"}[kind]
    return UserError(f"{kind} must be {expected} that llguidance can follow: {_first_line(reason)}")


def _first_line(reason: str) -> str:
    """The line of a message that states the error, shortened: others show its place."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["unknown error"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return line if len(line) <= 200 else f"{line[:200]}..."


def _on_large_stack(function: Callable[[], Result]) -> Result:
    """Call a function in a thread with a stack of ``_STACK`` bytes: an overflow would end the process."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="grammar")
    with _STACK_SIZE:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
