"""``python -m mmspec.eval bench``: results of given times, on a fake clock, and small runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import wraps
from itertools import product
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig

import mmspec
from mmspec.core.tree import TokenTree
from mmspec.drafters.recycle import Recycle
from mmspec.errors import UserError
from mmspec.eval import bench
from mmspec.eval.bench import busy_programs, conditions_of, load_requests, measure, rows_of
from mmspec.eval.harness import timing
from mmspec.eval.harness.timing import DecodingOptions, wait_for_huge_pages
from mmspec.eval.suite.methods import PLAIN, parse_methods
from mmspec.ops import cpu, cpu_library
from mmspec.targets.decoder import Decoder
from mmspec.targets.packing import pack_model, weights_kind
from mmspec.targets.transformers_target import TransformersTarget
from tests.compiled import needs_kernels
from tests.eval.llama_server import STEP, install
from tests.mmspec.targets.test_packed_forward import model_of
from tests.model_folders import save_gguf, save_text_model

SECONDS = {"prefill": 100.0, "begin": 20.0, "propose": 5.0, "verify": 3.0, "commit": 1.0}
REQUESTS = [{"prompt": "Describe the image."}, {"prompt": "A red circle"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_text_model(tmp_path_factory.mktemp("text")))


def conditions(folder, methods, sizes=(1,), sampled=False):
    pipes = {"auto": mmspec.load(folder, drafter=None)}
    return conditions_of(pipes, methods, [torch.get_num_threads()], [0], sizes, lambda count: {}, sampled)


def measured(conditions, requests, rounds, *options):
    measure(conditions, {"bench": requests}, rounds, DecodingOptions(*options))
    return {(row["batch"], row["method"]): row for row in rows_of(conditions)}


def run(*options, status=0):
    done = CliRunner().invoke(bench.main, list(map(str, options)))
    assert done.exit_code == status, done.output
    return done.output if status else json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------ answers


def test_every_second_is_attributed_to_a_phase(folder, monkeypatch):
    now = [0.0]
    for module in ("engine.core", "engine.sequence", "eval.harness.timing"):
        monkeypatch.setattr(f"mmspec.{module}.clock", lambda: now[0])
    monkeypatch.setattr("mmspec.engine.stats.perf_counter", lambda: now[0])

    def timed(call, seconds):
        @wraps(call)
        def longer(*arguments, **keywords):
            now[0] += seconds
            return call(*arguments, **keywords)

        return longer

    for name, seconds in SECONDS.items():
        owner = next(kind for kind in (Recycle, Decoder, TransformersTarget) if hasattr(kind, name))
        monkeypatch.setattr(owner, name, timed(getattr(owner, name), seconds))
    found = conditions(folder, "new:recycle@6")
    rows = measured(found, REQUESTS, 3, 9)
    for name, method in ((PLAIN, "none"), ("recycle", "new:recycle@6")):
        for record in found[0].records:
            result = record["turns"][0]["methods"][method]
            (stats,), (spent, *_) = result["stats"], result["seconds"]
            steps = stats["num_spec_steps"]
            # The drafter's prefill comes after the first token: it counts as drafting, and as decoding.
            drafting = spent["draft"] - (0.0 if name == PLAIN else SECONDS["begin"])
            # No tree is drafted when one token is left.
            assert drafting in ((0.0,) if name == PLAIN else (steps * 5.0, (steps - 1) * 5.0))
            assert result["seconds"] == [spent] * 3
            assert spent == {
                "total": 100.0 + spent["draft"] + steps * (3.0 + 1.0),
                "decoding": spent["draft"] + steps * (3.0 + 1.0),
                "tower": 0.0,
                "prefill": 100.0,
                "draft": spent["draft"],
                "verify": steps * 3.0,
                "commit": steps * 1.0,
                "tree": 0.0 if name == PLAIN else 5.0,
                "pass": 3.0,
            }
        row = rows[1, method]
        assert (row["tokens"], row["equal"], row["compared"]) == (18, 2, 2)
        assert sum(row["shares"].values()) == pytest.approx(1)
    assert (row["draft_cost"], row["verify_cost"]) == (5 / 3, 1.0)
    assert rows[1, PLAIN]["draft_cost"] is None  # plain decoding has drafted none
    assert row["output_tokens_per_second"] == pytest.approx(18 / (200 / row["shares"]["prefill"]))
    assert row["decoding_tokens_per_second"] == pytest.approx(16 / (200 / row["shares"]["prefill"] - 200))


def test_an_answer_must_be_equal_in_all_rounds(folder, monkeypatch):
    found, real, calls = conditions(folder, "generate", sizes=(1, 2)), bench.decode, []

    def changed(pipe, method, *rest, **options):
        batch = real(pipe, method, *rest, **options)
        calls.append(method.name)
        batch.answers[-1][-1] += len(calls) in (3, 9)  # plain decoding's in the second round, and in the batch's first
        return batch

    monkeypatch.setattr(bench, "decode", changed)
    rows = measured(found, REQUESTS, 2, 5)
    assert calls == ["generate", "none", "none", "generate"] * 2 + ["none"] * 2
    assert {key: row["equal"] for key, row in rows.items()} == {(1, "generate"): 2, (1, "none"): 1, (2, "none"): 1}


def test_answers_are_compared_within_a_form_of_the_weights(folder, monkeypatch):
    real = bench.decode

    def decode(pipe, *rest, **options):
        batch = real(pipe, *rest, **options)
        return replace(batch, answers=[[token + (pipe.name == "int4") for token in one] for one in batch.answers])

    monkeypatch.setattr(bench, "decode", decode)
    pipes = {name: mmspec.load(folder, drafter=None) for name in ("float32", "int4")}
    pipes["int4"].name = "int4"
    found = conditions_of(pipes, "ngram", [1], [0], [1], lambda count: {}, False)
    measure(found, {"bench": REQUESTS}, 1, DecodingOptions(5))
    rows = rows_of(found)
    assert [(row["dtype"], row["equal"]) for row in rows] == [("float32", 2)] * 2 + [("int4", 2)] * 2


@pytest.mark.parametrize(
    ("answer", "place"),
    [([5, 6], None), ([5, 6, 0], None), ([5, 7], 1), ([4, 6], 0), ([5], 1), ([5, 6, 7], 2), ([0], 0), ([1], 0)],
)
def test_the_first_other_token_of_an_answer(answer, place):
    """Without end-of-sequence tokens, of which a model may have several."""
    assert bench.difference(answer, [5, 6, 1], [0, 1]) == place


class CountingDrafter(Recycle):
    """Drafts no tokens, so every step emits one token."""

    steps = 0

    def propose(self, token, budget):
        return TokenTree.root(token)

    def observe(self, tree, verdict, output):
        self.steps += 1


def test_drafters_learn_each_request_once_and_share_the_model(folder, monkeypatch):
    (found,) = conditions(folder, "new:recycle")
    monkeypatch.setattr(type(found.pipe.model), "__deepcopy__", lambda *_: pytest.fail("copied"), raising=False)
    found.methods[1].drafter = CountingDrafter()
    measure([found], {"bench": REQUESTS}, 4, DecodingOptions(20))
    assert found.methods[1].drafter.steps == 2 * 19
    policy = found.methods[1].policy
    measure([found], {"bench": REQUESTS}, 2, DecodingOptions(5))
    assert found.methods[1].policy is policy is not None  # which learns, too


def test_a_run_over_batch_sizes(folder, tmp_path, monkeypatch):
    """Each batch size decodes as many sequences at once; a file's first requests warm up."""
    widest: dict[Any, int] = {}
    verify = TransformersTarget.verify

    def counted(target, tree, *rest, **more):
        widest[target] = max(widest.get(target, 0), len(tree.tokens))
        return verify(target, tree, *rest, **more)

    monkeypatch.setattr(TransformersTarget, "verify", counted)
    (tmp_path / "prompts.txt").write_text("".join(f"one two {number} two\n" for number in range(5)))
    options = ["--requests", tmp_path / "prompts.txt", "--warm-up", 1, "--rounds", 1, "--max-new-tokens", 12]
    options += ["--batch-sizes", "1,3", "--methods", "generate,ngram@2,ngram", "--out", tmp_path / "out.json"]
    result = run("--model", folder, *options)
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert {1, 3} == set(widest.values())
    rows = result["rows"]
    own = [PLAIN, "ngram@2", "ngram"]
    assert [(row["batch"], row["method"]) for row in rows] == [(1, "generate"), *product((1, 3), own)]
    assert [(row["equal"], row["compared"]) for row in rows] == [(4, 4)] * 7
    plain, fixed = rows[4], rows[5]
    assert (plain["acceptance"]["mean_acceptance_length"], plain["acceptance"]["nodes_per_step"]) == (1, 0)
    speeds = [row["output_tokens_per_second"] for row in (fixed, plain)]
    assert fixed["end_to_end_plain"]["median"] == pytest.approx(speeds[0] / speeds[1])
    assert 0 < fixed["acceptance"]["nodes_per_step"] <= 2
    assert result["dtype"] == "float32"
    message = "expected more than 5 requests, the first of which warm up"
    assert message in run("--model", folder, *options, "--warm-up", 5, status=2)


