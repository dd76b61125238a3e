"""``mmspec chat MODEL``: a conversation on a terminal, or with the lines of standard input."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from contextlib import suppress
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmspec.cli.app import INTERNAL_ERROR, USER_ERROR, report
from mmspec.cli.commands import Command
from mmspec.cli.options import LOADING, answer_options, data_uri, reasoning_options
from mmspec.errors import LongPromptError, UserError, nearest
from mmspec.files import read_json, write_text
from mmspec.jobs import ranks
from mmspec.validation import is_text

if TYPE_CHECKING:
    from rich.console import Console

    from mmspec.pipeline import Pipeline

MAX_NEW_TOKENS = 4096
"""Default of ``--max-new-tokens``: answers are not cut, and Ctrl-C stops them."""

_QUOTES = '"""'
_LAST_WORD = re.compile(r"""(?:^|\s)('[^']+'|"[^"]+"|(?:\\.|[^\s\\])+)\s*$""")
_MOST_BYTES = 1 << 30  # of a file to load, with its images
_COMMANDS = {
    "image": ("PATH...", "add images to the next message; their paths may also end it"),
    "reset": ("", "forget all messages but the system prompt"),
    "save": ("FILE", 'write the messages as JSON, as in OpenAI\'s API: {"messages": [...]}'),
    "load": ("FILE", "continue such a file"),
    "help": ("", "show this"),
    "exit": ("", "end, like Ctrl-D; Ctrl-C stops an answer, and a second one ends"),
}


@click.command(cls=Command)
@click.argument("argument", metavar="[MODEL]", required=False)
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--show-drafts", is_flag=True, help="Underline accepted draft tokens.")
@click.option(
    "--prefix-cache",
    type=click.IntRange(0),
    default=4096,
    show_default=True,
    metavar="MIB",
    help="Memory for the states of earlier messages; 0 computes all of them again.",
)
@answer_options
@reasoning_options
def chat(argument: str | None, system: str | None, show_drafts: bool, prefix_cache: int, **options: Any) -> None:
    """Talk with MODEL (or --model) on a terminal; /help lists what may be typed.

    Each message is a line. A backslash at its end continues it, and triple quotes enclose several lines. Without a
    terminal, messages are the lines of standard input. Statistics follow each answer on standard error.
    """
    if ranks() > 1:
        raise UserError(f"a chat runs in one process: got one of {ranks()} ranks of a job")
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("a chat reads messages from standard input, which is closed")
    from rich.console import Console

    from mmspec.cli.session import generation_keywords, open_pipeline, show_limits, show_notes
    from mmspec.drafters.registry import registered_name

    options["model"] = argument or options["model"]
    keywords, notes = generation_keywords(options), Console(stderr=True)
    keywords |= {"reasoning": options["reasoning_parser"], "trace": show_drafts}
    keywords |= {"chat_template_kwargs": options["chat_template_kwargs"] or None}
    loading = {name: options[name] for name in LOADING}
    pipe = open_pipeline(notes, **loading, warm_up=0, max_num_seqs=1, prefix_cache=prefix_cache << 20)
    keywords |= {name: value for name, value in pipe.defaults.served.items() if keywords[name] is None}
    keywords["max_new_tokens"] = keywords["max_new_tokens"] or MAX_NEW_TOKENS
    show_limits(notes, options["model"])
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 (edits the lines of input)
        show_notes(notes, f"{pipe.name}, drafter {registered_name(pipe.drafter) or 'none'}; /help lists commands")
    Chat(pipe, keywords, notes, system).run()


