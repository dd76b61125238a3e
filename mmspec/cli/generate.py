"""``mmspec generate TEXT``."""

from __future__ import annotations

from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import generation_options, read_stdin
from mmspec.errors import UserError
from mmspec.validation import is_text


@click.command(cls=Command)
@click.argument("text")
@click.option("--chat-template/--no-chat-template", default=True, help="Continue TEXT without the model's template.")
@generation_options
def generate(text: str, **options: Any) -> None:
    """Answer TEXT; - reads it from standard input.

    The answer is streamed to standard output, followed by a line of statistics on standard error.
    """
    try:
        prompt = read_stdin("TEXT", "a prompt").decode() if text == "-" else text
    except UnicodeDecodeError as error:
        raise UserError(f"TEXT must be UTF-8: got byte {error.object[error.start]:#04x} at {error.start}") from None
    if not prompt.strip():
        raise UserError("TEXT must not be empty: expected a prompt, got nothing but blanks")
    if not is_text(prompt):
        raise UserError("TEXT must be UTF-8: got bytes that are not")

    from mmspec.cli.session import answer

    answer({"prompt": prompt}, options)
