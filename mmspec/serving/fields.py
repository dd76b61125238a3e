"""Base of the objects in requests, and mistakes in their fields: rule, what was expected, what was received.

A field that would change the answer and is not implemented is refused and named, with the reason where it is one of
OpenAI's, unless it has its neutral value. null stands for a field's default everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar, get_args

import pydantic_core
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from mmspec.checks import Rule, nearest, shown
from mmspec.errors import UserError
from mmspec.serving.errors import APIError

MOST_ITEMS = 1024
"""Prompts, messages, parts of a message, or tools."""

_MOST_VALUES = 1_000_000  # of a body, with the commas and brackets in its texts


class Fields(BaseModel):
    """Base of the request's objects.

    Attributes:
        neutral: values by field that ask for nothing; such fields are dropped.
        ignored: fields that are dropped.
        refused: why fields of OpenAI's schema are not supported.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    ignored: ClassVar[Sequence[str]] = ()
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None and name not in cls.ignored and value not in cls.neutral.get(name, ())
        }


def checked(name: str, rule: Rule) -> AfterValidator:
    """Checks a field as the Python API does, with its message."""
    return AfterValidator(partial(rule.check, name))


F = TypeVar("F", bound=Fields)


def parse(kind: type[F], body: bytes) -> F:
    """Parse a request's body. A large one takes long: call it in a thread.

    Raises:
        APIError: it is no JSON, or a field is missing, unknown, of another type or out of range; the first such field
            is named. All threads wait while millions of values are parsed: it has too many of them.
    """
    if (found := sum(body.count(mark) for mark in (b",", b"[", b"{"))) > _MOST_VALUES:
        raise APIError(400, f"a request's body must have at most {_MOST_VALUES} values: got about {found}")
    try:
        given = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(400, f"the body must be JSON: {error}") from None
    return validated(kind, given)


def validated(kind: type[F], given: Any) -> F:
    """A request's fields.

    Raises:
        APIError: see ``parse``.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        message, param = translated(error.errors(include_url=False)[0], given, kind)
        raise APIError(400, message, param) from None


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


def translated(error: Any, given: Any, kind: type[Fields]) -> tuple[str, str | None]:
    """The message for one of pydantic's errors, and the path of the field, as ``messages[0].content``.

    Args:
        error: one of ``ValidationError.errors()``.
    """
    what, context = error["type"], error.get("ctx", {})
    keys = _fields(given, error["loc"], kind, what == "missing")
    path = _path(keys)
    if what.startswith("union_tag"):
        path = f"{path}.{context['discriminator'].strip(chr(39))}"
    if what in ("missing", "union_tag_not_found"):
        return f"{path} is required", path
    if what == "extra_forbidden":
        field, owners = str(keys[-1]), _owners(kind, keys[:-1])
        got = f"expected it to be left out, got {shown(error['input'])}"
        if reason := next((owner.refused[field] for owner in owners if field in owner.refused), None):
            return f"{path} is not supported, {reason}: {got}", path
        return (
            f"{path} is not supported: {got}{nearest(field, [one for owner in owners for one in _names(owner)])}",
            path,
        )
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


def _fields(given: Any, location: Sequence[str | int], kind: type[Fields], missing: bool) -> list[str | int]:
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


def _owners(kind: type[Fields], keys: Sequence[str | int]) -> list[type[Fields]]:
    """The classes that the object at a path may have."""
    owners = [kind]
    for key in keys:
        fields = [owner.model_fields[key] for owner in owners if isinstance(key, str) and key in owner.model_fields]
        # Places in lists are no fields.
        owners = [found for field in fields for found in _models(field.annotation)] or owners
    return owners


def _models(annotation: Any) -> Iterator[type[Fields]]:
    """The classes in a type, such as ``list[A | B]``."""
    if isinstance(annotation, type) and issubclass(annotation, Fields):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _names(kind: type[Fields]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]
