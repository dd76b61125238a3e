"""``main``: runs a command and turns whatever goes wrong into one line and an exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

import click

from mmspec import __version__
from mmspec.cli.commands import CLOSED_PIPE, Commands
from mmspec.errors import UserError
from mmspec.extras import extra_of, missing

FAILURE, MISTAKE, INTERRUPTED = 1, 2, 128 + 2

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

    Args:
        args: arguments without the program's name; None takes the process's own.

    Returns:
        The exit status: 0; 2 after a mistake of the user's, 1 after a failure of ours, each reported in one line on
        stderr; 3 where some files of a folder were skipped; 130 after Ctrl-C; 141 where the reader of a pipe went away.
    """
    _be_quiet()
    _accept_any_text()
    try:
        status = cli.main(args, prog_name="mmspec", standalone_mode=False)
        sys.stdout.flush()
    except (UserError, click.ClickException) as error:
        return _report("error", error, MISTAKE)
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        status = CLOSED_PIPE
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = extra_of(package)
        if extra is None:
            return _report("internal error", error, FAILURE)
        return _report("error", missing("this command", package, extra), MISTAKE)
    except Exception as error:
        return _report("internal error", error, FAILURE)
    if status == CLOSED_PIPE:
        _discard_output()
    return status if isinstance(status, int) else 0


def _report(kind: str, error: Exception, status: int) -> int:
    if os.environ.get("MMSPEC_DEBUG"):
        with contextlib.suppress(BrokenPipeError):
            traceback.print_exception(error)
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    if status == FAILURE:
        message = f"{type(error).__name__}: {message} (--debug shows where)"
    return _say(f"{kind}: {message}", status)


def _say(message: str, status: int) -> int:
    """One printable line on stderr, whatever a file's name or another library's message holds."""
    line = " ".join(message.split())
    try:
        sys.stdout.flush()
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr, flush=True)
    except OSError:
        _discard_output()
    return status


def _be_quiet() -> None:
    """Keep other libraries' warnings out of the output. Variables that the user has set stay."""
    if os.environ.get("MMSPEC_DEBUG") or "--debug" in sys.argv:
        return
    warnings.simplefilter("ignore")
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _accept_any_text() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us (``>&-``)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a model may say what the terminal's encoding lacks


def _discard_output() -> None:
    """Point stdout at nothing, or the interpreter's last flush would complain about the closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
