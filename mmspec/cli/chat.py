"""A conversation on a terminal, or with the lines of standard input."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from contextlib import suppress
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mmspec.cli.app import INTERNAL_ERROR, USER_ERROR, report
from mmspec.cli.options import data_uri
from mmspec.cli.session import Answer, show_notes, stats_line
from mmspec.drafters.registry import registered_name
from mmspec.engine.request import parse
from mmspec.errors import LongPromptError, UserError, nearest
from mmspec.files import read_json, write_text
from mmspec.pipeline import Pipeline
from mmspec.validation import is_text

with suppress(ImportError):
    import readline  # edits the lines of input

_QUOTES = '"""'
_LAST_WORD = re.compile(r"""(?:^|\s)('[^']+'|"[^"]+"|(?:\\.|[^\s\\'"])+)$""")
_MOST_BYTES = 1 << 30  # of a file to load, with its images
_COMMANDS = {
    "/image": ("PATH...", "add images to the next message; their paths may also end it"),
    "/reset": ("", "forget all messages but the system prompt"),
    "/save": ("FILE", 'write the messages as JSON, as in OpenAI\'s API: {"messages": [...]}'),
    "/load": ("FILE", "continue a saved conversation"),
    "/help": ("", f"show this; {_QUOTES} starts and ends a message of several lines, and a backslash continues a line"),
    "/exit": ("", "end, like Ctrl-D; Ctrl-C stops an answer, and a second Ctrl-C ends"),
}


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
        self.messages, self.images = list[dict[str, Any]](self._first), list[dict[str, Any]]()

    def run(self) -> None:
        """Take messages until the input ends, or Ctrl-C is pressed twice. Errors are printed, and change nothing."""
        if sys.stdin.isatty():
            drafter = registered_name(self.pipe.drafter) or "none"
            show_notes(self.notes, f"{self.pipe.name}, drafter {drafter}; /help lists commands")
        interrupted = False
        typed: str | None = ""  # in the line that Ctrl-C dropped; None at the end
        while not interrupted or typed is not None:
            try:
                text, interrupted = read_message(), False
                interrupted = not self.take(text)
            except EOFError:
                return click.echo(nl=sys.stdin.isatty(), err=True)
            except KeyboardInterrupt:
                typed = _typed() or (None if interrupted else "")
                interrupted = True
                show_notes(self.notes, "" if typed != "" else "\nCtrl-C again or Ctrl-D ends")
            except UserError as error:
                report("error", error, USER_ERROR)
            except OSError:  # of standard input or output
                raise
            except Exception as error:  # the conversation must not be lost
                report("internal error", error, INTERNAL_ERROR)

    def take(self, text: str) -> bool:
        """Run a command, or answer a message; returns whether it was not interrupted."""
        name, _, rest = text.strip().partition(" ")
        if not name.startswith("/") or "/" in name[1:]:
            return not name or self.ask(text.strip())
        if name not in _COMMANDS:
            expected = f"{', '.join(_COMMANDS)}, got {name}{nearest(name, _COMMANDS)}"
            raise UserError(f"unknown command: expected one of {expected}")
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise UserError(f"{name}: expected words or quoted words, got {rest} ({error})") from None
        expected = _COMMANDS[name][0]
        if bool(words) != bool(expected) or (len(words) > 1 and not expected.endswith("...")):
            raise UserError(f"{name} takes {expected or 'nothing'}: got {rest or 'nothing'}")
        getattr(self, f"_{name[1:]}")(*map(os.path.expanduser, words))
        return True

    def ask(self, text: str) -> bool:
        """Answer a message, which may end with paths of images; returns whether the answer was not interrupted."""
        text, images = self._split(text)
        if not text:
            self._add(images)
            return True
        items = [*self.images, *images]
        content: Any = [*items, {"type": "text", "text": text}] if items else text
        messages = [*self.messages, {"role": "user", "content": content}]
        answer, line = Answer(drafts=self.keywords["trace"]), ""
        try:
            generation = answer.read(self.notes, self.pipe.stream(messages, **self.keywords))
            limit = self.keywords["context_limit"] or self.pipe.context_limit
            line = stats_line(generation, registered_name(self.pipe.drafter), limit)
        except LongPromptError as error:
            raise UserError(f"{error}; the message was dropped: /reset starts again, after /save FILE") from None
        except KeyboardInterrupt:
            kept = f"{len(answer.token_ids)} tokens are kept" if answer.token_ids else "the message was dropped"
        if answer.token_ids:
            reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            self.messages = [*messages, {"role": "assistant", "content": answer.text, **reasoning}]
            self.images = []
        show_notes(self.notes, line or f"stopped: {kept}")
        return bool(line)

    def _split(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Split paths of images, as terminals paste dropped files, from the end of a message."""
        images: list[dict[str, Any]] = []
        while self.pipe.processor.reads_media and (found := _LAST_WORD.search(text)):
            path = os.path.expanduser(shlex.split(found[1])[0])
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
        show_notes(self.notes, f"images of the next message: {len(self.images)}")

    def _image(self, *paths: str) -> None:
        self._add([self._item(path) for path in paths])

    def _reset(self) -> None:
        self.messages, self.images = list(self._first), []

    def _save(self, file: str) -> None:
        write_text(Path(file), json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n")
        show_notes(self.notes, f"{len(self.messages)} messages in {file}")

    def _load(self, file: str) -> None:
        messages = read_json(Path(file), _MOST_BYTES).get("messages")
        if not (isinstance(messages, list) and messages):
            raise UserError(f"{file}: expected an object with a list of messages, received none")
        parse([{"prompt": messages}], {})
        self.messages, self.images = messages, []
        show_notes(self.notes, f"{len(messages)} messages of {file}")

    def _help(self) -> None:
        show_notes(self.notes, *(f"{f'{name} {words}':15} {text}" for name, (words, text) in _COMMANDS.items()))

    def _exit(self) -> None:
        raise EOFError


def read_message() -> str:
    """Read a message from standard input: a line, lines that a backslash joins, or lines in triple quotes.
    Raises ``EOFError`` at the end of the input."""
    text = _read_line(">>> ")
    if text.startswith(_QUOTES):
        text = text.removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            try:
                text += "\n" + _read_line("... ")
            except EOFError:
                raise UserError(f"a message that starts with {_QUOTES} must end with them: got no end") from None
        return text.rstrip().removesuffix(_QUOTES).strip("\n")
    with suppress(EOFError):
        while text.endswith("\\"):
            text = text[:-1] + "\n" + _read_line("... ")
    return text


def _read_line(prompt: str) -> str:
    on_terminal = sys.stdin.isatty(), sys.stdout.isatty()
    if on_terminal == (True, False):
        click.echo(prompt, nl=False, err=True)
    try:
        line = input(prompt if all(on_terminal) else "")
    except UnicodeDecodeError:
        line = "\udc80"
    if not is_text(line):
        raise UserError("a message must be UTF-8: got bytes that are not")
    return line


def _typed() -> str:
    """Text in the input line, which Ctrl-C drops."""
    return readline.get_line_buffer() if "readline" in sys.modules else ""
