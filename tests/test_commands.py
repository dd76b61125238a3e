"""Every command of ``mmspec``: mistakes about paths are one line each, before any work is done."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mmspec import plugins
from mmspec.cli import main
from mmspec.cli.commands import train
from mmspec.cli.options import Output

ROOT = Path(__file__).parent.parent
PACKAGES = ("mmspec", "vision", "ssm", "eval", "demos")
GROUPS = ("train", "datastore")
COMMANDS = {
    **{(name,): plugins.find("commands", name) for name in plugins.names("commands") if name not in GROUPS},
    ("datastore", "build"): plugins.find("commands", "datastore").commands["build"],
    **{("train", name): train.get_command(None, name) for name in plugins.names("train")},
}
MEASURING = sorted(path.stem for path in (ROOT / "eval").glob("*.py") if '"--model"' in path.read_text())
POSITIONAL = {("datastore", "build"): [__file__], ("caption",): ["FOLDER"], ("generate",): ["TEXT"]}
OUTPUTS, INPUTS = (
    [
        pytest.param(names, option, id=f"{' '.join(names)} {option.opts[0]}")
        for names, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option)
        and isinstance(option.type, click.Path)
        and isinstance(option.type, Output) == outputs
    ]
    for outputs in (True, False)
)


def mistake(names: tuple[str, ...], args: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that ends with status 2."""
    capfd.readouterr()
    assert main([*names, *args, *POSITIONAL.get(names, [])]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


MODELS = [
    pytest.param(names, option, id=" ".join(names))
    for names, command in COMMANDS.items()
    for option in command.params
    if "--model" in option.opts and not option.required
]


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_has_groups_and_two_examples(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = COMMANDS[names]
    assert main([*names, "--help"]) == 0
    text = capfd.readouterr().out
    titles = re.findall(r"^([A-Z][a-z ]+):$", text, re.MULTILINE)
    assert [titles[0], titles[-1]] == ["Options", "Examples"]
    options = text.partition("\nOptions:\n")[2]
    assert len(re.findall(r"^  -", options.partition("\n\n")[0], re.MULTILINE)) <= 10
    for option in command.params:
        if isinstance(option, click.Option):
            assert len(re.findall(rf"^  (?:-.*, )?{option.opts[0]}(?![\w-])", options, re.MULTILINE)) == 1, option.opts
    (tmp_path / "photos").mkdir()
    (tmp_path / "made").mkdir()
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    for name in ("photo.jpg", "prompts.txt", "notes.txt", "data.json", "data.jsonl", "made/data.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    examples = text.partition("\nExamples:\n")[2].splitlines()
    assert len(examples) == 2
    for line in examples:
        program, *words = shlex.split(line.partition(" < ")[0])
        assert (program, *words[: len(names)]) == ("mmspec", *names)
        command.make_context(names[-1], words[len(names) :])


@pytest.mark.parametrize(("names", "option"), MODELS)
def test_all_commands_have_one_default_model(
    names: tuple[str, ...], option: click.Option, capfd: pytest.CaptureFixture[str]
) -> None:
    if not option.multiple:
        context = click.Context(COMMANDS[names])
        assert option.get_default(context) == plugins.default_model()
    assert main([*names, "--help"]) == 0
    shown = "".join(capfd.readouterr().out.split())  # lines break at hyphens, too
    assert "".join(plugins.DEFAULT_MODEL.split()) in shown


def test_commands_that_need_a_model_are_those_whose_result_is_for_one_model() -> None:
    required = {
        " ".join(names)
        for names, command in COMMANDS.items()
        for option in command.params
        if "--model" in option.opts and option.required
    }
    assert required == {"export", "datastore build"}
    assert {"caption", "generate", "serve", "demo", "eval", "tune", "calibrate"} <= {one.id for one in MODELS}


@pytest.mark.parametrize("group", [[], ["train"]])
def test_every_command_has_a_line_of_help(group: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*group, "--help"]) == 0
    listed = capfd.readouterr().out.partition("--help")[2]
    for name in plugins.names("train" if group else "commands"):
        line = next(line for line in listed.splitlines() if line.split()[:1] == [name])
        assert len(line.split()) > 2
        assert "From " not in line


def test_help_lists_commands_in_sections(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capfd.readouterr().out.splitlines()
    titles = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert titles == ["Options", "Decode", "Serve", "Train", "Evaluate", "Inspect"]
    assert lines[lines.index("Serve:") + 1].split()[0] == "serve"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ge", ["generate"]),
        ("train fl", ["flash"]),
        ("generate --max", ["--max-new-tokens"]),
        ("generate --model tiny-h", ["tiny-hybrid"]),
        ("demo --drafter rec", ["recycle"]),
        ("trian fl", []),
    ],
)
def test_shell_completion(
    typed: str, completed: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"mmspec {typed}"
    monkeypatch.setenv("_MMSPEC_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with suppress(SystemExit):
        main([])
    out, err = capfd.readouterr()
    assert out.split() == [f"plain,{word}" for word in completed]
    assert err == ""


@pytest.mark.parametrize("typed", [["trian"], ["serve", "--prt", "3"], ["train", "kangaro"]])
def test_a_misspelt_command_or_option(typed: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(typed) == 2
    assert "did you mean " in capfd.readouterr().err.lower()


def test_every_command_that_loads_a_model_takes_it_as_model() -> None:
    named = {names for names, command in COMMANDS.items() for one in command.params if "--model" in one.opts}
    trained = {("train", name) for name in ("tiny-llava", "smol-llava", "tiny-hybrid")}
    assert named == set(COMMANDS) - {("info",)} - trained  # of which it is the argument


def test_paths_are_checked_when_options_are_parsed() -> None:
    """A path is an input that must exist, or an ``Output``."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "click.Path":
                assert "exists" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"


@pytest.mark.parametrize(("names", "option"), OUTPUTS)
def test_an_output_that_cannot_be_written(
    names: tuple[str, ...], option: click.Option, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    wrong = tmp_path if option.type.dir_okay is False else tmp_path / "file"  # type: ignore[attr-defined]
    for path in (
        "/proc",
        "/proc/none/out",
        "/dev/null",
        str(tmp_path / "file" / "out"),
        str(tmp_path / ("x" * 300)),
        str(wrong),
    ):
        error = mistake(names, [option.opts[0], path], capfd)
        assert option.opts[0] in error
        assert path in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("names", "option"), INPUTS)
def test_an_input_that_is_not_there(
    names: tuple[str, ...], option: click.Option, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    has_out = any("--out" in one.opts for one in COMMANDS[names].params)
    error = mistake(names, [option.opts[0], "nowhere", *(["--out", str(tmp_path / "out")] if has_out else [])], capfd)
    assert option.opts[0] in error
    assert "'nowhere' does not exist" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", MEASURING)
def test_a_benchmark_of_a_model_that_is_not_there(name: str, tmp_path: Path) -> None:
    command = importlib.import_module(f"eval.{name}").main
    required = ["--out", str(tmp_path / "out")] if any(one.required for one in command.params) else []
    found = CliRunner().invoke(command, ["--model", str(tmp_path / "none"), *required])
    assert found.exit_code == 2, found.exception
    assert f"Error: cannot load model '{tmp_path / 'none'}'" in found.stderr
    assert found.stderr.count("\n") == 1
