"""Checks of values that users pass: one rule per field, one message for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from math import isfinite
from numbers import Integral, Real
from typing import Any, Self

from mmspec.errors import UserError

_LONGEST = 80  # characters of a value that a message repeats
_SIMILARITY = 0.75  # of names; presence_penalty and repetition_penalty, which differ, have 0.71


@dataclass(frozen=True)
class Rule:
    """A condition on a value.

    Attributes:
        expected: completes "NAME must be ...".
        holds: whether a value is valid; may raise TypeError for values of other types.
        convert: converts valid values for storage, such as numpy's numbers to Python's.
    """

    expected: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value

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
    """Base of frozen dataclasses with fields by ``option``, which the constructor checks.

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
            value = setting.metadata["rule"].check(setting.name, getattr(self, setting.name))
            object.__setattr__(self, setting.name, value)


def option(default: Any, rule: Rule) -> Any:
    """A dataclass field with a default and a rule."""
    return field(default=default, metadata={"rule": rule})


def whole(low: int, high: int | None = None) -> Rule:
    """A whole number, at least ``low`` and at most ``high``."""
    limits = f">= {low}" if high is None else f"in [{low}, {high}]"

    def holds(value: Any) -> bool:
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        return is_whole and low <= value and (high is None or value <= high)

    return Rule(f"a whole number {limits}", holds, int)


def number(expected: str, holds: Callable[[Any], bool]) -> Rule:
    """A finite number for which ``holds``."""

    def finite(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value) and holds(value)

    return Rule(expected, finite, float)


def optional(rule: Rule) -> Rule:
    """None, or a value that another rule allows."""
    return Rule(
        f"None or {rule.expected}",
        lambda value: value is None or rule.holds(value),
        lambda value: None if value is None else rule.convert(value),
    )


def settable(rule: Rule) -> Rule:
    """A value that a rule allows, or None for a field that is not set."""
    return replace(optional(rule), expected=rule.expected)


def is_text(value: Any) -> bool:
    """Whether a value is a str that UTF-8 can encode: a lone surrogate has no encoding."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar known name; empty without any."""
    matches = get_close_matches(name, known, 1, _SIMILARITY)
    return f"; did you mean {matches[0]}?" if matches else ""


def shown(value: Any) -> str:
    """A value in one line for messages: its repr, shortened, or its type if it is no plain value."""
    if not (value is None or isinstance(value, str | bytes | Real | list | tuple | dict)):
        return type(value).__name__
    try:
        text = repr(value)
    except RecursionError:
        return type(value).__name__
    return text if len(text) <= _LONGEST else f"{type(value).__name__} {text[:_LONGEST]}..."
