"""The command line: output on stdout and stderr, and exit status."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GenerationConfig

import mmspec
from mmspec import plugins
from tests.commandline import Run, assert_user_error, runner
from tests.model_folders import save_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_text_model(tmp_path_factory.mktemp("models") / "text"))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command line; returns status, standard output and standard error."""
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    return runner(capfd)


def test_help_does_not_import_torch() -> None:
    code = "import sys; from mmspec.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "caption" in process.stdout


@pytest.mark.parametrize("args", [[], ["train"], ["--help"], ["generate", "--help"]])
def test_help_goes_to_stdout(run: Run, args: list[str]) -> None:
    status, out, err = run(*args)
    assert (status, err) == (0, "")
    assert out.startswith("Usage: mmspec")


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"mmspec, version {mmspec.__version__}\n", "")


def test_answer_on_stdout_and_statistics_on_stderr(run: Run, model: str) -> None:
    status, out, err = run("generate", "Describe", "--model", model, "--max-new-tokens", "12")
    expected = mmspec.load(model, drafter=None).generate("Describe", max_new_tokens=12)
    assert status == 0
    assert out.rstrip("\n") == expected.text.rstrip("\n")
    assert err.count("\n") == 1
    for figure in (f"{len(expected.token_ids)} tokens", "mean acceptance length", "drafter recycle", "steps"):
        assert figure in err


@pytest.mark.parametrize(
    ("nodes", "expected"), [("0", "| drafter ngram (nothing drafted) |"), ("4", "| drafter ngram |")]
)
def test_figures_say_whether_anything_was_drafted(run: Run, model: str, nodes: str, expected: str) -> None:
    prompt = " one two three" * 8
    _, _, err = run(
        "generate", prompt, "--model", model, "--drafter", "ngram", "--nodes", nodes, "--max-new-tokens", "9"
    )
    assert expected in err


def test_json_is_one_object(run: Run, model: str) -> None:
    args = ("generate", "A red circle", "--model", model, "--max-new-tokens", "9", "--drafter", "ngram", "--nodes", "4")
    status, out, err = run(*args, "--json")
    expected = mmspec.load(model, drafter=None).generate("A red circle", max_new_tokens=9)
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert list(answer) == ["text", "token_ids", "finish_reason", "model", "drafter", "stats"]
    assert answer["token_ids"] == expected.token_ids
    assert answer["text"] == expected.text
    assert answer["finish_reason"] == expected.finish_reason
    assert answer["drafter"] == "ngram"
    assert answer["stats"]["num_generated_tokens"] == len(expected.token_ids)


def test_no_drafter_is_null(run: Run, model: str) -> None:
    _, out, _ = run("generate", "A", "--model", model, "--max-new-tokens", "3", "--drafter", "none", "--json")
    assert json.loads(out)["drafter"] is None


def test_seed_repeats_a_sampled_answer(run: Run, model: str) -> None:
    args = ("generate", "A", "--model", model, "--max-new-tokens", "20", "--temperature", "1", "--nodes", "4", "--json")
    first, again, other = (json.loads(run(*args, "--seed", seed)[1])["token_ids"] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_stop_string(run: Run, model: str) -> None:
    args = ("generate", "A", "--model", model, "--max-new-tokens", "60", "--json")
    text = json.loads(run(*args)[1])["text"]
    stopped = json.loads(run(*args, "--stop", text[10:12], "--stop", "never said")[1])
    assert stopped["text"] == text[: text.index(text[10:12])]
    assert stopped["finish_reason"] == "stop"


def test_compare_reports_speeds_and_equality(run: Run, model: str) -> None:
    args = ("generate", "A", "--model", model, "--max-new-tokens", "10", "--compare")
    _, out, err = run(*args)
    assert "plain decoding" in err
    assert "tokens: equal" in err
    assert "decoding" not in out
    compared = json.loads(run(*args, "--json")[1])["compare"]
    assert compared["equal"] is True
    assert compared["decode_ratio"] > 0
    assert compared["end_to_end_ratio"] > 0


def test_compare_of_sampled_answers_claims_no_equal_tokens(run: Run, model: str) -> None:
    args = ("generate", "A", "--model", model, "--max-new-tokens", "5", "--compare", "--temperature", "0.8")
    assert "equal in distribution" in run(*args)[2]
    assert json.loads(run(*args, "--json")[1])["compare"]["equal"] is None
    assert json.loads(run(*args, "--json", "--seed", "3")[1])["compare"]["equal"] is True


def test_prompt_from_stdin(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("--model", model, "--max-new-tokens", "5", "--json")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Ein größeres Quadrat\n".encode())))
    given = json.loads(run("generate", "-", *args)[1])
    assert given["token_ids"] == json.loads(run("generate", "Ein größeres Quadrat\n", *args)[1])["token_ids"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"A\xff")))
    assert_user_error(run("generate", "-", *args), "UTF-8", "0xff")


