"""Command class of modules that are run by ``python -m``."""

from __future__ import annotations

from typing import Any

import click

from mmspec.errors import UserError


class ModuleCommand(click.Command):
    """A click command that reports a ``UserError`` in one line and exits with status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise _UsageError(str(error)) from error


class _UsageError(click.ClickException):
    exit_code = 2
