"""Mistakes in a request's fields in our own words: rule, what was expected, what was received."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from mmspec.checks import nearest, shown
from mmspec.errors import UserError

_EXPECTED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "string_type": lambda _: "text",
    "int_type": lambda _: "a whole number",
    "bool_type": lambda _: "true or false",
    "list_type": lambda _: "a list",
    "dict_type": lambda _: "an object",
    "model_type": lambda _: "an object",
    "model_attributes_type": lambda _: "an object",
    "literal_error": lambda context: context["expected"],
    "union_tag_invalid": lambda context: context["expected_tags"],
    "too_short": lambda context: f"a list of at least {context['min_length']}",
    "too_long": lambda context: f"a list of at most {context['max_length']}",
    "greater_than_equal": lambda context: f">= {context['ge']}",
}
"""What a field must be, by pydantic's type of the error and its context."""


def translated(error: Any, given: Any, kind: type[BaseModel]) -> tuple[str, str | None]:
    """The message for one of pydantic's errors, and the path of the field, as ``messages[0].content``.

    Args:
        error: one of ``ValidationError.errors()``.
        given: the request.
        kind: the request's class.
    """
    what, context = error["type"], error.get("ctx", {})
    keys = _fields(given, error["loc"], kind, what == "missing")
    path = _path(keys)
    if what.startswith("union_tag"):
        path = f"{path}.{context['discriminator'].strip(chr(39))}"
    if what in ("missing", "union_tag_not_found"):
        return f"{path} is required", path
    if what == "extra_forbidden":
        known = [name for owner in _owners(kind, keys[:-1]) for name in _names(owner)]
        hint = nearest(str(keys[-1]), known)
        return f"{path} is not supported: expected it to be left out, got {shown(error['input'])}{hint}", path
    name, received = path or "the body", error["input"]
    if what == "value_error" and isinstance(context["error"], UserError):
        return str(context["error"]), path
    if what == "value_error":  # of our validators
        return f"{name}: {context['error']}", path or None
    if what == "union_tag_invalid":
        received = received["type"]
    got = f"{len(received)}" if what in ("too_short", "too_long") else shown(received)
    expected = _EXPECTED[what](context) if what in _EXPECTED else "valid"
    return f"{name} must be {expected}: got {got}", path or None


def _fields(given: Any, location: Sequence[str | int], kind: type[BaseModel], missing: bool) -> list[str | int]:
    """The keys of pydantic's location that are in the request, without the names of union members (types of parts)."""
    keys: list[str | int] = []
    for place, key in enumerate(location):
        tagged = place and isinstance(location[place - 1], int) and len(_owners(kind, keys)) > 1
        if tagged and isinstance(given, dict) and given.get("type") == key:
            continue
        inside = key in given if isinstance(given, dict) else isinstance(given, list) and isinstance(key, int)
        if inside:
            given = given[key]
        if inside or (missing and place == len(location) - 1):
            keys.append(key)
    return keys


def _path(keys: Sequence[str | int]) -> str:
    """Keys as ``messages[0].content``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _owners(kind: type[BaseModel], keys: Sequence[str | int]) -> list[type[BaseModel]]:
    """The classes that the object at a path may have."""
    owners = [kind]
    for key in keys:
        fields = [owner.model_fields[key] for owner in owners if isinstance(key, str) and key in owner.model_fields]
        # Places in lists are no fields.
        owners = [found for field in fields for found in _models(field.annotation)] or owners
    return owners


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The classes in a type, such as ``list[A | B]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _names(kind: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]
