"""Chat templates, rendered in worker processes with limits on time, memory and length; see ``mmspec.workers``.

Templates are programs of the checkpoint: they may loop forever or build gigabytes of text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from threading import Thread
from types import ModuleType
from typing import Any

from mmspec.errors import UserError, first_line
from mmspec.workers import Read, WorkerError, Workers

_SECONDS, _MEMORY, _LONGEST = 10.0, 512 << 20, 1 << 24  # bytes; characters of a rendered prompt


def bounded(plain: Callable[[str], Any]) -> Callable[[str], Any]:
    """Replace transformers' function that compiles a chat template, for ``replaced``."""
    return wraps(plain, updated=())(lambda text: _Template(text, plain))


class _Template:
    def __init__(self, text: str, compiler: Callable[[str], Any]) -> None:
        self._text, self._compiler = text, compiler

    @property
    def environment(self) -> Any:
        """jinja's environment, in which transformers parses the text; compiling could also evaluate constants."""
        return self._compiler("").environment

    def render(self, **variables: Any) -> str:
        """Render the template as jinja does.

        Raises:
            UserError: rendering exceeds a limit.
            ValueError: the template fails, for example as it rejects the messages.
        """
        try:
            text, failed = _workers(os.getpid()).run([self._text, variables], b"", _SECONDS, _read)
        except WorkerError as error:
            found = f"takes more {error.cause}" if error.cause in ("time", "memory") else "ends the renderer"
            raise _beyond(f"within {_SECONDS:g} s and {_MEMORY >> 20} MiB", found) from None
        if failed:
            raise ValueError(text)
        return text


def prepare() -> None:
    """Start a worker in the background, so that the first template need not wait for it."""
    pool = _workers(os.getpid())

    def start() -> None:
        with suppress(WorkerError, RuntimeError):  # the first template reports them
            pool.run(["", {}], b"", _SECONDS, _read)

    Thread(target=start, daemon=True).start()


def _beyond(limit: str, found: str) -> UserError:
    return UserError(f"the model's chat template must be rendered {limit}: got one that {found}")


@lru_cache(maxsize=1)
def _workers(process: int) -> Workers:
    """The pool of a process; a forked process has its own."""
    return Workers(__name__, workers=2, memory=_MEMORY)


def _read(reply: dict[str, Any], read: Read) -> tuple[str, bool]:
    return read(reply["size"]).decode("utf-8", "surrogatepass"), reply["failed"]


def handle(request: list[Any], body: bytes) -> tuple[dict[str, Any], Iterable[bytes]]:
    """Render a template in a worker process: text and variables in, the rendered text or the template's error out."""
    template, variables = request
    try:
        text, failed = _compiler()(template).render(**variables), False
    except MemoryError:
        raise
    except Exception as error:  # templates may raise anything
        text, failed = first_line(error), True
    if len(text) > _LONGEST:
        raise _beyond(f"to at most {_LONGEST} characters", f"renders {len(text)}")
    data = text.encode("utf-8", "surrogatepass")
    return {"size": len(data), "failed": failed}, (data,)


@lru_cache(maxsize=1)
def _compiler() -> Callable[[str], Any]:
    """transformers' compiler of chat templates, imported without the rest of the package: four times as fast."""
    for name in ("transformers", "transformers.utils"):
        spec = find_spec(name)
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = list(spec.submodule_search_locations or []) if spec else []
    try:
        found = import_module("transformers.utils.chat_template_utils")
    except (ImportError, AttributeError):  # it needs more of the package
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        found = import_module("transformers.utils.chat_template_utils")
    compiler: Callable[[str], Any] = found._compile_jinja_template
    return compiler
