"""Base of the objects in requests.

A field that would change the answer and is not implemented is refused and named, unless it has its neutral value. null
stands for a field's default everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import pydantic_core
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from mmspec.checks import Rule
from mmspec.serving.errors import APIError
from mmspec.serving.mistakes import translated

MOST_ITEMS = 1024
"""Prompts, messages, parts of a message, or tools."""

_MOST_VALUES = 1_000_000  # of a body, with the commas and brackets in its texts


class Fields(BaseModel):
    """Base of the request's objects.

    Attributes:
        neutral: values by field that ask for nothing; such fields are dropped.
        ignored: fields that are dropped.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    ignored: ClassVar[Sequence[str]] = ()

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
