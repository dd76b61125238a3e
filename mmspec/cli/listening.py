"""Commands that listen on a port: options, the secret that a public address requires, the steps of the start."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import click

from mmspec.cli.options import Decorator, stack
from mmspec.errors import UserError


def listen_options(port: int) -> Decorator:
    """``--host``, ``--port`` and ``--no-auth``.

    Args:
        port: the default one.
    """
    return stack(
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 listens on all."
        ),
        click.option(
            "--port", type=click.IntRange(0, 65535), default=port, show_default=True, help="0 selects a free port."
        ),
        click.option("--no-auth", is_flag=True, help="Allow a public address without a key or login."),
    )


def steps_shown() -> AbstractContextManager[None]:
    """Show the steps of the start on standard error, see ``mmspec.progress.show_steps``."""
    from rich.console import Console

    from mmspec.progress import show_steps

    return show_steps(Console(stderr=True))


@dataclass(frozen=True)
class Secret:
    """A key or login that clients need.

    Attributes:
        name: with its article, for messages.
        option: its option.
        form: metavar of the option.
        variable: environment variable that may contain it instead.
        text: help of the option.
    """

    name: str
    option: str
    form: str
    variable: str
    text: str

    @property
    def declared(self) -> Decorator:
        text = f"{self.text} Prefer the environment variable {self.variable}, which other local users cannot see."
        return click.option(self.option, metavar=self.form, envvar=self.variable, help=text)

    def check(self, given: str | None, no_auth: bool, public: bool) -> None:
        """Check that there is one on a public address, or ``--no-auth``.

        Raises:
            UserError: there is neither, or both.
        """
        if given and no_auth:
            raise UserError(
                f"{self.option} and --no-auth (or {self.variable}) exclude each other: expected one of them, got both"
            )
        if public and not (given or no_auth):
            expected = f"{self.option} {self.form}, {self.variable} or --no-auth"
            raise UserError(f"a public address needs {self.name}: expected {expected}, got none")


API_KEY = Secret("a key", "--api-key", "KEY", "MMSPEC_API_KEY", "Key that clients of the API must send.")


def check_api_key(key: str | None, no_auth: bool, public: bool) -> None:
    """Check ``--api-key``; see ``Secret.check``.

    Raises:
        UserError: it cannot be sent in a header, or is missing.
    """
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UserError("--api-key (or MMSPEC_API_KEY) must be printable ASCII without blanks, and not empty")
    API_KEY.check(key, no_auth, public)