def test_samples_of_a_seed_are_compared_within_a_batch_size(folder):
    rows = measured(conditions(folder, "generate,new:recycle@3", (1, 2), sampled=True), REQUESTS, 1, 9, 1.0)
    assert {key: row["equal"] for key, row in rows.items()} == {
        (size, name): 2 for size in (1, 2) for name in (PLAIN, "new:recycle@3")
    }


def test_answers_beside_a_server_and_busy_programs(tmp_path, monkeypatch):
    """By numbers of threads and sets of requests; of llama.cpp's answers, the first other token is reported."""
    file, program = save_gguf(tmp_path / "text.gguf"), install(tmp_path)
    running: list[tuple[int, int]] = []
    real = bench.decode

    def decode(*rest, **more):
        running.append((len(loops()), torch.get_num_threads()))
        return real(*rest, **more)

    monkeypatch.setattr(bench, "decode", decode)
    options = ["--dtypes", "float32", "--threads", "1,2", "--busy", "0,1", "--methods", "llama.cpp", "--rounds", 1]
    options += ["--requests", "prompts:2", "--depths", "30,50", "--warm-up", 0]
    options += ["--max-new-tokens", 4]
    before = torch.get_num_threads()
    rows = run("--model", file, *options, "--peer", f"llama.cpp={program}")["rows"]
    assert torch.get_num_threads() == before
    conditions = [(row["threads"], row["busy"]) for row in rows[:8] if row["method"] == "llama.cpp"]
    assert sorted(conditions) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert set(running) == {(0, 1), (0, 2), (1, 1), (1, 2)}
    counts = {"depth 30": 1, "depth 50": 1, "prompts:2": 2}
    assert [row["task"] for row in rows] == [task for task in counts for _ in range(8)]
    assert [(row["equal"], row["compared"]) for row in rows[16:]] == [(2, 2), (0, 0)] * 4
    assert rows[1]["decoding_tokens_per_second"] == pytest.approx(1 / STEP)
    log = [json.loads(line) for line in program.with_suffix(".jsonl").read_text().splitlines()]
    assert [one["--threads"] for one in log if "--threads" in one] == ["1", "2"]
    sent = [one["prompt"] for one in log if "prompt" in one]
    assert [len(prompt) for prompt in sent[:8]] == [30] * 4 + [50] * 4
    assert rows[1]["prefill_tokens_per_second"] == pytest.approx(30 / rows[1]["time_to_first_token"])
    assert [row["differs_at"] for row in rows[16::2]] == [[None] * 2] * 4
    assert [row["differs_at"] for row in rows[17::2]] == [[0] * 2] * 4  # the program counts up
    assert loops() == []