def test_calibrate_prints_the_table(run: Run, model: str) -> None:
    measured = json.loads(run("calibrate", "--model", model, "--json")[1])
    stored = json.loads(run("calibrate", "--model", model, "--json")[1])
    assert [row["nodes"] for row in measured["table"]] == sorted(row["nodes"] for row in measured["table"])
    assert measured["table"][0] == {**measured["table"][0], "nodes": 1, "ratio": 1.0}
    assert stored["table"] == measured["table"]
    assert json.loads(run("calibrate", "--model", model, "--json", "--refresh")[1])["table"] != measured["table"]
    status, out, err = run("calibrate", "--model", model)
    assert (status, err) == (0, "")
    assert "t(N)/t(1)" in out


def test_info_lists_registered_plug_ins(run: Run) -> None:
    facts = json.loads(run("info", "--json")[1])
    assert {"text", "vision"} <= {target["name"] for target in facts["targets"]}
    assert {"ngram", "recycle", "small"} <= {drafter["name"] for drafter in facts["drafters"]}
    assert "tiny-llava" in {embedded["name"] for embedded in facts["models"]}
    assert facts["devices"][0]["name"] == "cpu"
    status, out, _ = run("info")
    assert status == 0
    assert facts["packages"]["torch"] in out


def test_info_shows_problems_without_the_names_of_exceptions(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(name: str) -> str:
        raise RuntimeError(f"{name} is damaged\nmore")

    monkeypatch.setattr("mmspec.plugins.model_path", broken)
    status, out, _ = run("info", "here")
    assert status == 0
    assert "here: here is damaged " in out
    assert "more" not in out
    assert "Error" not in out


def test_a_comparison_shows_progress_in_a_log(run: Run, model: str) -> None:
    status, out, err = run("generate", "A", "--model", model, "--max-new-tokens", "3", "--compare", "--json")
    assert (status, json.loads(out)["compare"]["rounds"]) == (0, 3)
    shown = [line.rpartition(", ")[0] for line in err.splitlines() if line.startswith("comparing")]
    assert shown == ["comparing with plain decoding: 0/8", "comparing with plain decoding: 8/8"]


def test_info_shows_the_sampling_defaults_of_a_model(run: Run, model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    defaults = {"repetition_penalty": 1.2, "suppress_tokens": [3]}
    GenerationConfig(eos_token_id=2, do_sample=True, temperature=0.5, **defaults).save_pretrained(folder)
    (facts,) = json.loads(run("info", str(folder), "--json")[1])["models"]
    assert facts["generation_config"] == {"temperature": 0.5, **defaults}
    shown = " ".join(run("info", str(folder))[1].split())
    assert "defaults of requests:" in shown
    assert "repetition_penalty 1.2" in shown
    (folder / "generation_config.json").write_text("{")
    (damaged,) = json.loads(run("info", str(folder), "--json")[1])["models"]
    assert "generation_config.json" in damaged["problem"]
    (missing,) = json.loads(run("info", str(tmp_path / "none"), "--json")[1])["models"]
    assert missing["problem"].startswith("expected a model in")


def test_drafters_of_a_model(run: Run) -> None:
    found = json.loads(run("info", "tiny-llava", "--drafters", "--json")[1])["drafters"]
    assert [entry["name"] for entry in found if entry["ready"]] == ["flash", "msd", "recycle", "ngram", "suffix"]
    assert [entry["name"] for entry in found if entry.get("default")] == ["flash"]
    trained = {entry["name"]: entry["train"] for entry in found if not entry["ready"]}
    assert trained["eagle3"] == "mmspec train eagle3 --model tiny-llava"
    assert trained["mtp"] is None
    status, out, _ = run("info", "tiny-llava", "--drafters")
    words = " ".join(out.split())
    assert status == 0
    assert words.startswith("at hand flash (default): MSD's small trained layer with compressed images")
    assert words.index("with a checkpoint") < words.index("mmspec train eagle3 --model tiny-llava")
    assert_user_error(run("info", "--drafters"), "--drafters needs a model: expected mmspec info MODEL --drafters")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["describe"], ["unknown command", "generate", "'describe'"]),
        (["train", "gpt"], ["unknown command", "'gpt'"]),
        (["generat"], ["unknown command", "'generat'; did you mean generate?"]),
        (["generate", "A", "--max-tokens", "3"], ["--max-tokens", "Did you mean", "'--max-new-tokens'"]),
        (["generate"], ["TEXT"]),
        (["generate", ""], ["TEXT must not be empty"]),
        (["generate", "\udcff"], ["UTF-8"]),
        (["generate", "A", "--bogus"], ["--bogus"]),
        (["generate", "A", "--top-p", "2"], ["--top-p", "must be in (0, 1]: got 2.0"]),
        (["generate", "A", "--top-p", "0"], ["--top-p"]),
        (["generate", "A", "--temperature", "-1"], ["--temperature", "-1"]),
        (["generate", "A", "--temperature", "nan"], ["--temperature", "nan"]),
        (["generate", "A", "--temperature", "inf"], ["--temperature", "inf"]),
        (["generate", "A", "--min-p", "1.5"], ["--min-p"]),
        (["generate", "A", "--repetition-penalty", "0"], ["--repetition-penalty"]),
        (["generate", "A", "--max-new-tokens", "0"], ["--max-new-tokens", "0"]),
        (["generate", "A", "--max-new-tokens", "many"], ["--max-new-tokens", "'many'"]),
        (["generate", "A", "--nodes", "-1"], ["--num-draft-tokens"]),
        (["generate", "A", "--seed", str(1 << 64)], ["--seed"]),
        (["generate", "A", "--dtype", "int3"], ["--dtype", "'int3'", "bfloat16"]),
    ],
)
def test_user_errors_found_without_a_model(run: Run, args: list[str], expected: list[str]) -> None:
    assert_user_error(run(*args), *expected)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--stop", ""], ["stop must be", "none of them empty"]),
        (["--device", "toaster"], ["device", "'toaster'"]),
        (["--device", "meta"], ["device", "'meta'"]),
        (["--drafter", "psychic"], ["unknown drafter", "ngram", "'psychic'"]),
        (["--drafter", "small"], ["small:MODEL"]),
        (["--drafter", "small:./nowhere"], ["small:./nowhere"]),
        (["--drafter", "ngram:x"], ["ngram", "'x'"]),
    ],
)
def test_user_errors_about_model_and_drafter(run: Run, model: str, args: list[str], expected: list[str]) -> None:
    assert_user_error(run("generate", "A", "--model", model, *args), *expected)