class Chat:
    """A conversation with a model.

    Attributes:
        messages: in the form of OpenAI's API, with images as data URIs.
        images: items of the next message.
        keywords: of ``Pipeline.stream``.
    """

    def __init__(self, pipe: Pipeline, keywords: dict[str, Any], notes: Console, system: str | None = None) -> None:
        self.pipe, self.keywords, self.notes = pipe, keywords, notes
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self._first)
        self.images: list[dict[str, Any]] = []

    def run(self) -> None:
        """Take messages until the input ends, or Ctrl-C is pressed twice. Errors are printed, and change nothing."""
        interrupted = False
        while True:
            typed = ""
            try:
                text = read_message()
                interrupted = not self.take(text)
            except EOFError:
                break
            except KeyboardInterrupt:
                typed = _typed()
                click.echo(err=True)
                if interrupted and not typed:
                    return
                if not typed:
                    self._note("Ctrl-C again or Ctrl-D ends")
                interrupted = True
            except UserError as error:
                report("error", error, USER_ERROR)
            except Exception as error:  # the conversation must not be lost
                report("internal error", error, INTERNAL_ERROR)
        if sys.stdin.isatty():
            click.echo(err=True)

    def take(self, text: str) -> bool:
        """Run a command, or answer a message; returns whether it was not interrupted."""
        name, _, rest = text.strip().partition(" ")
        if not name.startswith("/") or "/" in name[1:]:
            return self.ask(text.strip()) if name else True
        if name[1:] not in _COMMANDS:
            known = [f"/{one}" for one in _COMMANDS]
            raise UserError(f"unknown command: expected one of {', '.join(known)}, got {name}{nearest(name, known)}")
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise UserError(f"{name}: expected words or quoted words, got {rest} ({error})") from None
        expected = _COMMANDS[name[1:]][0]
        if bool(words) != bool(expected) or (len(words) > 1 and not expected.endswith("...")):
            raise UserError(f"{name} takes {expected or 'nothing'}: got {rest or 'nothing'}")
        getattr(self, f"_{name[1:]}")(*map(os.path.expanduser, words))
        return True

    def ask(self, text: str) -> bool:
        """Answer a message, which may end with paths of images; returns whether the answer was not interrupted."""
        from mmspec.cli.session import Answer, show_notes, stats_line
        from mmspec.drafters.registry import registered_name

        text, images = self._split(text)
        if not text:
            self._add(images)
            return True
        items = [*self.images, *images]
        content: Any = [*items, {"type": "text", "text": text}] if items else text
        messages = [*self.messages, {"role": "user", "content": content}]
        answer, generation = Answer(drafts=self.keywords["trace"]), None
        try:
            generation = answer.read(self.notes, self.pipe.stream(messages, **self.keywords))
        except LongPromptError as error:
            raise UserError(f"{error}; the message was dropped: /reset begins anew, after /save FILE") from None
        except KeyboardInterrupt:
            kept = f"{len(answer.token_ids)} tokens are kept" if answer.token_ids else "the message was dropped"
            self._note(f"stopped: {kept}")
        if answer.token_ids:
            reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            self.messages = [*messages, {"role": "assistant", "content": answer.text, **reasoning}]
            self.images = []
        if generation is not None:
            limit = self.keywords["context_limit"] or self.pipe.context_limit
            show_notes(self.notes, stats_line(generation, registered_name(self.pipe.drafter), limit))
        return generation is not None

    def _split(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Split paths of images, as terminals paste dropped files, from the end of a message."""
        images: list[dict[str, Any]] = []
        while self.pipe.processor.reads_media and (found := _LAST_WORD.search(text)):
            path = os.path.expanduser("".join(shlex.split(found[1])[:1])) if _is_quoted(found[1]) else ""
            if not ((guess_type(path)[0] or "").startswith("image/") and os.path.isfile(path)):
                break
            text, images = text[: found.start()].rstrip(), [self._item(path), *images]
        return text, images

    def _item(self, path: str) -> dict[str, Any]:
        """An image as an item of a message. Raises ``UserError``: it cannot be read, or the model reads text only."""
        processor: Any = self.pipe.processor
        if not processor.reads_media:
            raise UserError(f"{self.pipe.name} reads text only: got the image {path}")
        processor.place_media([{"role": "user", "content": [{"type": "image", "path": path}]}])
        return {"type": "image_url", "image_url": {"url": data_uri(Path(path))}}

    def _add(self, images: list[dict[str, Any]]) -> None:
        self.images += images
        self._note(f"images of the next message: {len(self.images)}")

    def _image(self, *paths: str) -> None:
        self._add([self._item(path) for path in paths])

    def _reset(self) -> None:
        self._continue(list(self._first))

    def _save(self, file: str) -> None:
        write_text(Path(file), json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n")
        self._note(f"{len(self.messages)} messages in {file}")

    def _load(self, file: str) -> None:
        from mmspec.engine.request import parse

        messages = read_json(Path(file), _MOST_BYTES).get("messages")
        if not isinstance(messages, list):
            raise UserError(f"{file}: expected an object with a list of messages, received none")
        if messages:
            parse([{"prompt": messages}], {})
        self._continue(messages)
        self._note(f"{len(messages)} messages of {file}")

    def _continue(self, messages: list[dict[str, Any]]) -> None:
        self.messages, self.images = messages, []
        if self.pipe.engine.prefixes is not None:
            self.pipe.engine.prefixes.clear()

    def _help(self) -> None:
        for name, (words, text) in _COMMANDS.items():
            self._note(f"{f'/{name} {words}':15} {text}")
        self._note(f"{'...':15} {_QUOTES} begins and ends a message of several lines; a backslash continues a line")

    def _exit(self) -> None:
        raise EOFError

    def _note(self, text: str) -> None:
        from mmspec.cli.session import show_notes

        show_notes(self.notes, text)


def read_message() -> str:
    """Read a message from standard input: a line, with the next one after a backslash, or lines in triple quotes.
    Raises ``EOFError`` at the end of the input."""
    text = _read_line(">>> ")
    if text.startswith(_QUOTES):
        text = text.removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            try:
                text += "\n" + _read_line("... ")
            except EOFError:
                raise UserError(f"a message that begins with {_QUOTES} must end with them: got none") from None
        return text.rstrip().removesuffix(_QUOTES).strip("\n")
    with suppress(EOFError):
        while text.endswith("\\"):
            text = text[:-1] + "\n" + _read_line("... ")
    return text


def _read_line(prompt: str) -> str:
    edited = sys.stdin.isatty() and sys.stdout.isatty()
    if sys.stdin.isatty() and not edited:
        click.echo(prompt, nl=False, err=True)
    try:
        line = input(prompt if edited else "")
    except UnicodeDecodeError:
        line = "\udc80"
    if not is_text(line):
        raise UserError("a message must be UTF-8: got bytes that are not")
    return line


def _typed() -> str:
    """Text in the input line, which Ctrl-C drops."""
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline is not None else ""


def _is_quoted(word: str) -> bool:
    """Whether quotes are in pairs, as ``shlex`` requires."""
    with suppress(ValueError):
        return bool(shlex.split(word))
    return False
