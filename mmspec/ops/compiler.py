"""Compiles a C++ source for this processor at first use and caches the library in the user's cache folder.

The name of a library contains a digest of its contents: a truncated, replaced or damaged library is recompiled, because
loading it would crash the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from mmspec.errors import UserError, first_line
from mmspec.files import cache_folder, settle, temporary
from mmspec.ops.builds import LINK, find_compiler, identity

_log = logging.getLogger("mmspec.kernels")
_SECONDS = 300  # timeout of the compiler, which takes 15 s, a minute next to other programs
_PROBE = 4 << 20  # bytes; more than a compiler's output
_ANOTHER = "MMSPEC_CACHE names another folder"


class CompilerError(Exception):
    """A source cannot be compiled or its library cannot be loaded; the message is one line."""


def load(source: Path, flags: Sequence[str], prebuilt: Path | None = None) -> ctypes.CDLL:
    """Load the library of a source; compiles it unless cached for the same source, headers, compiler and processor.

    Loads ``prebuilt`` instead if this system can. Safe for concurrent processes. Raises ``CompilerError``: no compiler,
    failed compilation, or a cache that is not writable or does not allow executables.
    """
    if prebuilt:
        try:
            return ctypes.CDLL(str(prebuilt))
        except OSError as error:  # such as of another C library
            _log.info("compiling kernels, because the wheel's cannot be loaded: %s", error)
    compiler = find_compiler()
    if compiler is None:
        raise CompilerError("expected a C++ compiler (g++ or clang++), found none")
    folder = cache_folder() / "kernels"
    name = _identity(source, compiler, flags)
    with _explained(f"cannot keep compiled kernels in {folder}", f"; {_ANOTHER}"):
        file = _kept(folder, name)
        if file is None:
            _log.info("compiling kernels with %s, which are kept in %s", compiler, folder)
            try:
                file = _compiled(source, [compiler, *flags, *LINK], folder, name)
            except UserError as error:  # of `temporary`: its reason has a message of this module's
                raise error.__cause__ or error from None
    expected = f"expected a folder whose files may be executed (not mounted noexec); {_ANOTHER}"
    with _explained(f"cannot load the compiled {file}", f"; {expected}"):
        return ctypes.CDLL(str(file))


def _identity(source: Path, compiler: str, flags: Sequence[str]) -> str:
    with _explained(f"{compiler} does not run"):
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_SECONDS, check=True).stdout
    return identity(source, flags, compiler.encode(), version, processor().encode())


def _kept(folder: Path, name: str) -> Path | None:
    """A cached library with a matching digest; deletes other libraries of the same name."""
    for file in folder.glob(f"{name}-*.so"):
        if file.name == _file_name(name, file):
            return file
        file.unlink(missing_ok=True)
    return None


def _file_name(name: str, file: Path) -> str:
    return f"{name}-{hashlib.sha256(file.read_bytes()).hexdigest()[:32]}.so"


def _compiled(source: Path, command: Sequence[str], folder: Path, name: str) -> Path:
    with temporary(folder / f"{name}.so") as part:
        run_compiler([*command, "-o", str(part), str(source)], [folder, Path(tempfile.gettempdir())])
        settle(part)
        file = folder / _file_name(name, part)
        os.replace(part, file)
    return file


def run_compiler(command: Sequence[str], folders: Sequence[Path]) -> None:
    """Compile a program or library.

    Args:
        folders: folders that the compiler writes to.

    Raises:
        CompilerError: the compiler's first error, or a folder that cannot be written.
    """
    english = {**os.environ, "LC_ALL": "C"}
    with _explained(f"{command[0]} does not run"):
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=_SECONDS, env=english)
    if done.returncode == 0:
        return
    for folder in folders:  # compilers report this as a linker error
        failed = _explained(f"cannot compile kernels: {folder} cannot be written", f"; {_ANOTHER}, TMPDIR one for /tmp")
        with failed, tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    lines = [*(line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}"]
    raise CompilerError(f"{command[0]} cannot compile {Path(command[-1]).name}: {lines[0]}")


@contextmanager
def _explained(message: str, advice: str = "") -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(f"{message}: {first_line(error)}{advice}") from error


def processor() -> str:
    """Model and features of this processor, because machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        about = {line.partition(":")[0].strip(): line for line in reversed(lines)}
        return " ".join(about.get(key, "") for key in ("model name", "flags", "Features", "CPU part"))
    except OSError:
        return f"{platform.machine()} {platform.processor()} {torch.backends.cpu.get_cpu_capability()}"
