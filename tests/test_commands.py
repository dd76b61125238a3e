"""Every command of ``mmspec``: mistakes about paths are one line each, before any work is done."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mmspec import plugins
from mmspec.cli import main
from mmspec.cli.commands import debug_option, train
from mmspec.cli.options import Output, stack
from tests.commandline import assert_user_error, runner

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
PATHS = [
    pytest.param(names, option, id=f"{' '.join(names)} {option.opts[0]}")
    for names, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option) and isinstance(option.type, click.Path)
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
    assert (debug_option in command.params) == (names[0] != "datastore")
    shown = getattr(plugins.find("train", names[1]), "text", "") if names[0] == "train" else ""
    assert "".join(shown.split()) in "".join(text.split())
    options = text.partition("\nOptions:\n")[2]
    assert len(re.findall(r"^  -", options.partition("\n\n")[0], re.MULTILINE)) <= 10
    for option in command.params:
        if isinstance(option, click.Option):
            assert len(re.findall(rf"^  (?:-.*, )?{option.opts[0]}(?![\w-])", options, re.MULTILINE)) == 1, option.opts
        if option.name == "model" and isinstance(option, click.Option) and not option.required:
            default = plugins.default_model()
            assert option.multiple or option.get_default(click.Context(command)) == default
            assert "".join(plugins.DEFAULT_MODEL.split()) in "".join(text.split())  # lines break at hyphens, too
    for folder in ("photos", "made", "run/drafter"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("photo.jpg", "prompts.txt", "notes.txt", "data.json", "data.jsonl", "made/data.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    examples = text.partition("\nExamples:\n")[2].splitlines()
    assert len(examples) == 2
    for line in examples:
        program, *words = shlex.split(line.partition(" < ")[0])
        assert (program, *words[: len(names)]) == ("mmspec", *names)
        command.make_context(names[-1], words[len(names) :])


@pytest.mark.parametrize(
    ("name", "option", "text"),
    [
        ("tune", "prompts", "at least 7, the first is the warm-up"),
        ("serve", "max_tokens", "at most; by default the model's or 256."),
        ("demo", "models", "Embedded name, local folder, GGUF file or hub id; repeatable"),
    ],
)
def test_help_of_options(name: str, option: str, text: str) -> None:
    (found,) = (one for one in COMMANDS[name,].params if one.name == option)
    assert text in getattr(found, "help", "")


SAMPLING = """temperature=[0,] top_p=[0,1] top_k=[0,] min_p=[0,1] repetition_penalty=[0,] max_new_tokens=[1,2147483648]
    min_new_tokens=[0,2147483648] presence_penalty=0.0[-2,2] frequency_penalty=0.0[-2,2] lossy=0.0[0,]
    num_draft_tokens=[0,512] threads=[1,] max_model_len=0[0,]"""
NUMBERS = {
    "generate": SAMPLING,
    "chat": SAMPLING,
    "caption": f"{SAMPLING} frames=[1,512] fps=[0,] batch_size=8[1,] workers=1[1,]",
    "serve": """port=8000[0,65535] max_running=8[1,] max_waiting=32[0,] max_body=32[1,] max_characters=500000[1,]
        max_tokens=2048[1,] max_draft_tokens=64[0,512] max_model_len=0[0,] max_images=8[0,] max_videos=2[0,]
        max_pixels=16777216[1,] frames=8[1,512] max_video_seconds=300[1,] max_stored=256[0,] request_timeout=0[0,]
         shutdown_timeout=3[0,] prefix_cache=2048[0,] prefix_cache_size=8192[1,] replicas=1[1,] replica_gpus=1[1,]
         adapt_space=256[1,] threads=[1,]""",
    "demo": "port=7860[0,65535] adapt_space=256[1,] upload_space=2048[64,]",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_defaults_and_ranges(name: str) -> None:
    """Default, minimum and maximum of each option with a number."""
    command, found = COMMANDS[name,], set()
    for one in command.params:
        if isinstance(one.type, click.IntRange | click.FloatRange):
            given = one.get_default(click.Context(command)), one.type.min, one.type.max
            found.add("{}={}[{},{}]".format(one.name, *(n if isinstance(n, int | float) else "" for n in given)))
    assert found == set(NUMBERS[name].split())


def test_options_of_a_stack_keep_their_order() -> None:
    command = click.command()(stack(click.option("--first"), click.option("--second"))(lambda: None))
    assert [one.name for one in command.params] == ["first", "second"]


def test_commands_take_their_model_as_model() -> None:
    """It is required where the result is for one model."""
    options = {" ".join(names): {one.opts[0]: one for one in command.params} for names, command in COMMANDS.items()}
    assert {name for name, found in options.items() if "--model" not in found} == {"clean", "info"}
    required = {name for name, found in options.items() if "--model" in found and found["--model"].required}
    assert required == {"export", "datastore build"}


def test_help_lists_commands_in_sections(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for group, names in (([], plugins.names("commands")), (["train"], plugins.names("train"))):
        assert main([*group, "--help"]) == 0
        lines = capfd.readouterr().out.partition("--help")[2].splitlines()
        for name in names:
            line = next(line for line in lines if line.split()[:1] == [name])
            assert len(line.split()) > 2
            assert "From " not in line
        titles = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z][a-z ]+:", line)]
        sections = ["Decode", "Serve", "Train", "Evaluate", "Inspect"]
        assert titles == (["Data", "Drafters"] if group else sections)
        if not group:
            assert lines[lines.index("Serve:") + 1].split()[0] == "serve"
    known, groups = plugins.registered, ("commands", "train")
    installed = (EntryPoint("mine", "their.module:command", "mmspec.commands"),)
    monkeypatch.setattr(plugins, "registered", lambda group: known(group) + (installed if group in groups else ()))
    for group in ([], ["train"]):
        assert main([*group, "--help"]) == 0
        assert re.search(r"\nOther commands:\n  mine +From their\.module\.\n", capfd.readouterr().out)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ge", ["generate"]),
        ("train fl", ["flash"]),
        ("generate --max", ["--max-model-len", "--max-new-tokens"]),
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


def test_paths_are_checked_when_options_are_parsed() -> None:
    """A path is an input that must exist, or an ``Output``."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "click.Path":
                assert "exists" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"