def test_drafter_of_another_vocabulary(run: Run, model: str, tmp_path: Path) -> None:
    other = save_text_model(tmp_path / "other", vocab=400)
    command = ("generate", "A", "--model", model, "--max-new-tokens", "8")
    answers = [run(*command, "--drafter", drafter) for drafter in ("none", f"small:{other}")]
    assert [status for status, _, _ in answers] == [0, 0]
    assert answers[0][1].splitlines()[0] == answers[1][1].splitlines()[0]
    for file in Path(other).glob("token*"):
        file.unlink()
    assert_user_error(run(*command, "--drafter", f"small:{other}"), "vocabulary", "400", "320")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "", "/" + "x" * 5000])
def test_a_missing_path(run: Run, name: str) -> None:
    assert_user_error(run("generate", "A", "--model", name), "no such folder", "tiny-llava")


def test_damaged_models(run: Run, model: str, tmp_path: Path) -> None:
    for name in ("empty", "config", "weights"):
        (tmp_path / name).mkdir()
    (tmp_path / "config" / "config.json").write_text("{")
    weights = Path(model, "model.safetensors").read_bytes()
    (tmp_path / "weights" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (tmp_path / "weights" / "config.json").write_bytes(Path(model, "config.json").read_bytes())
    for name in ("empty", "config", "weights"):
        assert_user_error(run("generate", "A", "--model", str(tmp_path / name)), str(tmp_path / name))


class Other:
    """What a pickle may hold besides tensors."""


@pytest.mark.parametrize("damage", ["other", "cut", "empty"])
def test_pickled_weights_that_are_not_tensors_alone(run: Run, model: str, tmp_path: Path, damage: str) -> None:
    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_bytes(Path(model, "config.json").read_bytes())
    weights, file = load_file(Path(model, "model.safetensors")), folder / "pytorch_model.bin"
    torch.save({**weights, "more": Other()} if damage == "other" else weights, file)
    if damage != "other":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 if damage == "cut" else 0])
    result = run("generate", "A", "--model", str(folder))
    assert_user_error(result, str(folder), "pickled tensors and nothing else")
    assert "weights_only" not in str(result)