def test_drafts_that_are_right_at_a_set_rate():
    """Of images of one size and question, each has its own answer."""
    options = ["--requests", "images:6", "--warm-up", 1, "--rounds", 2, "--max-new-tokens", 24]
    result = run("--methods", "msd@chain4", "--acceptance", "0.5,1", *options)
    plain, half, whole = result["rows"]
    assert (result["set_acceptance"], half["method"], whole["method"]) == (
        [0.5, 1],
        "msd@chain4 at 0.5",
        "msd@chain4 at 1",
    )
    assert [(row["equal"], row["compared"]) for row in result["rows"]] == [(6, 6)] * 3
    assert (whole["acceptance"]["draft_acceptance_rate"], whole["acceptance"]["num_spec_steps"]) == (1, 6 * 5)
    assert half["acceptance"]["acceptance_by_position"][0] == pytest.approx(0.5, abs=0.12)
    assert min(row["shares"]["tower"] for row in (plain, half, whole)) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "recycle", "--acceptance", "0.5"], "needs drafters with a network, such as mtp: got 'recycle'"),
        (["--acceptance", "0.5", "--batch-sizes", "1,2"], "one request at a time: expected --batch-sizes 1"),
        (["--acceptance", "0"], "0.0 is not in the range 0<x<=1"),
        (["--requests", "images"], "requests must be a file or SET:COUNT, separated by commas: got 'images'"),
        (["--requests", "prompts:0"], "requests must be a file or SET:COUNT, separated by commas: got 'prompts:0'"),
        (["--requests", "prompt:3"], "unknown held-out set: expected one of clips, .*; did you mean prompts"),
        (["--requests", "prompts:97"], "expected at most 96 held-out prompts, got 97"),
        (["--methods", "nobody"], "unknown drafter"),
        (["--busy", "-1"], "-1 is not in the range x>=0"),
        (["--models", "a,b", "--divergence"], "--peer and --divergence need one model: got 2"),
        (["--models", "a,b,c", "--peer", "llama.cpp=x"], "--peer and --divergence need one model: got 3"),
    ],
)
def test_mistakes_are_one_line(options, message, folder):
    output = run("--model", folder, "--methods", "none", *options, status=2)
    assert re.search(message, output), output


