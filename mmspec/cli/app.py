"""Entry point of the command line: runs a command, and reports errors in one line with an exit status."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence

import click

from mmspec import __version__
from mmspec.cli.commands import CLOSED_PIPE, Commands
from mmspec.errors import CutWarning, SlowWarning, UserError
from mmspec.workers import on_signals

INTERNAL_ERROR, USER_ERROR, INTERRUPTED = 1, 2, 128 + 2
_SPINNING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}  # GCC's OpenMP; LLVM's and Intel's, in milliseconds

cli = click.version_option(__version__, prog_name="mmspec")(
    Commands(
        "commands",
        name="mmspec",
        help="Fast, lossless decoding of vision-language models and Mamba hybrids.",
        epilog="`mmspec COMMAND --help` lists a command's options.",
    )
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0; 1 after an internal error and 2 after a user error, each reported in one line on stderr; 3
        if some files of a folder were skipped; 130 after Ctrl-C; 141 if stdout was a pipe that has been closed. SIGTERM
        ends the process with 143.
    """
    limit_spinning()
    _silence_libraries()
    _escape_unencodable()
    try:
        with sigterm_exits():
            status = cli.main(args, prog_name="mmspec", standalone_mode=False)
        sys.stdout.flush()
    except (UserError, click.ClickException) as error:
        if "_MMSPEC_COMPLETE" in os.environ:  # completion request of a shell
            return USER_ERROR
        return report("error", error, USER_ERROR)
    except (click.Abort, KeyboardInterrupt):
        return _print_line("interrupted", INTERRUPTED)
    except BrokenPipeError:
        status = CLOSED_PIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return report("error", error, USER_ERROR)
        return report("internal error", error, INTERNAL_ERROR)
    if status == CLOSED_PIPE:
        _discard_output()
    return status if isinstance(status, int) else 0


@contextlib.contextmanager
def sigterm_exits() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit, which removes temporary files and ends child processes. No-op in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with on_signals(lambda number, _: sys.exit(128 + number), signal.SIGTERM):
        yield


def limit_spinning() -> None:
    """Lets idle OpenMP threads sleep after microseconds instead of milliseconds, as spinning threads compete with other
    programs. Call only in a program, before it imports torch; the user's settings take precedence."""
    if "torch" not in sys.modules and not any(name in os.environ for name in ("OMP_WAIT_POLICY", *_SPINNING)):
        os.environ.update(_SPINNING)


def report(kind: str, error: Exception, status: int) -> int:
    """Print an error to stderr in one line; returns the exit status."""
    if os.environ.get("MMSPEC_DEBUG"):
        with contextlib.suppress(BrokenPipeError):
            traceback.print_exception(error)
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    if status == INTERNAL_ERROR:
        message = f"{type(error).__name__}: {message} (--debug shows where)"
    return _print_line(f"{kind}: {message}", status)


def _print_line(message: str, status: int) -> int:
    """Print a message to stderr as one line, with unprintable characters escaped; returns the exit status."""
    line = " ".join(message.split())
    try:
        sys.stdout.flush()
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr, flush=True)
    except OSError:
        _discard_output()
    return status


def _silence_libraries() -> None:
    """Suppresses warnings of other libraries. Environment variables set by the user take precedence."""
    if os.environ.get("MMSPEC_DEBUG") or "--debug" in sys.argv:
        return
    warnings.simplefilter("ignore")
    warnings.simplefilter("once", SlowWarning)
    warnings.simplefilter("once", CutWarning)
    warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _escape_unencodable() -> None:
    """Make stdout and stderr escape characters that their encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell (``>&-``)
            setattr(sys, name, null := open(os.devnull, "w"))  # noqa: SIM115
            os.set_inheritable(null.fileno(), True)  # child processes use the closed descriptor, too
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Redirects stdout to null: flushing a closed pipe at exit would raise."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
