"""Validation by pydantic. Each option is declared once: Python, the command line (``mmspec.cli.options.derived``),
server requests and ``config.json`` share its type, limits and help. Errors are one line.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache, partial, wraps
from itertools import pairwise
from numbers import Integral
from typing import Annotated, Any, TypeVar, dataclass_transform, overload

import pydantic.dataclasses
from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, PydanticUndefined

from mmspec.errors import UserError, nearest, shown

T = TypeVar("T")
M = TypeVar("M")

_CONFIG = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
_PREFIX = "Input should be "
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXPECTED = {  # otherwise pydantic's message
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "int_type": "a whole number",
    "less_than_equal": "<= {le}",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "path_not_directory": "an existing folder",
    "path_not_file": "an existing file",
    "string_type": "text",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
    "tuple_type": "a list",
    "union_tag_invalid": "{expected_tags}",
}


def _plain(value: Any) -> Any:
    """Convert another library's integer, such as numpy's."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def is_text(value: Any) -> bool:
    """Whether a value is a str that UTF-8 can encode, without lone surrogates."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def condition(expected: str, holds: Callable[[Any], bool]) -> PlainValidator:
    """Metadata of ``Annotated``: values for which ``holds`` is true. ``expected`` completes "NAME must be ..."."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError("condition", "{expected}", {"expected": expected})
        return value

    return PlainValidator(check)


Text = Annotated[str, condition("text that UTF-8 can encode", is_text)]
Share = Annotated[float, Field(ge=0, le=1)]
Many = Annotated[tuple[M, ...], Field(strict=False)]
"""A tuple, made of any sequence."""


@overload
def options(cls: type[T]) -> type[T]: ...
@overload
def options(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True)
def options(cls: Any = None, *, kw_only: bool = False) -> Any:
    """Class decorator: a frozen dataclass whose constructor validates its fields, and raises ``UserError``."""
    if cls is None:
        return partial(options, kw_only=kw_only)
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=_CONFIG | {"extra": "forbid"}, kw_only=kw_only)(cls)
    construct, names = made.__init__, [one.name for one in fields(made)]

    @wraps(construct)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        try:
            construct(self, *map(_plain, values), **{name: _plain(value) for name, value in named.items()})
        except ValidationError as error:
            raise UserError(explain(error, cls.__name__, names)[1]) from None

    made.__init__ = checked
    return made


def option(default: Any, text: str = "", *, default_text: str = "", names: tuple[str, ...] = (), **limits: Any) -> Any:
    """A field of ``options``.

    Args:
        default: value or its factory; ``...`` requires a value.
        text: help of the command-line option.
        default_text: default as shown in help.
        names: names of the command-line option.
        limits: as for ``pydantic.Field``.
    """
    value = {"default_factory": default} if callable(default) else {"default": default}
    extra: dict[str, Any] = {"default_text": default_text, "names": names}
    return Field(**value, description=text or None, json_schema_extra=extra, **limits)


def inherited(kind: Any, name: str, text: str = "", *, default: Any = MISSING, **changes: Any) -> Any:
    """A copy of another class's field, except for the given settings, see ``option``; the default None is shown in help
    as the other class's default."""
    known = kind.__pydantic_fields__[name]
    usual, settings = known.get_default(call_default_factory=True), {**(known.json_schema_extra or {}), **changes}
    if default is None and usual not in (None, PydanticUndefined, []):
        settings["default_text"] = settings.get("default_text") or {"True": "on", "False": "off"}.get(
            str(usual), str(usual)
        )
    made = option(usual if default is MISSING else default, text or known.description or "", **settings)
    made.metadata = made.metadata or list(known.metadata)
    return made


def with_fields_of(kind: Any) -> Callable[[type[T]], type[T]]:
    """Class decorator below ``options``: adds missing fields of another class that have a help text, with the default
    None."""

    def add(cls: type[T]) -> type[T]:
        known = {name for base in cls.__mro__ for name in vars(base).get("__annotations__", ())}
        for name, one in kind.__pydantic_fields__.items():
            if one.description and name not in known:
                cls.__annotations__ = {**vars(cls).get("__annotations__", {}), name: one.annotation | None}
                setattr(cls, name, inherited(kind, name, default=None))
        return cls

    return add


def read(kind: Callable[..., T], values: Any, source: str) -> T:
    """Construct ``options`` from an object of a JSON file, called ``source`` in messages. Raises ``UserError``: a field
    is missing, unknown or invalid."""
    if not isinstance(values, Mapping):
        raise UserError(f"{source} must be an object: got {shown(values)}")
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def part(given: Any, names: Collection[str]) -> dict[str, Any]:
    """Values of the named fields of ``options``, without None."""
    return {name: value for name, value in vars(given).items() if name in names and value is not None}


def check(name: str, kind: Any, value: Any, tags: Collection[str] = (), strict: bool = True) -> Any:
    """Validate a value, and return it as a value of the type; ``tags`` as for ``explain``. Unless ``strict``, any
    mapping is a dict and any sequence a list. Raises ``UserError``: the value is not valid."""
    try:
        return _adapter(kind).validate_python(_plain(value), strict=strict)
    except ValidationError as error:
        raise UserError(explain(error, name, root=name, tags=tags)[1]) from None


@lru_cache(256)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=_CONFIG)


def explain(
    error: ValidationError, name: str, names: Sequence[str] = (), tags: Collection[str] = (), root: str = ""
) -> tuple[str, str]:
    """Path of the first invalid field, as ``messages[0].content``, and the error in one line.

    Args:
        name: name of the whole value in messages about it.
        names: fields of the whole value.
        tags: tags of unions in lists: pydantic's locations contain them after the index.
        root: path of the whole value.
    """
    found = error.errors(include_url=False)[0]
    kind, context, received = found["type"], found.get("ctx", {}), found["input"]
    keys = [key for before, key in pairwise((None, *found["loc"])) if not (isinstance(before, int) and key in tags)]
    if names and keys and isinstance(keys[0], int):  # a positional argument
        keys[0] = names[keys[0]] if keys[0] < len(names) else name
    keys += [context["field"]] if "field" in context else ["type"] if kind.startswith("union_tag") else []
    path = (root + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)).removeprefix(".")
    whole, reason = path or name, context.get("error")
    if reason is not None:
        return path, str(reason) if isinstance(reason, UserError) else f"{whole}: {reason}"
    if kind == "unexpected_keyword_argument":
        return path, f"unknown field of {name}: got {path}{nearest(path, names)}"
    if kind == "unsupported":
        return path, f"{path} is not supported{context['reason']}"
    if kind in ("missing", "union_tag_not_found"):
        return path, f"{path} is required"
    message = found["msg"]
    if kind in _EXPECTED:
        limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
        expected = _EXPECTED[kind].format(**limits)
    elif kind == "condition" or message.startswith(_PREFIX):
        expected = message.removeprefix(_PREFIX)
    else:
        return path, f"{whole}: {message}"
    if kind in ("too_short", "too_long"):
        received = len(received)
    elif kind == "union_tag_invalid":
        received = received["type"]
    return path, f"{whole} must be {expected}: got {shown(received)}"


def is_data_uri(text: str) -> bool:
    """Whether a text is a data URI, as clients of OpenAI's API send images and videos."""
    return text[:5].lower() == "data:"


def data_of(uri: str) -> bytes:
    """Content of a base64 data URI. Raises ``UserError``: the URI has another form, or its content is not base64."""
    head, comma, body = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UserError("a data URI must be data:TYPE;base64,CONTENT: got another form")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError:
        raise UserError("a data URI must contain base64: got other content") from None
