"""Code blocks of the documentation: Python runs, shell parses, and the options of every command line exist."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from shutil import copyfile

import click
import pytest

from mmspec.cli import main
from mmspec.errors import UserError
from mmspec.vision.embedded import samples
from tests.documented import PAGES, ROOT, any_path, blocks, check_command, command_lines, spans
from tests.model_folders import save_text_model

pytestmark = pytest.mark.long

__all__ = ["any_path"]


def mistake(words: list[str], *, whole: bool = True) -> str:
    """What a command refuses in a command line."""
    try:
        check_command(words, whole=whole)
    except click.ClickException as error:
        return f"{' '.join(words)}: {error.format_message()}"
    except UserError as error:
        return f"{' '.join(words)}: {error}"
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_language_and_shell_parses(page: str) -> None:
    for block in blocks(page):
        assert block.language in ("python", "sh", "json", "text")
        if block.language == "sh":
            done = subprocess.run(["sh", "-n"], input=block.code, text=True, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), f"{page}:{block.line}"


@pytest.mark.usefixtures("any_path")
@pytest.mark.parametrize("page", PAGES)
def test_options_of_documented_commands_exist(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scripts = [(f"{page}:{block.line}", block.code, True) for block in blocks(page) if block.language == "sh"]
    scripts += [(page, span, False) for span in spans(page)]
    found = [
        f"{where}: {wrong}"
        for where, code, whole in scripts
        for words in command_lines(code)
        if (wrong := mistake(words, whole=whole))
    ]
    assert found == []


PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
CLIENTS = "docs/serving.md"  # its blocks are run by tests/mmspec/serving/test_documented_clients.py
# Stand-ins for what cannot be downloaded: a model of the same class under the hub's name in the working folder.
HUB = {"HuggingFaceTB/SmolLM2-135M-Instruct": save_text_model}
FILES = {"a.png": "scene.png", "b.png": "scene.png", "scene.png": "scene.png", "clip.mp4": "clip.mp4"}
DEMO = "http://127.0.0.1:7860"
RUN = (  # commands that take seconds
    "mmspec info",
    "mmspec calibrate",
    "mmspec eval --list",
    "mmspec caption scene.png",
    "mmspec caption clip.mp4",
    "mmspec caption vision/embedded/samples/",
    "mmspec caption FOLDER --out captions.jsonl",
    "mmspec generate Work out: 37 + 48 --model tiny-hybrid",
)
LINES = sorted(
    {
        line
        for page in PAGES
        for block in blocks(page)
        if block.language == "sh"
        for words in command_lines(block.code)
        if (line := shlex.join(words)) and " ".join(words).startswith(RUN) and "ray" not in words
    }
)


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the repository's samples and a user's own files."""
    (tmp_path / "vision").symlink_to(ROOT / "vision")
    for path, sample in FILES.items():
        copyfile(samples() / sample, tmp_path / path)
    (tmp_path / "FOLDER").mkdir()
    copyfile(samples() / "scene.png", tmp_path / "FOLDER" / "scene.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PYTHON if page != CLIENTS])
def test_python_blocks_run(page: str, working_folder: Path) -> None:
    """In one process, in the order of the page; line numbers in a traceback are the page's."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    code = "\n".join(lines) + "\n"
    for name, save in HUB.items():
        if name in code:
            save(working_folder / name)
    with ExitStack() as stack:
        if DEMO in code:
            from tests.demos.serving import demo_server

            code = code.replace(DEMO, stack.enter_context(demo_server()))
        script = working_folder / "page.py"
        script.write_text(code)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize("line", LINES)
def test_quick_commands_run(line: str) -> None:
    assert main(shlex.split(line)[1:]) == 0


def test_quick_commands_are_documented() -> None:
    missing = [start for start in RUN if not any(" ".join(shlex.split(line)).startswith(start) for line in LINES)]
    assert missing == []


@pytest.mark.usefixtures("any_path")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mmspec caption a.png --draught flash", "No such option '--draught'"),
        ("FOO=1 mmspec caption a.png --nodes many", "Invalid value for '--num-draft-tokens' / '--nodes'"),
        ("mmspec train eagle4", "unknown command"),
        ("mmspec train msd --data x --model y", "Missing option '--out'"),
        ("mmspec info && mmspec caption", "Missing argument 'FILE|FOLDER'"),
        ("python -m mmspec.eval speeds", "unknown study"),
        ("OMP_NUM_THREADS=1 python -m mmspec.eval speed --pictures 3", "No such option '--pictures'"),
        ("make cake", "expected a target"),
        ("pip install -e '.[cakes]'", "expected extras"),
        ("waiting prompts -> engine", "expected a program"),
        ("mmspec info", ""),
        ("mmspec caption ...  # any", ""),
        ("mmspec caption a.png \\\n  --nodes 4", ""),
    ],
)
def test_wrong_lines_are_found(line: str, expected: str) -> None:
    found = [mistake(words) for words in command_lines(line)]
    assert expected in found[-1]
    assert bool(expected) == any(found)


@pytest.mark.usefixtures("any_path")
def test_a_name_of_a_command_may_lack_its_arguments() -> None:
    assert mistake(["mmspec", "caption"], whole=False) == ""
    assert "No such option" in mistake(["mmspec", "caption", "--draught"], whole=False)
