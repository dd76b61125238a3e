"""Structured output: checks of JSON schemas, regular expressions and Lark grammars by llguidance, without a tokenizer.

Workers check untrusted grammars, see ``mmspec.workers``: this module must not import torch.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import Any

from mmspec.errors import UserError, missing
from mmspec.workers import Cancellation, WorkerError, Workers

KINDS = ("json_schema", "regex", "grammar")
"""Sampling parameters that constrain the output."""

_LONGEST = 128 * 1024  # maximum bytes of a grammar's text
_STACK = 256 * 1024 * 1024  # bytes: the compiler's recursion along rules takes less than 2 KiB per byte of text
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 200_000,  # about 15 ms
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # 1 to 2 KiB each
    "max_grammar_size": 500_000,
}
FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
"""String formats that llguidance supports."""
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # layout of json.dumps
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # values: schemas by name
_VALUES = {"const", "enum", "default", "examples"}  # values: not schemas
_STACK_SIZE = threading.Lock()  # the size for new threads is global


def trigger_pattern(trigger: str) -> re.Pattern[bytes]:
    """Compile a trigger: ``TEXT``, ``^TEXT`` at the output's beginning, or ``/PATTERN/`` of Python's re."""
    if trigger.startswith("/") and trigger.endswith("/") and len(trigger) > 2:
        return re.compile(trigger[1:-1].encode())
    text = trigger.removeprefix("^")
    return re.compile((b"^" if text != trigger else b"") + re.escape(text.encode()))


class CheckedText(str):
    """Grammar text accepted by ``check_grammar``; sampling parameters do not check it again."""


@lru_cache(64)
def check_grammar(kind: str, text: str) -> CheckedText:
    """Check a grammar by compiling it for a byte tokenizer; returns its text, marked as checked.

    Recently checked valid grammars are cached. Raises ``UserError``: the grammar is invalid, unsupported by llguidance
    or too large; or llguidance is not installed.
    """
    if isinstance(text, CheckedText):
        return text
    tokenizer = library().LLTokenizer("byte")
    check_size(kind, text)
    compiled(kind, tokenizer, source(kind, text))
    return CheckedText(text)


def check_size(kind: str, text: str) -> None:
    """Raise ``UserError`` if a grammar's text is too long."""
    if (size := len(text.encode())) > _LONGEST:
        raise UserError(f"{kind} must have at most {_LONGEST} bytes: got {size}")


def compiled(kind: str, tokenizer: Any, source: str) -> Any:
    """Compile the result of ``source`` to an llguidance matcher.

    The thread that compiles has a stack of ``_STACK`` bytes, as a stack overflow would end the process. Raises
    ``UserError``: the grammar is invalid or too large.
    """
    limits = library().LLParserLimits(**LIMITS, verbose_errors=False)
    with ThreadPoolExecutor(1, thread_name_prefix="grammar") as thread:
        with _STACK_SIZE:
            before = threading.stack_size(_STACK)
            try:
                made = thread.submit(library().LLMatcher, tokenizer, source, log_level=0, limits=limits)
            finally:
                threading.stack_size(before)
        matcher = made.result()
    if matcher.is_error():
        raise invalid(kind, matcher.get_error())
    return matcher


def library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise missing("structured output", "llguidance", "structured") from error
    return llguidance


def source(kind: str, text: str) -> str:
    """Convert a grammar to llguidance's format."""
    make = library().LLMatcher
    try:
        if kind == "json_schema":
            adapted = json.dumps(_adapted(json.loads(text)))
            return str(make.grammar_from_json_schema(adapted, defaults=_LAYOUT))
        return str(make.grammar_from_regex(text) if kind == "regex" else make.grammar_from_lark(text))
    except (ValueError, RecursionError) as error:  # JSON nested too deeply
        raise invalid(kind, str(error)) from error


def json_rule(schema: Mapping[str, Any], *, any_layout: bool = False) -> str:
    """Right-hand side of a Lark rule for JSON of a schema, in the layout of ``json_schema`` or in any layout."""
    layout = {"whitespace_pattern": r"[ \t\n]{0,80}"} if any_layout else _LAYOUT
    return f"%json {json.dumps({**_adapted(schema), 'x-guidance': layout})}"


