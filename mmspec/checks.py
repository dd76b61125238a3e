"""Values that users pass: a field is declared once, with its rule, and checks itself wherever it comes from.

Python, the command line (``mmspec.cli.options.derived``), the server's requests and ``config.json`` of checkpoints
(``Checked.read``) have the same names, limits and messages.
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

_LONGEST = 80  # characters of a value that a message repeats
_CONTENT = re.compile(r"(data:[^,\s]*,)[\w%+/=-]+", re.IGNORECASE)  # of a data URI
_SURROGATE = re.compile("[\ud800-\udfff]")
_SIMILARITY = 0.75  # of names; presence_penalty and repetition_penalty, which differ, have 0.71


class Rule(NamedTuple):
    """A condition on a value.

    Attributes:
        expected: completes "NAME must be ...".
        holds: whether a value is valid; may raise TypeError for values of other types.
        convert: converts valid values for storage, such as numpy's numbers to Python's.
        word: kind of the value on the command line.
        parse: reads it from text; raises ValueError for other texts.
        limits: the range as help shows it.
        choices: all values, if they are few.
        several: a list of values, each an option of its own on the command line.
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
        """The converted value. Raises ``UserError`` with the rule and the value if it is not valid."""
        try:
            holds = self.holds(value)
        except TypeError:
            holds = False
        if not holds:
            raise UserError(f"{name} must be {self.expected}: got {shown(value)}")
        return self.convert(value)


class Checked:
    """Base of frozen dataclasses with fields by ``option`` or ``required``, which the constructor checks.

    Raises:
        UserError: a field violates its rule, or there is none of this name.
    """

    def __new__(cls, *values: Any, **named: Any) -> Self:
        known = [setting.name for setting in fields(cls)]  # type: ignore[arg-type]
        for name in named:
            if name not in known:
                raise UserError(f"unknown field of {cls.__name__}: got {name}{nearest(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for setting in fields(self):  # type: ignore[arg-type]
            if (value := getattr(self, setting.name)) is not setting.default:  # which ``option`` has checked
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
            others: another program's object: fields of other names are ignored, null stands for a field's default.
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
        """Values of the fields with these names, such as those of another class, but for None."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if name in names and value is not None}


def option(default: Any, rule: Rule, text: str = "", **more: Any) -> Any:
    """A dataclass field.

    Args:
        default: its default, or a function that makes one.
        text: help of the option on the command line.
        more: ``default_text``: the default as help shows it; ``declared``: names of the option.
    """
    metadata = {"rule": rule, "text": text, **more}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default if default is MISSING else rule.check("a default", default), metadata=metadata)


def required(rule: Rule, text: str = "", **more: Any) -> Any:
    """A dataclass field without a default; arguments as for ``option``."""
    return option(MISSING, rule, text, **more)


def inherited(kind: type[Checked], name: str, text: str | None = None, **changes: Any) -> Any:
    """A field with the rule of another class's field, and the default and help if no others are given.

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
    """``inherited`` with the default None, which stands for the other class's default."""
    return inherited(kind, name, text, default=None, **changes)


def with_fields_of(kind: type[Checked]) -> Callable[[type[T]], type[T]]:
    """Class decorator below ``dataclass``: adds another class's fields that have a help text, as by
    ``inherited_optional``, but for those that the class has."""

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
    """A whole number, at least ``low`` and at most ``high``."""
    limits = f">= {low}" if high is None else f"in [{low}, {high}]"

    def holds(value: Any) -> bool:
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        return is_whole and low <= value and (high is None or value <= high)

    return Rule(f"a whole number {limits}", holds, int, "integer", int, limits)


def number(expected: str, holds: Callable[[Any], bool]) -> Rule:
    """A finite number for which ``holds``."""

    def finite(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value) and holds(value)

    return Rule(expected, finite, float, "number", float, expected)


def within(low: float, high: float) -> Rule:
    """A number in a closed range."""
    return number(f"a number in [{low:g}, {high:g}]", lambda value: low <= value <= high)


def choice(*names: str) -> Rule:
    """One of a few texts."""
    return Rule(" or ".join(map(repr, names)), lambda value: value in names, choices=names)


def several(rule: Rule) -> Rule:
    """A list of values that a rule allows."""

    def holds(values: Any) -> bool:
        return isinstance(values, list | tuple) and all(map(rule.holds, values))

    return rule._replace(expected=f"a list, each {rule.expected}", holds=holds, convert=tuple, several=True)


def listed(rule: Rule) -> Rule:
    """A list of values, separated by commas on the command line and there without duplicates."""
    expected = f"values separated by commas, each {rule.expected}"
    parse = lambda text: tuple(dict.fromkeys(map(rule.parse, text.split(","))))  # noqa: E731
    return several(rule)._replace(expected=expected, word="list", parse=parse, limits="", several=False)


def optional(rule: Rule) -> Rule:
    """None, or a value that another rule allows."""
    return rule._replace(
        expected=f"None or {rule.expected}",
        holds=lambda value: value is None or rule.holds(value),
        convert=lambda value: None if value is None else rule.convert(value),
    )


def settable(rule: Rule) -> Rule:
    """A value that a rule allows, or None for a field that is not set."""
    return optional(rule)._replace(expected=rule.expected)


def is_text(value: Any) -> bool:
    """Whether a value is a str that UTF-8 can encode: a lone surrogate has no encoding."""
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

# Paths: what they lead to is checked when a command line is read.
FILE, FOLDER, OUT_FOLDER = (
    Rule("a path", lambda value: isinstance(value, Path), word=word) for word in ("file", "folder", "new folder")
)


def is_data_uri(text: str) -> bool:
    """Whether a text is a data URI, as clients of OpenAI's API send images and videos."""
    return text[:5].lower() == "data:"


def data_of(uri: str) -> bytes:
    """Content of a base64 data URI.

    Raises:
        UserError: it has another form, or other characters than base64's.
    """
    head, comma, body = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UserError("a data URI must be data:TYPE;base64,CONTENT: got another form")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"a data URI must contain base64: got {error}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar known name; empty without any."""
    matches = get_close_matches(name, known, 1, _SIMILARITY)
    return f"; did you mean {matches[0]}?" if matches else ""


def shown(value: Any) -> str:
    """A value in one line for messages: its repr, shortened, without the content of data URIs, or its type if it is no
    plain value."""
    if not (value is None or isinstance(value, str | bytes | Real | list | tuple | dict)):
        return type(value).__name__
    try:
        text = _CONTENT.sub(r"\1...", repr(value))
    except RecursionError:
        return type(value).__name__
    return text if len(text) <= _LONGEST else f"{type(value).__name__} {text[:_LONGEST]}..."