def test_requests_of_held_out_sets():
    first, measured = load_requests("images:2, clips:1,prompts:1", 9, visual=True)
    assert len(first) == 9
    assert [sorted(request) for request in measured] == [["images", "prompt"]] * 2 + [["prompt", "videos"], ["prompt"]]
    assert len(measured[2]["videos"][0].frames) == 8
    texts, none = load_requests("", 2, visual=False)
    assert ([list(request) for request in first + texts], none) == ([["prompt", "images"]] * 9 + [["prompt"]] * 2, [])


def test_a_prompt_of_a_length_is_at_most_the_package_s_source(folder):
    pipe = mmspec.load(folder, drafter=None)
    with pytest.raises(UserError) as refused:
        bench.text_of(pipe, 9999999)
    message = r"--depths with --methods must be at most (\d+) for this model: got 9999999"
    most = int(re.fullmatch(message, str(refused.value))[1])
    assert pipe.encode([bench.text_of(pipe, most)]).input_ids.shape[1] == pytest.approx(most, abs=2)
    with pytest.raises(UserError, match=f"got {most + 1}"):
        bench.text_of(pipe, most + 1)


def test_requests_of_models_of_texts_and_of_images_by_default(folder, monkeypatch):
    def read(*given):
        raise UserError(f"read {given}")

    monkeypatch.setattr(bench, "load_requests", read)
    assert "read ('prompts:16', 4, False)" in run("--model", folder, "--methods", "none", status=2)
    assert "read ('images:24,clips:8', 4, True)" in run("--methods", "none", status=2)  # of tiny-llava


# ------------------------------------------------------------------ busy programs and interleaving


def loops() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "getppid" in " ".join(child.cmdline())]


def test_busy_programs_end_with_the_block():
    with pytest.raises(ValueError, match="stopped"), busy_programs(2):  # noqa: PT012
        assert len(loops()) == 2
        raise ValueError("stopped")
    assert loops() == []


def test_busy_programs_end_with_a_process_that_is_killed():
    """Even before they have begun."""
    program = f"import os, subprocess, sys\ncommand = [sys.executable, '-S', '-c', {bench._LOOP!r}, str(os.getpid())]\n"
    program += "print(subprocess.Popen(command).pid, flush=True)\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120)
    left = int(done.stdout)
    psutil.wait_procs([psutil.Process(left)] if psutil.pid_exists(left) else [], timeout=60)
    assert not psutil.pid_exists(left)


