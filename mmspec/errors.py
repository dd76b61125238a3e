"""``UserError``, conversion of other errors to it, and errors for missing optional packages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Real
from os import PathLike, fspath
from typing import Any

Attempt = Callable[[Callable[[], Any]], Any]
"""Calls a function and either raises its errors (``raising``) or returns them (``returning``)."""

_LONGEST = 400  # maximum characters of a message: transformers lists all known model types
_LONGEST_VALUE = 80  # maximum characters of a value in a message
_CONTENT = re.compile(r"(data:[^,\s]*,)[\w%+/=-]+", re.IGNORECASE)  # content of a data URI
_SIMILARITY = 0.75  # of similar names; presence_penalty and repetition_penalty must not match and have 0.71


class UserError(ValueError):
    """A mistake of the caller. One-line message: the rule, the expected and the received value.

    The command line prints it as ``error: ...`` and exits with status 2; the Python API lets it propagate.
    """


class LongPromptError(UserError):
    """The prompt has no room for an answer in the model's context."""


class SlowWarning(UserWarning):
    """Decoding is much slower than on another machine or with another drafter. Printed like ``CutWarning``."""


class CutWarning(UserWarning):
    """A truncated file was read up to its end. The command line prints it as ``note: ...``."""


def first_line(error: BaseException) -> str:
    """First line of an error's message, shortened; the error's type if the message is empty."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Suffix of a message about an unknown name that suggests the most similar known name; empty without one."""
    matches = get_close_matches(name, known, 1, _SIMILARITY)
    return f"; did you mean {matches[0]}?" if matches else ""


def shown(value: Any) -> str:
    """Format a value in one line for messages: its shortened repr, without the content of data URIs, or the type of an
    object that is not a plain value."""
    if isinstance(value, PathLike):
        value = fspath(value)
    if not (value is None or isinstance(value, str | bytes | Real | list | tuple | dict)):
        return type(value).__name__
    try:
        text = _CONTENT.sub(r"\1...", repr(value))
    except RecursionError:
        return type(value).__name__
    return text if len(text) <= _LONGEST_VALUE else f"{type(value).__name__} {text[:_LONGEST_VALUE]}..."


@contextmanager
def explained(message: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise exceptions of these types as a ``UserError``: the message, a colon and their first line.

    A ``UserError`` is raised unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{message}: {first_line(error)}") from error


def raising(function: Callable[[], Any]) -> Any:
    return function()


def returning(function: Callable[[], Any]) -> Any:
    """Return the function's result, or its ``UserError``. Processors raise ValueError for images that they reject."""
    try:
        return function()
    except UserError as error:
        return error
    except ValueError as error:
        return UserError(first_line(error))


EXTRAS = {
    "adapters": ("peft",),
    "cuda": ("causal_conv1d", "mamba_ssm", "torchao"),
    "decord": ("decord",),
    "demo": ("gradio",),
    "eval": ("datasets", "matplotlib", "pycocoevalcap"),
    "peers": ("mistralrs", "openvino_genai"),
    "ray": ("ray",),
    "real": ("gguf",),
    "serve": ("fastapi", "prometheus_client", "starlette", "uvicorn"),
    "structured": ("llguidance",),
    "train": ("accelerate", "tensorboard"),
}
"""Modules by the extra that installs them. Not read from metadata, which an uninstalled checkout lacks."""


def install(extra: str) -> str:
    """Command that installs an extra from the source folder, as the package is not on an index."""
    return f"pip install -e '.[{extra}]' in the source folder of mmspec"


def missing(purpose: str, package: str, extra: str | None = None) -> UserError:
    """Error for a package that is not installed: ``purpose`` needs it, and ``extra``, by default as in ``EXTRAS``,
    installs it."""
    extra = extra or next((name for name, modules in EXTRAS.items() if package in modules), None)
    command = install(extra) if extra else f"pip install {package}"
    return UserError(f"{purpose} needs the package {package}, which is not installed: run {command}")


def missing_import(error: ModuleNotFoundError) -> UserError:
    """Error for a command that failed to import an optional package. Raises ``ModuleNotFoundError``: the module belongs
    to mmspec."""
    package = (error.name or "mmspec").partition(".")[0]
    if package == "mmspec":
        raise error
    return missing("this command", package)
