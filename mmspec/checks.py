"""Validation of user input: each field is declared once, with a rule that applies to all sources.

Python, the command line (``mmspec.cli.options.derived``), server requests and checkpoints' ``config.json``
(``Checked.read``) share names, limits and messages.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from mmspec.errors import UserError

T = TypeVar("T")

_LONGEST = 80  # maximum characters of a value in a message
_CONTENT = re.compile(r"(data:[^,\s]*,)[\w%+/=-]+", re.IGNORECASE)  # content of a data URI
_SURROGATE = re.compile("[\ud800-\udfff]")
_SIMILARITY = 0.75  # of similar names; presence_penalty and repetition_penalty must not match and have 0.71


class Rule(NamedTuple):
    """A condition on a value.

    Attributes:
        expected: completes "NAME must be ...".
        holds: whether a value is valid; may raise TypeError for values of other types.
        convert: converts valid values for storage, such as numpy's numbers to Python's.
        word: kind of the value on the command line.
        parse: parses a value from text; raises ValueError for invalid text.
        limits: the range as shown in help.
        choices: all valid values, for an enumeration.
        several: whether the value is a list, given as a repeated option on the command line.
    """

    expected: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    word: str = "text"
    parse: Callable[[str], Any] = str
    limits: str = ""
    choices: tuple[str, ...] = ()
    several: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Return the converted value. Raises ``UserError`` with rule and value if the value is not valid."""
        try:
            holds = self.holds(value)
        except TypeError:
            holds = False
        if not holds:
            raise UserError(f"{name} must be {self.expected}: got {shown(value)}")
        return self.convert(value)