def test_passes_are_timed_once_weights_are_in_huge_pages():
    ended = threading.Event()
    threading.Thread(target=lambda: (time.sleep(0.3), ended.set()), name=cpu.MOVER).start()
    wait_for_huge_pages()
    assert ended.is_set()


# ------------------------------------------------------------------ passes


def test_divergences_are_of_the_model_from_its_float32_weights(folder):
    pipe, exact = (mmspec.load(folder, drafter=None) for _ in range(2))
    with torch.no_grad():
        pipe.model.lm_head.weight *= 0.7
        ids = exact.processor.tokenizer(bench._TEXT.read_text(), return_tensors="pt")["input_ids"][:, :400]
        p, q = (one.model(ids).logits.double().softmax(-1) for one in (exact, pipe))
    expected = float((p * (p / q).log()).sum(-1).mean())
    assert bench.divergences(folder, {"a": exact, "b": pipe}) == pytest.approx({"a": 0, "b": expected}, abs=1e-5)
    assert pipe.target.runner.rows == 0


def test_rows_of_passes_have_medians_of_ratios_within_a_round():
    times = {"prefill": [1.0, 2.0], 1: [2.0, 4.0], 8: [3.0, 10.0], timing.READ: [1.0, 2.0]}
    found = {(2, 512, "int4", part): seconds for part, seconds in times.items()}
    found |= {(1, depth, "int8", part): [depth / 4] for depth in (9, 6) for part in ("prefill", 1)}
    *others, _, _, _ = rows = bench.pass_rows(found, (1, 8))
    assert [(row["threads"], row["depth"], row["milliseconds"], row["prefill"], row["read"]) for row in others] == [
        (1, depth, 250 * depth, 4, None) for depth in (6, 9)
    ]
    where = {"threads": 2, "depth": 512}
    assert [{name: value for name, value in row.items() if value is not None} for row in rows[2:]] == [
        {**where, "dtype": "int4", "nodes": 1, "milliseconds": 3000, "least": 2000, "passes": 1, "read": 2}
        | {"prefill": 512 / 1.5},
        {**where, "dtype": "int4", "nodes": 8, "milliseconds": 6500, "least": 3000, "passes": 2, "read": 4},
        {**where, "dtype": "int4", "nodes": "read", "milliseconds": 1500, "least": 1000, "passes": 0.5},
    ]
    assert bench.pass_rows({(1, 9, "int4", 8): [3.0], (1, 9, "int4", "prefill"): [1.0]}, (8,))[0]["passes"] is None


@needs_kernels
def test_a_read_takes_all_packed_weights(monkeypatch):
    counts: list[int] = []
    model = model_of(LlamaConfig, vocab_size=2000, max_position_embeddings=1024)
    pack_model(model, "bfloat16")
    functions = SimpleNamespace(read_bytes=lambda _, count, threads: counts.append(count))
    monkeypatch.setattr(cpu_library, "functions", lambda: functions)
    read = timing.read_weights(TransformersTarget(model))
    assert read is not None
    assert read > 0
    layer = 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 96
    assert sum(counts) == 2 * (3 * layer + 64 * 2000)
    assert timing.read_weights(TransformersTarget(model_of(LlamaConfig))) is None


@needs_kernels
def test_a_run_of_passes(tmp_path):
    file = save_gguf(tmp_path / "text.gguf")
    options = ["--dtypes", "bfloat16,float32", "--depths", "4,12", "--nodes", "1,2", "--rounds", 1, "--divergence"]
    result = run("--model", file, *options)
    rows = result["rows"]
    assert result["equal"] == {"bfloat16": True, "float32": True}
    assert result["divergence"]["float32"] == pytest.approx(0, abs=1e-6)
    assert 0 < result["divergence"]["bfloat16"] < 0.1
    parts = [*(("bfloat16", part) for part in (1, 2, "read")), ("float32", 1), ("float32", 2)]
    found = sorted((row["depth"], row["dtype"], str(row["nodes"])) for row in rows)
    assert found == [(depth, name, str(part)) for depth in (4, 12) for name, part in parts]
    for row in rows:
        assert min(value for value in row.values() if isinstance(value, float)) >= 0
        assert (row.get("prefill", 0) > 0) == (row["nodes"] == 1)
    for name, value, message in (
        ("--peer", "llama.cpp=x", "--peer needs --methods: other engines answer requests"),
        ("--acceptance", "0.5", "--acceptance needs --methods, one request at a time"),
    ):
        assert message in run("--model", file, name, value, status=2)