@pytest.mark.parametrize("part", ["up_proj", "lm_head", "embed_tokens"])
def test_weights_that_are_nan(run: Run, model: str, tmp_path: Path, part: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "nan"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if part in name)
    weights[name][:] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_user_error(run("generate", "A", "--model", str(folder)), "NaN", name)


def test_checkpoint_without_all_its_weights(run: Run, model: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(Path(model, "model.safetensors"))
    lost = next(name for name in state if "up_proj" in name)
    for folder, changed in (
        ("lacking", {name: value for name, value in state.items() if name != lost}),
        ("misshapen", {**state, lost: state[lost][1:].contiguous()}),
    ):
        (tmp_path / folder).mkdir()
        save_file(changed, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / folder / "config.json").write_bytes(Path(model, "config.json").read_bytes())
        assert_user_error(run("generate", "A", "--model", str(tmp_path / folder)), lost)


def test_internal_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: str | None) -> None:
        raise RuntimeError("two\nlines \x1b[31m")

    monkeypatch.setattr("mmspec.cli.info.collect", broken)
    monkeypatch.delenv("MMSPEC_DEBUG", raising=False)
    status, out, err = run("info")
    assert (status, out) == (1, "")
    assert err == "internal error: RuntimeError: two lines \\x1b[31m (--debug shows where)\n"
    monkeypatch.setenv("MMSPEC_DEBUG", "1")
    assert "Traceback" in run("info")[2]


def test_closed_pipe_ends_quietly(model: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from mmspec import progress; progress.SLOW = 1e6; from mmspec.cli import main; sys.exit(main())"
    args = ["generate", "A", "--model", model, "--max-new-tokens", "20"]
    process = subprocess.run([sys.executable, "-c", code, *args], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")


def test_interrupt_during_imports() -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'mmspec.cli.commands':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from mmspec.cli import main; sys.exit(main(['info']))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (130, "interrupted\n")


def test_interrupt() -> None:
    # The command is interrupted while it reads its standard input.
    code = (
        "import os, signal, sys; from mmspec.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "class Input:\n"
        "    closed = False\n"
        "    buffer = property(lambda self: os.kill(os.getpid(), signal.SIGINT))\n"
        "sys.stdin = Input()\n"
        "sys.exit(main(['generate', '-']))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr.strip()) == (130, "interrupted")


def test_embedded_models_state_what_they_were_trained_on(run: Run, model: str) -> None:
    args = ("generate", "A", "--max-new-tokens", "2", "--nodes", "0", "--json", "--model")
    for name in ("tiny-llava", "tiny-hybrid"):
        limits = plugins.limits(name)
        assert limits is not None
        status, out, err = run(*args, name)
        assert (status, err) == (0, f"note: {limits}\n")
        assert json.loads(out)["model"] == name
    assert plugins.limits(model) is None
    assert run(*args, model)[2] == ""


def test_options_that_are_left_out_are_the_models(run: Run, model: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    file = folder / "generation_config.json"
    config = json.loads(file.read_text())

    def answer(*options: str) -> list[int]:
        args = ("generate", "A", "--model", str(folder), "--nodes", "4", "--json", *options)
        return json.loads(run(*args)[1])["token_ids"]

    plain = answer("--max-new-tokens", "7")
    file.write_text(json.dumps({**config, "suppress_tokens": plain[:1], "max_new_tokens": 7}))
    own = answer()
    assert len(own) == 7
    assert plain[0] not in own
    assert answer("--generation-config", "mmspec", "--max-new-tokens", "7") == plain