def _adapted(schema: Any) -> Any:
    """Adapt a schema so that llguidance's matches conform to JSON Schema.

    Titles, descriptions and unknown formats are removed: they are annotations, and llguidance rejects formats such as
    ``password`` and ``byte``. Positive exclusive minima become inclusive minima at the next number with 15 decimals:
    otherwise a model that writes 1.0 for numbers above 1 would be forced to 1.0000000000000001, which parses as the
    double 1.0. Other bounds are kept: llguidance forbids 0.9 with a maximum of 0.999, and -4.9 with a minimum of -4.99.
    """
    if isinstance(schema, list):
        return [_adapted(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _adapted(one) for name, one in value.items()}
        elif key not in ("title", "description") or not isinstance(value, str):
            found[key] = value if key in _VALUES else _adapted(value)
    if isinstance(name := found.get("format"), str) and name not in FORMATS:
        del found["format"]
    if found.get("propertyNames") == {"type": "string"}:  # of records in zod; holds for all objects
        del found["propertyNames"]
    values: list[Any] = [schema.get(key) for key in ("exclusiveMinimum", "minimum")]
    bound, other = (one if type(one) in (int, float) else -math.inf for one in values)
    # Doubles beyond 100000 are coarser than 15 decimals.
    if 1e-9 <= bound <= 1e5 and schema.get("type") != "integer":
        above = Decimal(repr(math.nextafter(bound, math.inf))).quantize(Decimal("1e-15"), ROUND_CEILING)
        del found["exclusiveMinimum"]
        found["minimum"] = max(float(above), other)
    return found


def invalid(kind: str, reason: str) -> UserError:
    expected = {"json_schema": "a JSON schema", "regex": "a regular expression", "grammar": "a Lark grammar"}[kind]
    return UserError(f"{kind} must be {expected} that llguidance can follow: {shortened(reason)}")


def shortened(reason: str) -> str:
    """The line of a message that states the error, shortened; other lines show its place."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["unknown error"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return line if len(line) <= 200 else f"{line[:200]}..."


class GrammarTrial:
    """Pool of worker processes that test whether grammars compile within limits.

    Valid grammars are compiled again in the process that uses them, as compiled grammars cannot be sent between
    processes. Thread-safe. Workers are stopped when the pool is closed or garbage collected.

    Args:
        workers: maximum number of grammars compiled concurrently; further calls block.
        seconds: wall-clock limit per grammar. Not enforced on Windows.
        memory: maximum bytes of data that a worker may allocate. Enforced on Linux only.
    """

    def __init__(self, *, workers: int = 2, seconds: float = 10.0, memory: int = 256 << 20) -> None:
        self.seconds, self.memory = seconds, memory
        self._workers = Workers(__name__, workers=workers, memory=memory + _STACK)
        self.close = self._workers.close

    def check(self, kind: str, text: str, *, stop: Cancellation | None = None) -> CheckedText:
        """Check a grammar in a worker.

        Args:
            kind: ``"json_schema"``, ``"regex"`` or ``"grammar"``.
            text: the schema, pattern or grammar.
            stop: stops the check, from another thread.

        Returns:
            The text, marked as checked for ``SamplingParams``.

        Raises:
            UserError: as for ``check_grammar``; or a limit was exceeded, or the check was stopped.
        """
        check_size(kind, text)
        try:
            self._workers.run({"kind": kind}, text.encode(), self.seconds, lambda *_: None, stop)
        except WorkerError as error:
            raise UserError(f"{kind} {self._describe(error)}") from None
        return CheckedText(text)

    def _describe(self, error: WorkerError) -> str:
        if error.cause == "time":
            return f"must compile within {self.seconds:g} s: got one that takes longer"
        if error.cause == "memory" or error.detail == "SIGABRT":  # Rust aborts if an allocation fails
            return f"must compile in {self.memory >> 20} MiB: got one that needs more"
        if error.cause == "stop":
            return "was not checked to the end: stopped"
        return f"must be one that llguidance can compile: got one on which it fails ({error.detail})"


def handle(request: dict[str, str], body: bytes) -> tuple[dict[str, object], tuple[bytes, ...]]:
    """Check a grammar in a worker process; see ``check_grammar``."""
    check_grammar(request["kind"], body.decode())
    return {}, ()
