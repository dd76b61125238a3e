"""The error for mistakes of the caller, and other errors turned into it; optional packages that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Attempt = Callable[[Callable[[], Any]], Any]
"""Calls a function, and decides about its mistakes: ``raising`` or ``returning``."""

_LONGEST = 400  # characters: transformers lists all model types it knows


class UserError(ValueError):
    """A mistake of the caller's, in one line: the rule, what was expected, what was received.

    The command line prints it as ``error: ...`` and exits with status 2; the Python API lets it propagate.
    """


class SlowWarning(UserWarning):
    """Decoding is much slower than it could be: on another machine, with another drafter.

    The command line prints it as ``note: ...``.
    """


class CutWarning(UserWarning):
    """A file was cut short, and what is there was read. The command line prints it as ``note: ...``."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened, or its type if the message is empty."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


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
    """The function's result; its errors are raised."""
    return function()


def returning(function: Callable[[], Any]) -> Any:
    """The function's result, or its mistake as a ``UserError``. Processors raise ValueError for images they reject."""
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
    "peers": ("openvino_genai",),
    "ray": ("ray",),
    "real": ("gguf",),
    "serve": ("fastapi", "httpcore", "prometheus_client", "pydantic", "starlette", "uvicorn"),
    "structured": ("llguidance",),
    "train": ("accelerate", "tensorboard"),
}
"""Modules by the extra that installs them. Not read from metadata, which a checkout that is not installed lacks."""


def install(extra: str) -> str:
    """The command that installs an extra. The package is on no index: it is installed from its source folder."""
    return f"pip install -e '.[{extra}]' in the source folder of mmspec"


def missing(purpose: str, package: str, extra: str | None = None) -> UserError:
    """The error where a package is not installed.

    Args:
        purpose: what needs the package.
        extra: the extra of mmspec that installs it; by default that of ``EXTRAS``.
    """
    extra = extra or next((name for name, modules in EXTRAS.items() if package in modules), None)
    command = install(extra) if extra else f"pip install {package}"
    return UserError(f"{purpose} needs the package {package}, which is not installed: run {command}")


def missing_import(error: ModuleNotFoundError) -> UserError:
    """The error of a command that has imported a package which is not installed.

    Raises:
        ModuleNotFoundError: the module is one of mmspec's own.
    """
    package = (error.name or "mmspec").partition(".")[0]
    if package == "mmspec":
        raise error
    return missing("this command", package)