@needs_kernels
def test_a_run_of_passes_of_several_models_and_forms_of_keys(tmp_path):
    file, config = save_gguf(tmp_path / "text.gguf"), tmp_path / "shape.json"
    model_of(LlamaConfig).config.to_json_file(config)
    options = ["--kv-cache-dtypes", "auto,int8", "--nodes", 1, "--rounds", 1, "--busy", "0,1"]
    result = run("--models", f"{file},{config}", "--dtypes", "bfloat16,int4", *options)
    names = [" ".join(name) for name in product(("text", "shape"), ("bfloat16", "int4"), ("auto", "int8"))]
    assert result["model"] == f"{file}, {config}"
    assert (result["equal"], result["divergence"]) == (dict.fromkeys(names, True), {})
    found = [(row["busy"], row["dtype"], row["depth"], row["threads"]) for row in result["rows"] if row["nodes"] == 1]
    assert sorted(found) == sorted((busy, name, 42, torch.get_num_threads()) for busy in (0, 1) for name in names)


@needs_kernels
def test_a_model_of_a_config_has_the_same_random_weights_every_time(tmp_path):
    config, ids = tmp_path / "shape.json", torch.arange(50)[None]
    model_of(LlamaConfig).config.to_json_file(config)
    forms = [("auto", "auto"), ("auto", "auto"), ("bfloat16", "auto"), ("int4", "auto"), ("int4", "int8")]
    pipes = [bench.open_model(str(config), *form) for form in forms]
    assert [weights_kind(pipe.model) for pipe in pipes] == ["Bfloat16Blocks"] * 3 + ["Int4Blocks"] * 2
    assert pipes[0].processor.decode([99, 5]) == "99 5"
    one, *others = (bench.prompt_logits(pipe.target, ids) for pipe in pipes)
    assert [torch.equal(one, other) for other in others] == [True, True, False, False]
    assert not torch.equal(*others[2:])
    file = str(save_gguf(tmp_path / "text.gguf"))
    targets = [bench.open_model(file, "auto", form).target for form in ("auto", "int8")]
    assert not torch.equal(*(bench.prompt_logits(target, ids) for target in targets))


def test_tables_have_columns_that_are_not_empty_and_those_of_what_varies(capsys):
    columns = [("method", "{method}"), ("none", "{none}"), ("speed", "{speed:.1f}")]
    same = {"dtype": "int4", "threads": 2, "speed": 1.25, "none": None}
    rows = [{**same, "batch": size, "method": name} for size, name in product((1, 8), "ab")]
    rows[-1]["speed"] = None
    bench.print_rows(columns, rows, "a title")
    title, head, *lines = [line for line in capsys.readouterr().out.splitlines() if line.strip(" ┏┳┓┡╇┩└┴┘━─")]
    assert (title.strip(), head.strip("┃ ").split()) == ("a title", ["batch", "┃", "method", "┃", "speed"])
    assert ["├" in line for line in lines] == [False, False, True, False, False]
    assert lines[0].strip("│ ").split(" │ ") == ["1    ", "a     ", "1.2"]


def test_the_model_has_no_sequences_after_passes(folder):
    pipe = mmspec.load(folder, drafter=None)
    costs = timing.pass_costs(pipe.target)
    assert (costs["tokens"], min(costs["seconds"]) > 0) == ([1, 2, 4, 8, 16, 33], True)
    assert pipe.target.runner.rows == 0
    assert parse_methods("none", pipe.target)[0].name == PLAIN
