"""Dataclasses that validate the type and range of their fields on construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple, Self, get_args, get_type_hints

from mmspec.errors import UserError

_KINDS: dict[Any, tuple[type | tuple[type, ...], str]] = {
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    bool: (bool, "true or false"),
    str: (str, "a string"),
    list[str]: (list, "a list of one string or more"),
    list[int]: (list, "a list of integers"),
    dict: (dict, "an object"),
}


class Within(NamedTuple):
    """Closed range of a number, as in ``Annotated[int, Within(1, 64)]``."""

    least: float
    most: float


@dataclass(frozen=True)
class Checked:
    """Base of validated dataclasses. Field types are those in ``_KINDS``, optionally annotated, or ``Checked`` classes.

    Raises:
        UserError: a value has the wrong type or is out of range.
    """

    def __post_init__(self) -> None:
        for name, (kind, limits) in _hints(type(self)).items():
            value = getattr(self, name)
            if kind in _KINDS and (rule := _broken(kind, limits, value)):
                raise UserError(f"{name} must be {rule}: got {_shown(value)}")

    @classmethod
    def read(cls, values: Any, source: str) -> Self:
        """Construct from a parsed JSON object; missing and unknown fields are errors.

        Args:
            source: name of the file in error messages.
        """
        if not isinstance(values, Mapping):
            raise UserError(f"{source}: expected an object with fields, received {_shown(values)}")
        hints = _hints(cls)
        required = [each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING]
        if missing := [name for name in required if name not in values]:
            raise UserError(f"{source}: expected {missing[0]}, received none")
        if unknown := sorted(values.keys() - hints.keys()):
            raise UserError(f"{source}: expected {', '.join(hints)}, received {_shown(unknown[0])}")
        arguments = dict(values)
        for name, (kind, _) in hints.items():
            if kind not in _KINDS:
                arguments[name] = kind.read(arguments[name], f"{source}: {name}")
        try:
            return cls(**arguments)
        except UserError as error:
            raise UserError(f"{source}: {error}") from None


def _hints(kind: type[Checked]) -> dict[str, tuple[Any, Within | None]]:
    """Type and range of each field."""
    hints = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        plain, *limits = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        hints[name] = plain, next(iter(limits), None)
    return hints


def _broken(kind: Any, limits: Within | None, value: Any) -> str | None:
    """The rule that a value violates, or None."""
    types, rule = _KINDS[kind]
    right = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
    if right and kind == list[str]:
        right = bool(value) and all(isinstance(item, str) for item in value)
    if right and kind == list[int]:
        right = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    if limits:
        rule = f"{rule} from {limits.least:g} to {limits.most:g}"
        right = right and limits.least <= value <= limits.most  # never true of nan
    return None if right else rule


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
