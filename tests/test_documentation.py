"""The documentation against the package: Python runs, shell parses, commands and their options exist, and names do.

A fenced block names its language; an indented block is shell.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile

import click
import pytest

from mmspec.cli.app import cli
from mmspec.cli.options import Output
from mmspec.drafters.registry import PLAIN, drafter_specs
from mmspec.errors import UserError
from mmspec.vision.embedded import samples
from tests.mmspec.test_hook import HYBRIDS
from tests.model_folders import save_text_model

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "*/embedded/*/README.md")
    for path in ROOT.glob(pattern)
)
OTHERS = {
    "aiperf",
    "apt-get",
    "curl",
    "docker",
    "eval",
    "guidellm",
    "llama-server",
    "lm-eval",
    "lmms-eval",
    "pre-commit",
}
OTHERS |= {"source", "sudo", "vllm"}
"""Programs whose options are not checked."""


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and code of the blocks of a page; lines indented below ``:::`` are options of mkdocstrings."""
    text = (ROOT / page).read_text()
    fenced = re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    rest = re.sub(r"^```.*\n(?:.*\n)*?```$|^:::.*\n(?:    .*\n|\n(?=    ))*", "", text, flags=re.MULTILINE)
    indented = re.findall(r"^(?:    .*\n)+", rest, re.MULTILINE)
    return fenced + [("sh", re.sub(r"^    ", "", code, flags=re.MULTILINE)) for code in indented]


def command_lines(code: str) -> Iterator[list[str]]:
    """The words of every command in a shell script, without variables set before it."""
    part = ""
    for line in code.replace("\\\n", " ").splitlines(keepends=True):
        part += line
        lexer = shlex.shlex(part, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        with suppress(ValueError):  # a quotation goes on
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word in ("&&", "||", ";", "|", "&"):
                    yield from [words] if words else []
                    words = []
                elif words or not re.match(r"[A-Z_]+=", word):
                    words.append(word)
            part = ""
    assert not part, f"no closing quotation: {part}"


def mistake(words: list[str], whole: bool = True) -> str:
    """The mistake in a command line.

    Args:
        words: its words; ``...`` stands for further words.
        whole: False permits missing arguments, as in a command's name.
    """
    given = [word.removeprefix(".venv/bin/") for word in words if word != "..."]
    try:
        check_command(given)
    except click.MissingParameter as error:
        return f"{words}: {error.format_message()}" if whole and len(given) == len(words) else ""
    except click.ClickException as error:
        return f"{words}: {error.format_message()}"
    except UserError as error:  # two pages make a drafter first
        made = str(error).startswith("unknown drafter") and str(error).endswith(("got 'bigram'", "got 'for-vllm'"))
        return "" if made else f"{words}: {error}"
    return ""


def check_command(words: list[str]) -> None:
    """Check a command line of ``mmspec``, also under ``torchrun`` or ``python -m``, ``make`` or ``pip``; those of other
    known programs pass."""
    if words[0] in ("mmspec", "torchrun"):
        parse(cli, "mmspec", words[words.index("mmspec") + 1 :])
    elif "-m" in words and words[0] in ("python", "accelerate"):
        name, *args = words[words.index("-m") + 1 :]
        if (found := find_spec(name)) is None:
            raise UserError(f"{name}: expected a module")
        if name.startswith("mmspec"):
            module = import_module(f"{name}.__main__" if found.submodule_search_locations else name)
            command = next((vars(module)[entry] for entry in ("main", "msd") if entry in vars(module)), None)
            if command is not None:
                parse(command, name, args)
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+)\b.*:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        if unknown := [word for word in words[1:] if "=" not in word and word not in targets]:
            raise UserError(f"{unknown[0]}: expected a target")
    elif words[:2] == ["pip", "install"]:
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extras in filter(None, (re.fullmatch(r"\.\[(.*)\]", word) for word in words)):
            if not set(extras[1].split(",")) <= set(known):
                raise UserError(f"{extras[0]}: expected extras of {', '.join(known)}")
    elif words[0] not in OTHERS:
        raise UserError(f"{words[0]}: expected a program of {', '.join(sorted(OTHERS))}, mmspec, make, pip, python -m")


def parse(command: click.Command, name: str, args: list[str]) -> None:
    with click.Context(command, info_name=name) as parent:
        if isinstance(command, click.Group) and args and args[0] != "NAME":
            found = command.get_command(parent, args[0])
            assert found is not None
            parse(found, args[0], args[1:])
        else:
            command.make_context(name, args)


