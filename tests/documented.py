"""Code blocks and command lines of the documentation.

A fenced block names its language; an indented block is shell.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from mmspec.cli.app import cli
from mmspec.cli.options import Output
from mmspec.errors import UserError

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "*/embedded/*/README.md")
    for path in ROOT.glob(pattern)
)
_SPAN = re.compile(r"`((?:mmspec|(?:OMP_NUM_THREADS=1\s+)?python\s+-m)\s[^`]+)`")
_SEPARATORS = {"&&", "||", ";", "|", "&"}
# Programs whose options are not checked.
_OTHERS = {"apt-get", "curl", "docker", "eval", "lm-eval", "lmms-eval", "pre-commit", "source"}
_ENTRY_POINTS = ("main", "msd")  # of modules that are run by python -m


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        language: ``python``, ``sh``, ``json``, ``text``.
        line: number of its first line in the page, from 1.
        code: without indentation.
    """

    language: str
    line: int
    code: str


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page; lines indented below ``:::`` are options of mkdocstrings."""
    language, first, code = "", 0, [""]
    lines = (ROOT / page).read_text().splitlines()
    directive = False
    for number, line in enumerate([*lines, ""], start=1):
        if language not in ("", "sh indented"):
            if line.startswith("```"):
                yield Block(language, first, "\n".join(code))
                language = ""
            else:
                code.append(line)
        elif line.startswith("```"):
            language, first, code = line[3:].strip(), number + 1, []
        elif line.startswith("    ") and not directive:
            if not language:
                language, first, code = "sh indented", number, []
            code.append(line[4:])
        else:
            if language:
                yield Block("sh", first, "\n".join(code))
                language = ""
            directive = line.startswith(":::") or (directive and line.startswith("    "))


def command_lines(code: str) -> Iterator[list[str]]:
    """The words of every command in a shell script, without variables set before it."""
    for line in _logical_lines(code):
        words: list[str] = []
        for word in [*_words(line), ";"]:
            if word not in _SEPARATORS:
                words.append(word)
                continue
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words
            words = []


def _logical_lines(code: str) -> Iterator[str]:
    """Lines of a script, joined after backslashes and within quotations."""
    part = ""
    for line in code.replace("\\\n", " ").splitlines(keepends=True):
        part += line
        with suppress(ValueError):  # a quotation goes on
            _words(part)
            yield part
            part = ""
    assert not part, f"no closing quotation: {part}"


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def spans(page: str) -> list[str]:
    """Command lines in backticks within a page's text."""
    text = (ROOT / page).read_text()
    return [" ".join(span.split()) for span in _SPAN.findall(text)]


def check_command(words: list[str], *, whole: bool = True) -> None:
    """Check a command line of ``mmspec``, also under ``torchrun``, ``python -m``, ``make`` or ``pip``; those of other
    known programs pass.

    Args:
        words: its words; ``...`` stands for further ones.
        whole: False permits missing arguments, as in a command's name.

    Raises:
        click.ClickException, UserError: for what the command itself would refuse.
    """
    words = [word.removeprefix(".venv/bin/") for word in words]
    given = [word for word in words if word != "..."]
    try:
        if words[0] in ("mmspec", "torchrun"):
            _parse(cli, "mmspec", given[given.index("mmspec") + 1 :])
        elif words[:2] == ["python", "-m"] or words[:3] == ["accelerate", "launch", "-m"]:
            _check_module(*given[given.index("-m") + 1 :])
        elif words[0] == "make":
            _check_targets(given[1:])
        elif words[:2] == ["pip", "install"]:
            _check_extras(given[2:])
        elif words[0] not in _OTHERS:
            raise UserError(
                f"{words[0]}: expected a program of {', '.join(sorted(_OTHERS))}, mmspec, make, pip, python -m"
            )
    except click.MissingParameter:
        if whole and given == words:
            raise


def _parse(command: click.Command, name: str, args: list[str]) -> None:
    with click.Context(command, info_name=name) as parent:
        if isinstance(command, click.Group) and args and args[0] != "NAME":
            found = command.get_command(parent, args[0])
            assert found is not None
            _parse(found, args[0], args[1:])
        else:
            command.make_context(name, args)


def _check_module(name: str, *args: str) -> None:
    found = find_spec(name)
    if found is None:
        raise UserError(f"{name}: expected a module, there is none")
    if name.split(".")[0] == "mmspec":
        module = import_module(f"{name}.__main__" if found.submodule_search_locations else name)
        commands = [vars(module)[entry] for entry in _ENTRY_POINTS if entry in vars(module)]
        if commands:
            _parse(commands[0], name, list(args))


def _check_targets(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        target = re.search(rf"^{re.escape(word)}\b.*:", makefile, re.MULTILINE)
        if "=" not in word and target is None:
            raise UserError(f"{word}: expected a target of the Makefile, there is none")


def _check_extras(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extras in (re.fullmatch(r"\.\[(.*)\]", word) for word in words):
        if extras and not set(extras[1].split(",")) <= set(known):
            raise UserError(f"{extras[0]}: expected extras of {', '.join(known)}")


@pytest.fixture
def any_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Input files of commands need not exist."""
    convert = click.Path.convert

    def converted(self: click.Path, value, param, ctx):  # type: ignore[no-untyped-def]
        return convert(self, value, param, ctx) if isinstance(self, Output) else value

    monkeypatch.setattr(click.Path, "convert", converted)
