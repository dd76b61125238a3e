"""Checks of values that users pass: one rule per field, one message for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import isfinite
from numbers import Integral, Real
from typing import Any

from mmspec.errors import UserError

_LONGEST = 80  # characters of a value that a message repeats


@dataclass(frozen=True)
class Rule:
    """What a value must be.

    Attributes:
        expected: completes "NAME must be ...".
        holds: whether a value obeys; one of another type may raise TypeError.
    """

    expected: str
    holds: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        """Raise ``UserError``, naming the rule and the value, unless the value obeys."""
        try:
            holds = self.holds(value)
        except TypeError:
            holds = False
        if not holds:
            raise UserError(f"{name} must be {self.expected}: got {shown(value)}")


class Checked:
    """Base of dataclasses whose fields are made by ``option``: every field is checked when an object is made.

    Raises:
        UserError: a field breaks its rule.
    """

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            one.metadata["rule"].check(one.name, getattr(self, one.name))


def option(default: Any, rule: Rule) -> Any:
    """A dataclass field with a default and a rule."""
    return field(default=default, metadata={"rule": rule})


def whole(low: int, high: int | None = None) -> Rule:
    """A whole number, at least ``low`` and at most ``high``."""
    limits = f">= {low}" if high is None else f"in [{low}, {high}]"
    return Rule(
        f"a whole number {limits}", lambda value: is_whole(value) and low <= value and (high is None or value <= high)
    )


def number(expected: str, holds: Callable[[Any], bool]) -> Rule:
    """A finite number for which ``holds``."""
    return Rule(expected, lambda value: _is_number(value) and isfinite(value) and holds(value))


def optional(rule: Rule) -> Rule:
    """None, or what another rule wants."""
    return Rule(f"None or {rule.expected}", lambda value: value is None or rule.holds(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_text(value: Any) -> bool:
    """Whether a value is a str that UTF-8 can encode: a lone surrogate has no encoding."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def shown(value: Any) -> str:
    """A value in one short line: its repr, or only its type where that would be long."""
    if not (value is None or isinstance(value, str | bytes | Real | list | tuple | dict)):
        return type(value).__name__
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{type(value).__name__} {text[:_LONGEST]}..."