@pytest.fixture
def any_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Input files of commands need not exist; outputs would be made in an empty folder."""
    convert = click.Path.convert

    def converted(self: click.Path, value, param, ctx):  # type: ignore[no-untyped-def]
        return convert(self, value, param, ctx) if isinstance(self, Output) else value

    monkeypatch.setattr(click.Path, "convert", converted)
    monkeypatch.chdir(tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("any_path")
@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_language_and_their_commands_exist(page: str) -> None:
    wrong = []
    for language, code in blocks(page):
        assert language in ("python", "sh", "json", "text"), code
        if language == "sh":
            done = subprocess.run(["sh", "-n"], input=code, text=True, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), code
            wrong += [mistake(words) for words in command_lines(code)]
    for span in re.findall(r"`((?:mmspec|(?:OMP_NUM_THREADS=1\s+)?python\s+-m)\s[^`]+)`", (ROOT / page).read_text()):
        wrong += [mistake(words, whole=False) for words in command_lines(" ".join(span.split()))]
    assert list(filter(None, wrong)) == []


CLIENTS = "docs/serving.md"  # its blocks are run by tests/mmspec/serving/test_compatibility.py
# Stand-in for what cannot be downloaded: a model of the same class under the hub's name in the working folder.
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILES = {"a.png": "scene.png", "b.png": "scene.png", "scene.png": "scene.png", "clip.mp4": "clip.mp4"}
DEMO = "http://127.0.0.1:7860"


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the repository's samples and a user's own files."""
    (tmp_path / "vision").symlink_to(ROOT / "vision")
    (tmp_path / "FOLDER").mkdir()
    for path, sample in {**FILES, "FOLDER/scene.png": "scene.png"}.items():
        copyfile(samples() / sample, tmp_path / path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PYTHON = {page: "\n".join(code for language, code in blocks(page) if language == "python") for page in PAGES}


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON[page] and page != CLIENTS])
def test_python_blocks_run(page: str, working_folder: Path) -> None:
    """In one process, in the order of the page."""
    code = PYTHON[page]
    if HUB in code:
        save_text_model(working_folder / HUB)
    with ExitStack() as stack:
        if DEMO in code:
            from tests.demos.serving import demo_server

            code = code.replace(DEMO, stack.enter_context(demo_server()))
        (working_folder / "page.py").write_text(code)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, "page.py"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_way_from_questions_to_another_engine_runs(working_folder: Path) -> None:
    found = blocks("docs/training.md")
    (working_folder / "questions.json").write_text(next(code for language, code in found if language == "json"))
    code = next(code for _, code in found if "--prompts questions.json" in code and "mmspec export" in code)
    code = f'mmspec() {{ {sys.executable} -m mmspec "$@"; }}\n{code}'
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["sh", "-e", "-c", code], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert "drafter eagle3" in done.stderr
    for folder in ("for-vllm", "for-sglang"):
        assert {file.name for file in (working_folder / folder).iterdir()} == {"config.json", "model.safetensors"}


# ---------------------------------------------------------------------- names


SOURCES = ("mmspec", "vision", "ssm", "eval", "demos", "tests")
TEXTS = (".py", ".toml", ".h", ".cpp", "Makefile")


@cache
def written(path: str = "") -> set[str]:
    """The words of a file's or folder's code; of all sources by default."""
    places = [ROOT / path] if path else [ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / one for one in SOURCES)]
    files = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
    names = {word for file in files for word in re.findall(r"\w+", str(file.relative_to(ROOT)))}
    return names.union(*(re.findall(r"\w+", file.read_text()) for file in files if file.name.endswith(TEXTS)))


MADE = {"mmspec/drafters/bigram.py", "bigram"}  # by the reader of docs/add-a-drafter.md


@pytest.mark.parametrize(
    "page",
    [
        "CONTRIBUTING.md",
        "docs/design.md",
        "docs/packages.md",
        "docs/kernels.md",
        "docs/recurrent-layers.md",
        "docs/add-a-drafter.md",
        "docs/add-a-layer.md",
    ],
)
def test_names_in_backticks_exist(page: str) -> None:
    """Paths exist, NAME stands for any; other words stand in the code, and in the file that the text says."""
    text = re.sub(r"^```.*?^```$|^(?: {4}|\|)[^\n]*$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    missing = []
    for span in re.findall(r"`([^`]+)`", text):
        for word in re.findall(r"(?<![\w./])\w[\w./-]*", span):
            if re.fullmatch(r"[\w.-]*\w/[\w./-]*|\w[\w-]*\.(?:json|py|safetensors|toml)", word):
                pattern = word.strip("/").replace("NAME", "*")
                found = any(ROOT.glob(pattern)) or any(any((ROOT / place).rglob(pattern)) for place in SOURCES)
                missing += [] if found else [word]
            else:
                missing += [part for part in re.findall(r"[A-Za-z_]\w+", word) if part not in written()]
    for names, path in re.findall(r"((?:`[\w.]+`(?:, | and )?)+)\s+(?:in |\()`([\w./-]+/[\w./-]+)`", text):
        missing += [name for name in re.findall(r"\w+(?=[`(])", names) if name not in written(path)]
    assert [name for name in missing if name not in MADE] == []


def test_drafters_are_those_of_the_registry() -> None:
    page = (ROOT / "docs/drafters.md").read_text()
    table = page[page.index("| drafter | draft tokens come from |") :].split("\n\n")[0]
    listed = re.findall(r"^\| `([\w-]+)(?::(\w+))?`", table, re.MULTILINE)
    assert sorted(listed) == sorted([*((spec.name, spec.argument) for spec in drafter_specs()), (PLAIN, "")])


def test_the_hybrids_that_are_listed_are_tested() -> None:
    """They are decoded in ``tests/mmspec/test_hook.py``."""
    (listed,) = re.findall(r"recurrent layers \(([^)]+)\)", (ROOT / "README.md").read_text())
    names = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in re.split(r",\s+", listed)]
    tested = [re.sub(r"_text|[^a-z0-9]", "", name) for name in HYBRIDS]
    assert sorted(names) == sorted(tested)
