"""``mmspec generate TEXT`` and ``mmspec chat MODEL``."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import LOADING, answer_options, generation_options, read_stdin, reasoning_options
from mmspec.errors import UserError
from mmspec.jobs import ranks
from mmspec.validation import is_text

_TOKENS = 4096  # of an answer in a chat, where Ctrl-C stops it
_PREFIXES = 4 << 30  # bytes of states of earlier messages


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


@click.command(cls=Command)
@click.argument("argument", metavar="[MODEL]", required=False)
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--show-drafts", is_flag=True, help="Underline accepted draft tokens.")
@answer_options
@reasoning_options
def chat(argument: str | None, system: str | None, show_drafts: bool, **options: Any) -> None:
    """Talk with MODEL (or --model) on a terminal; /help lists commands.

    Each message is a line. A backslash at its end continues it, and triple quotes enclose several lines. Without a
    terminal, messages are the lines of standard input. Statistics follow each answer on standard error.
    """
    if ranks() > 1:
        raise UserError(f"a chat runs in one process: got one of {ranks()} ranks of a job")
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("a chat reads messages from standard input, which is closed")
    from rich.console import Console

    from mmspec.cli.chat import Chat
    from mmspec.cli.session import generation_keywords, open_pipeline, show_limits

    loading = {name: options[name] for name in LOADING} | {"model": argument or options["model"]}
    keywords, notes = generation_keywords(options), Console(stderr=True)
    keywords |= {"reasoning": options["reasoning_parser"], "trace": show_drafts}
    keywords |= {"chat_template_kwargs": options["chat_template_kwargs"] or None}
    pipe = open_pipeline(notes, **loading, warm_up=0, max_num_seqs=1, prefix_cache=_PREFIXES)
    keywords |= {name: value for name, value in pipe.defaults.served.items() if keywords[name] is None}
    keywords["max_new_tokens"] = keywords["max_new_tokens"] or _TOKENS
    show_limits(notes, loading["model"])
    Chat(pipe, keywords, notes, system).run()