class Checked:
    """Base of frozen dataclasses whose constructor validates fields made by ``option`` or ``required``.

    Raises:
        UserError: a value violates its field's rule, or the field is unknown.
    """

    def __new__(cls, *values: Any, **named: Any) -> Self:
        known = [setting.name for setting in fields(cls)]  # type: ignore[arg-type]
        for name in named:
            if name not in known:
                raise UserError(f"unknown field of {cls.__name__}: got {name}{nearest(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for setting in fields(self):  # type: ignore[arg-type]
            if (value := getattr(self, setting.name)) is not setting.default:  # defaults were checked by ``option``
                object.__setattr__(self, setting.name, setting.metadata["rule"].check(setting.name, value))

    @classmethod
    def rule(cls, name: str) -> Rule:
        """The rule of a field."""
        return cls.__dataclass_fields__[name].metadata["rule"]  # type: ignore[attr-defined]

    @classmethod
    def read(cls, values: Any, source: str, others: bool = False) -> Self:
        """Construct from an object of a JSON file; missing and unknown fields are errors.

        Args:
            source: name of the object in error messages.
            others: the object is another program's: ignore unknown fields, and use a field's default for null.
        """
        if not isinstance(values, Mapping):
            raise UserError(f"{source}: expected an object with fields, received {shown(values)}")
        known = {one.name: one for one in fields(cls)}  # type: ignore[arg-type]
        if others:
            values = {name: value for name, value in values.items() if name in known and value is not None}
        if missing := [name for name, one in known.items() if is_required(one) and name not in values]:
            raise UserError(f"{source}: expected {missing[0]}, received none")
        if unknown := sorted(values.keys() - known.keys()):
            raise UserError(f"{source}: expected {', '.join(known)}, received {shown(unknown[0])}")
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{source}: {error}") from None

    def part(self, names: Collection[str]) -> dict[str, Any]:
        """Values of the named fields, without None."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if name in names and value is not None}


def option(default: Any, rule: Rule, text: str = "", **more: Any) -> Any:
    """A dataclass field.

    Args:
        default: default value, or a factory of it.
        text: help of the option on the command line.
        more: ``default_text``: the default as shown in help; ``declared``: names of the option.
    """
    metadata = {"rule": rule, "text": text, **more}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default if default is MISSING else rule.check("a default", default), metadata=metadata)


def required(rule: Rule, text: str = "", **more: Any) -> Any:
    """A dataclass field without a default; arguments as for ``option``."""
    return option(MISSING, rule, text, **more)


def inherited(kind: type[Checked], name: str, text: str | None = None, **changes: Any) -> Any:
    """A field with the rule, and unless given, the default and help of another class's field.

    Args:
        changes: as for ``option``; the default None allows None.
    """
    known = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    about = {"default": known.default, **known.metadata, **changes}
    about |= {} if text is None else {"text": text}
    if about["default"] is None:
        about["rule"] = settable(about["rule"])
        usual = "" if known.default in (None, MISSING) else str(known.default)
        about.setdefault("default_text", {"True": "on", "False": "off"}.get(usual, usual))
    return option(**about)


def inherited_optional(kind: type[Checked], name: str, text: str | None = None, **changes: Any) -> Any:
    """``inherited`` with None as default, for which the other class's default is used."""
    return inherited(kind, name, text, default=None, **changes)


def with_fields_of(kind: type[Checked]) -> Callable[[type[T]], type[T]]:
    """Class decorator below ``dataclass``: adds missing fields of another class that have a help text, by
    ``inherited_optional``."""

    def add(cls: type[T]) -> type[T]:
        known = {name for base in cls.__mro__ for name in vars(base).get("__annotations__", ())}
        for one in fields(kind):  # type: ignore[arg-type]
            if one.metadata["text"] and one.name not in known:
                cls.__annotations__ = {**vars(cls).get("__annotations__", {}), one.name: f"{one.type} | None"}
                setattr(cls, one.name, inherited_optional(kind, one.name))
        return cls

    return add


def is_required(one: Field[Any]) -> bool:
    """Whether a dataclass field has no default."""
    return one.default is MISSING and one.default_factory is MISSING


def whole(low: int, high: int | None = None) -> Rule:
    """Rule for an integer from ``low`` to ``high``."""
    limits = f">= {low}" if high is None else f"in [{low}, {high}]"

    def holds(value: Any) -> bool:
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        return is_whole and low <= value and (high is None or value <= high)

    return Rule(f"a whole number {limits}", holds, int, "integer", int, limits)


def number(expected: str, holds: Callable[[Any], bool]) -> Rule:
    """Rule for a finite number for which ``holds`` is true."""

    def finite(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value) and holds(value)

    return Rule(expected, finite, float, "number", float, expected)


def within(low: float, high: float) -> Rule:
    """Rule for a number in a closed range."""
    return number(f"a number in [{low:g}, {high:g}]", lambda value: low <= value <= high)


def choice(*names: str) -> Rule:
    """Rule for one of the given texts."""
    return Rule(" or ".join(map(repr, names)), lambda value: value in names, choices=names)


def several(rule: Rule) -> Rule:
    """Rule for a list of values, each valid under ``rule``."""

    def holds(values: Any) -> bool:
        return isinstance(values, list | tuple) and all(map(rule.holds, values))

    return rule._replace(expected=f"a list, each {rule.expected}", holds=holds, convert=tuple, several=True)


def listed(rule: Rule) -> Rule:
    """Rule for a list, comma-separated on the command line, where duplicates are dropped."""
    expected = f"values separated by commas, each {rule.expected}"
    parse = lambda text: tuple(dict.fromkeys(map(rule.parse, text.split(","))))  # noqa: E731
    return several(rule)._replace(expected=expected, word="list", parse=parse, limits="", several=False)


def optional(rule: Rule) -> Rule:
    """Rule for None or a value valid under ``rule``."""
    return rule._replace(
        expected=f"None or {rule.expected}",
        holds=lambda value: value is None or rule.holds(value),
        convert=lambda value: None if value is None else rule.convert(value),
    )


def settable(rule: Rule) -> Rule:
    """Rule for a value valid under ``rule``; None means that the field is not set."""
    return optional(rule)._replace(expected=rule.expected)


def is_text(value: Any) -> bool:
    """Whether a value is a str that UTF-8 can encode, without lone surrogates."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(one, kind) and not isinstance(one, bool) for one in values)


FLAG = Rule("True or False", lambda value: isinstance(value, bool), word="flag")
TEXT = Rule("text", is_text)
TEXTS = Rule("a list of one text or more", lambda value: _is_list_of(str, value) and bool(value))
OBJECT = Rule("an object", lambda value: isinstance(value, dict), word="json", parse=json.loads)
NUMBERS = Rule(
    "a list of whole numbers, as 2,16,29 on the command line",
    lambda value: _is_list_of(int, value),
    word="n,n,...",
    parse=lambda text: [int(one) for one in text.split(",")],
)
POSITIVE = number("> 0", lambda value: value > 0)
NOT_NEGATIVE = number(">= 0", lambda value: value >= 0)
SHARE = number("in [0, 1]", lambda value: 0 <= value <= 1)

# Paths: whether they exist is checked by the command line.
FILE, FOLDER, OUT_FOLDER = (
    Rule("a path", lambda value: isinstance(value, Path), word=word) for word in ("file", "folder", "new folder")
)


def is_data_uri(text: str) -> bool:
    """Whether a text is a data URI, as clients of OpenAI's API send images and videos."""
    return text[:5].lower() == "data:"


def data_of(uri: str) -> bytes:
    """Content of a base64 data URI.

    Raises:
        UserError: the URI has another form, or its content is not base64.
    """
    head, comma, body = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UserError("a data URI must be data:TYPE;base64,CONTENT: got another form")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"a data URI must contain base64: got {error}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Suffix of a message about an unknown name that suggests the most similar known name; empty without one."""
    matches = get_close_matches(name, known, 1, _SIMILARITY)
    return f"; did you mean {matches[0]}?" if matches else ""


def shown(value: Any) -> str:
    """Format a value in one line for messages: its shortened repr, without the content of data URIs, or the type of an
    object that is not a plain value."""
    if not (value is None or isinstance(value, str | bytes | Real | list | tuple | dict)):
        return type(value).__name__
    try:
        text = _CONTENT.sub(r"\1...", repr(value))
    except RecursionError:
        return type(value).__name__
    return text if len(text) <= _LONGEST else f"{type(value).__name__} {text[:_LONGEST]}..."