@pytest.mark.parametrize(("names", "option"), PATHS)
def test_a_path_that_is_not_there_or_cannot_be_written(
    names: tuple[str, ...], option: click.Option, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = runner(capfd, *names)
    flag, positional = option.opts[0], POSITIONAL.get(names, [])
    if not isinstance(option.type, Output):
        out = ["--out", str(tmp_path / "out")] if any("--out" in one.opts for one in COMMANDS[names].params) else []
        assert_user_error(run(flag, "nowhere", *out, *positional), flag, "'nowhere' does not exist")
        assert list(tmp_path.iterdir()) == []
        return
    file = tmp_path / "file"
    file.touch()
    wrong = tmp_path if option.type.dir_okay is False else file
    for path in ("/proc", "/proc/none/out", "/dev/null", str(file / "out"), str(tmp_path / ("x" * 300)), str(wrong)):
        assert_user_error(run(flag, path, *positional), flag, path)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", MEASURING)
def test_a_benchmark_of_a_model_that_is_not_there(name: str, tmp_path: Path) -> None:
    command = importlib.import_module(f"eval.{name}").main
    required = ["--out", str(tmp_path / "out")] if any(one.required for one in command.params) else []
    found = CliRunner().invoke(command, ["--model", str(tmp_path / "none"), *required])
    assert found.exit_code == 2, found.exception
    assert f"Error: cannot load model '{tmp_path / 'none'}'" in found.stderr
    assert found.stderr.count("\n") == 1
