"""The GPU benchmark: a rehearsal of all parts in tiny shapes, and what becomes of parts that fail."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from mmspec.eval import gpu
from mmspec.eval.kernels import gpu_kernels, gpu_models, gpu_parts
from mmspec.eval.kernels.gpu_kernels import Inputs, KernelTimer, attention_row, compaction_row, scan_rows
from mmspec.eval.scale_up.models import Shape
from mmspec.ops import graphs

CPU = torch.device("cpu")
SHAPE = Shape(32, 32, 2, 4, 2, 8, 99)
TIMER = KernelTimer(CPU, 1e9, torch.float32, 2)
PARTS = [
    *("machine", "tokens", "passes 7b", "answers 7b", "generate 7b", "batch 7b", "sampling 7b", "kernels"),
    *("passes 8b-hybrid", "answers 8b-hybrid"),
]


def call(*arguments):
    return CliRunner().invoke(gpu.main, arguments)


def test_what_is_wrong_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call()
    assert result.exit_code == 2
    assert result.output == "Error: expected a CUDA device, found none (--device cpu --quick rehearses without one)\n"
    assert "real shapes need a CUDA device: got 'cpu'" in call("--device", "cpu").output
    result = call("--device", "cpu", "--quick", "--only", "kernel")
    assert result.exit_code == 2
    assert f"unknown part: expected one of {', '.join(PARTS)}, got 'kernel'" in result.output
    assert "did you mean kernels?" in result.output


# ---------------------------------------------------------------------- rehearsal


@pytest.mark.long
def test_a_rehearsal_of_all_parts(tmp_path):
    """A whole run in tiny shapes, each part a process of its own; a second one measures nothing again."""
    out = tmp_path / "gpu.json"
    options = ("--device", "cpu", "--quick", "--minutes", "60", "--out", str(out))
    result = call(*options)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert json.loads(result.output.splitlines()[-1]) == content == json.loads(call(*options).output.splitlines()[-1])
    assert list(content["parts"]) == PARTS
    assert {"device", "torch", "transformers", "commit", "kernels", "caveat"} <= content.keys()
    rows = {name: part["rows"] for name, part in content["parts"].items()}
    assert rows["machine"][0]["copy_gb_per_second"] > 0
    assert [row["drafter"] for row in rows["tokens"]] == [
        *("none", "msd", "flash", "recycle", "ngram"),
        *("none", "flash", "mamba"),
    ]
    assert all(row["equal_cpu"] == row["answers"] == 2 for row in rows["tokens"])
    for title in ("passes 7b", "answers 7b", "Tokens per second, 7b, batch size 1"):
        assert title in result.output
    for part, cases in (("passes 7b", [(1, 20), (2, 20), (1, 40)]), ("passes 8b-hybrid", [(1, 20), (2, 5)])):
        built, *passes = rows[part]
        assert built["weight_gb"] > 0
        assert [(row["batch"], row["prefix"]) for row in passes] == cases
        for row in passes:
            assert row["over_plain"]["8"] == pytest.approx(row["pass_ms"]["8"] / row["pass_ms"]["1"])
            assert row["plain_of_floor"] == pytest.approx(row["floor_ms"] / row["pass_ms"]["1"])
            assert row["draft_ms"].keys() == {"flash", "eagle3", "dflash"} | ({"msd"} if part == "passes 7b" else set())
            assert min(row["commit_ms"], *row["draft_ms"].values()) > 0
    for part, drafters, shapes in (
        ("answers 7b", ("msd", "flash"), ("tree 7", "adaptive", "chain 3")),
        ("batch 7b", ("msd", "flash"), ("tree 7", "chain 3")),
        ("sampling 7b", ("msd", "flash"), ("tree 7", "chain 3")),
        ("answers 8b-hybrid", ("flash", "ngram"), ("tree 7", "adaptive", "chain 3")),
    ):
        assert [row["method"] for row in rows[part]] == ["plain", *(f"{n} {s}" for n in drafters for s in shapes)]
        for row in rows[part]:
            assert row["batch"] == (2 if part == "batch 7b" else 1)
            assert row["equal"] == row["groups"] == 1  # exact in float32; a seed gives the same tokens
            assert row["tokens_per_step"] > (1.5 if row["method"] != "plain" else 0.99)
            assert row["step_ms"] == pytest.approx(row["draft_ms"] + row["verify_ms"] + row["rest_ms"])
        assert (rows[part][0]["steps"], rows[part][0]["ratio_plain"]) == (7, 1)
    modes = [(row["method"], row["batch"]) for row in rows["generate 7b"]]
    assert modes == [(f"generate {mode}", batch) for batch in (1, 2) for mode in ("dynamic", "static", "compiled")]
    assert {row["operation"] for row in rows["kernels"]} == {
        *("tree attention", "follow", "quantile", "choose_drawn"),
        *("top_log_probs", "next_beam", "keep_best", "compact_kv", "tree_scan", "tree_conv", "commit_scan"),
    }
    for row in rows["kernels"]:
        assert row["over_floor"] == pytest.approx(row["us"] / row["floor_us"])
        assert row["error"] == 0  # references are compared with themselves


# ---------------------------------------------------------------------- parts that fail

FAILS = """
from mmspec.eval.kernels.gpu_parts import row_or_error, write_rows
import os, torch
def step(): raise ValueError("no luck")
def rows():
    print("chatter")
    os.write(1, b"more of it")
    yield {"row": 1}
    yield from row_or_error(step, torch.device("cpu"), batch=3)
    yield {"row": 2}
write_rows(rows())
"""
DIES = "import os; print('{}', flush=True); os.write(2, b'the end of its log'); os.abort()"
WAITS = "import time; print('{}', flush=True); time.sleep(3600)"
WORKS = "print('{}')"


def run_fake_parts(programs, deadline=1e12, content=None, **limits):
    content, saved, reported = content or {"parts": {}}, [], []
    gpu_parts.run_parts(
        dict.fromkeys(programs, 600) | limits,
        content,
        lambda name: [sys.executable, "-c", programs[name]],
        deadline,
        lambda: saved.append(sum(len(part["rows"]) for part in content["parts"].values())),
        reported.append,
    )
    assert reported == [name for name in programs if name in content["parts"]][-len(reported) :]
    return content, saved


def test_a_failure_costs_one_part_only():
    done = {"rows": [{"row": 1}], "seconds": 1.0}
    programs = {"done": DIES, "dead": DIES, "slow": WAITS, "works": WORKS}
    content, saved = run_fake_parts(programs, content={"parts": {"done": done}}, slow=1)
    parts = content["parts"]
    assert parts["done"] == done
    assert parts["dead"].items() >= {"rows": [{}], "error": "signal 6 (SIGABRT)", "log": "the end of its log"}.items()
    assert (parts["slow"]["rows"], parts["slow"]["error"]) == ([{}], "not finished after 1 s")
    assert (parts["works"]["rows"], "error" in parts["works"]) == ([{}], False)
    assert set(saved) == {2, 3, 4}  # after every row
    assert gpu_parts.failures(content) == {name: parts[name]["error"] for name in ("dead", "slow")}


@pytest.mark.long
def test_a_step_that_fails_costs_its_rows_only():
    """What is printed meanwhile is no row."""
    part = run_fake_parts({"step": FAILS})[0]["parts"]["step"]
    first, failed, last = part["rows"]
    assert (first, last) == ({"row": 1}, {"row": 2})
    assert failed["batch"] == 3
    assert failed["error"] == part["error"] == "ValueError: no luck"
    assert "in step" in failed["where"]


def test_parts_are_ended_at_the_deadline(monkeypatch):
    limits = []
    monkeypatch.setattr(gpu_parts, "clock", lambda: 100.0)
    monkeypatch.setattr(gpu_parts, "run_part", lambda command, seconds, on_row: limits.append(seconds))
    run_fake_parts({"short": WORKS, "long": WORKS}, deadline=130.0, short=10)
    assert limits == [10, 30]
    content, _ = run_fake_parts({"a": DIES}, deadline=0.0)
    assert content["parts"]["a"] == {"rows": [], "skipped": "no time was left"}
    assert gpu_parts.failures(content) == {}


def test_which_parts_of_an_earlier_run_are_finished(tmp_path):
    facts = {"device": "d", "torch": "t", "transformers": "f", "commit": "c", "quick": True}
    out = tmp_path / "out.json"
    assert gpu_parts.finished_parts(out, facts) == {}
    done, rest = {"rows": [], "seconds": 1.0}, {"rows": [{"row": 1}]}
    parts = {"a": done, "half": rest, "bad": {**done, "error": "x"}, "late": {"rows": [], "skipped": "no time"}}
    out.write_text(json.dumps({**facts, "parts": parts}))
    assert gpu_parts.finished_parts(out, facts) == {"a": done}
    for name in facts:
        assert gpu_parts.finished_parts(out, {**facts, name: None}) == {}, name
    out.write_text("[]")
    assert gpu_parts.finished_parts(out, facts) == {}


def test_failures_end_the_command(monkeypatch, tmp_path):
    """With a table of what was measured, and which parts that was."""

    def failing(limits, content, command, deadline, save, report):
        content["parts"]["machine"] = {"rows": [{"device": "d", "copy_gb_per_second": 3.0}], "seconds": 1.0}
        content["parts"]["kernels"] = {"rows": [], "seconds": 1.0, "error": "signal 6 (SIGABRT)", "log": "x"}
        for name in content["parts"]:
            report(name)
        assert command("kernels")[1:] == [
            *("-m", "mmspec.eval", "gpu", "--device", "cpu", "--quick"),
            *("--only", "kernels", "--rows"),
        ]

    monkeypatch.setattr(gpu, "run_parts", failing)
    result = call("--device", "cpu", "--quick", "--out", str(tmp_path / "gpu.json"))
    assert result.exit_code == 1
    assert "failed: kernels (signal 6 (SIGABRT)). Measured: machine" in result.output
    assert "kernels: signal 6 (SIGABRT), 1 s" in result.output
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["machine"]["rows"]


def test_a_lost_device_ends_a_part(monkeypatch):
    monkeypatch.setattr(gpu_parts, "device_is_lost", lambda device: True)

    def broken():
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="an illegal memory access"):
        list(gpu_parts.row_or_error(broken, CPU))


def test_a_failed_capture_is_a_failure(monkeypatch, capfd):
    monkeypatch.setattr(graphs, "capture_failure", lambda: "capture of a pass\nTraceback")
    monkeypatch.setattr(gpu_parts.os, "dup2", lambda *_: None)
    with pytest.raises(SystemExit) as status:
        gpu_parts.write_rows(iter([{"row": 1}]))
    assert status.value.code == 1
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert rows == [
        {"row": 1},
        {"error": "a CUDA graph could not be captured", "where": "capture of a pass\nTraceback"},
    ]


# ---------------------------------------------------------------------- tables


def shown(table):
    console = Console(width=150)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tables_have_a_column_for_each_field_size_and_drafter():
    rows = [
        {"weight_gb": 1.0},
        {"batch": 1, "pass_ms": {"1": 2.0, "64": 3.51234}, "draft_ms": {"msd": 1.25}},
        {"batch": 8, "pass_ms": {"1": 2.5}, "draft_ms": {"flash": None}},
        {"error": "x", "where": "y"},
    ]
    lines = shown(gpu.part_table("passes 7b", {"rows": rows})).splitlines()
    cells = [[cell.strip() for cell in line.replace("\u2503", "\u2502").split("\u2502")[1:-1]] for line in lines]
    assert [row for row in cells if row] == [
        ["weight gb", "batch", "pass ms 1", "pass ms 64", "draft ms msd", "draft ms flash"],
        ["1", "", "", "", "", ""],
        ["", "1", "2", "3.512", "1.25", ""],
        ["", "8", "2.5", "", "", ""],
    ]


def test_the_summary_compares_the_best_tree_with_the_best_chain():
    def row(method, rate, batch=1):
        return {"method": method, "batch": batch, "tokens_per_second": rate, "tokens_per_step": 2.0, "step_ms": 3.0}

    answers = [row("plain", 10.0), row("msd tree 15", 30.0), row("msd tree 31", 25.0), row("msd chain 3", 20.0)]
    answers += [row("msd chain 5", 28.0), row("msd adaptive", 29.0)]
    generate = [{"method": "generate compiled", "batch": batch, "tokens_per_second": 15.0 * batch} for batch in (1, 8)]
    content = {"parts": {"answers 7b": {"rows": answers}, "generate 7b": {"rows": generate}}}
    lines = shown(gpu.summary(content)).splitlines()
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == [
        *("plain", "generate compiled", "msd chain 5", "msd adaptive", "msd tree 15")
    ]
    assert "method" in shown(gpu.summary({"parts": {}}))


# ---------------------------------------------------------------------- measurements


def test_floors_count_bytes():
    """Attention reads keys and values of prefix and tree, and queries, and writes results, 4 bytes each in float32."""
    row = attention_row(TIMER, "any", SHAPE, 2, 11, 5)
    assert row["floor_us"] == pytest.approx(1e6 * 4 * (2 * 2 * 2 * 16 * 8 + 2 * 2 * 4 * 5 * 8) / 1e9)
    commit = list(scan_rows(TIMER, "small", 2, 3))[-1]
    assert commit["floor_us"] == pytest.approx(1e6 * 2 * 4 * 2 * 8 * 64 * 64 / 1e9)


@pytest.mark.parametrize("error", [0.02, 0.005])
def test_a_wrong_kernel_is_refused(error, monkeypatch):
    """One whose results are off by more than 1 % of the reference's norm, not one that rounds."""
    attend, calls = gpu_kernels.ops.tree_attention, []

    def wrong(*args, **options):
        calls.append(gpu_kernels.os.environ.get("MMSPEC_KERNELS"))
        return attend(*args, **options) * (1.0 if calls[-1] == "reference" else 1 + error)

    monkeypatch.setattr(gpu_kernels.ops, "tree_attention", wrong)
    if error > gpu_kernels.TOLERANCE:
        with pytest.raises(AssertionError, match=r"attention differs from its reference by 0\.02, more than 0\.01"):
            attention_row(TIMER, "any", SHAPE, 1, 11, 5)
    else:
        assert attention_row(TIMER, "any", SHAPE, 1, 11, 5)["error"] == pytest.approx(error, rel=1e-3)
    assert "reference" in calls


def test_a_kernel_in_place_is_compared(monkeypatch):
    compact = gpu_kernels.ops.compact_kv

    def wrong(storage, *args):
        if gpu_kernels.os.environ.get("MMSPEC_KERNELS") == "reference":
            compact(storage, *args)

    monkeypatch.setattr(gpu_kernels.ops, "compact_kv", wrong)
    with pytest.raises(AssertionError, match="compact_kv differs"):
        compaction_row(TIMER, SHAPE, 1, 7, 32)


def test_references_get_the_same_values_in_float32():
    timer = replace(TIMER, dtype=torch.bfloat16)
    rounded, exact = Inputs(timer).randn(4, 4), Inputs(timer, exact=True).randn(4, 4)
    assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(rounded.float(), exact)
    assert not torch.equal(Inputs(timer, 1).randn(4, 4), rounded)


def test_calls_have_buffers_of_their_own():
    """As many as are timed, or as fit into memory."""
    seen = []

    def make(inputs):
        values = inputs.randn(3)
        return lambda: seen.append(values.data_ptr())

    timer = replace(TIMER, count=5)
    timer.seconds(make, 1)
    assert len(set(seen)) == 5
    seen.clear()
    timer.seconds(make, gpu_kernels._BUFFER_BYTES // 2)
    assert len(set(seen)) == 2


@pytest.fixture(scope="module")
def model():
    return gpu_models.build_scaled_model(
        "tiny-llava", gpu.GpuBenchmark(gpu.QUICK, CPU, 0, True).shape("7b"), "msd,flash", CPU, torch.float32
    )


def test_drafts_read_an_accepted_path(model):
    """Each draft that is timed follows a step of four accepted nodes, the root included."""
    target, drafter = model.pipe.target, model.drafters["msd"]
    drafter.attach(target)
    target.features = ["last"]
    ids = torch.arange(20)[None]
    output = target.prefill(gpu_models.Prompt(ids), 64)
    drafter.begin(gpu_models.Prompt(ids), output, [[*range(20), 19]])
    run = gpu_models._drafts(drafter, target, ids[:, -1], gpu_models.Budget(12))
    before = drafter.cache.lengths[0]
    for turn in range(1, 4):
        tree = run()
        assert drafter.cache.lengths[0] == before + gpu_models._ACCEPTED * turn
        assert tree.nodes > 4
    drafter.select([])
    target.select([])


def test_floors_of_passes_read_every_rows_keys_and_values(model):
    target, batch = model.pipe.target, 3
    target.prefill(gpu_models.Prompt(torch.arange(20).expand(batch, -1).contiguous()), 4)
    read = [stored[:, :batch, :, :20] for stored in target.runner.cache.kv.tensors]
    assert gpu_models._cache_bytes(target, batch, 20) == sum(x.numel() * x.element_size() for x in read)
    target.select([])


def test_answers_that_differ_are_refused(monkeypatch):
    class Pipe:
        def __init__(self, drafter):
            self.drafter = drafter

        def generate_batch(self, requests, **_):
            ids = [1, 2] if self.drafter != "wrong" else [1, 3]
            stats = type("Stats", (), {"mean_acceptance_length": 2.0})()
            return [type("Result", (), {"token_ids": ids, "stats": stats})() for _ in requests]

    monkeypatch.setattr(gpu_models.mmspec, "load", lambda name, drafter, **_: Pipe(drafter))
    rows = list(gpu_models.check_tokens("tiny-llava", ("msd",), CPU, 4))
    assert [(row["drafter"], row["equal_cpu"]) for row in rows] == [("none", 2), ("msd", 2)]
    with pytest.raises(AssertionError, match="wrong must answer as plain decoding does"):
        list(gpu_models.check_tokens("tiny-llava", ("wrong",), CPU, 4))


def test_figures_are_medians_of_groups(model, monkeypatch):
    """Of the row with most steps, which has the times of its group."""
    seconds = iter([9.0, 9.0, 2.0, 4.0, 6.0])  # two groups warm up

    class Pipe:
        def __init__(self, *_, **__):
            pass

        def warm_up(self, rows, tokens, nodes):
            assert (rows, nodes) == (2, [0])

        def generate_batch(self, group, nodes, seed, max_new_tokens):
            assert (nodes, seed, max_new_tokens) == (0, 1, 5)
            wall, results = next(seconds), []
            for steps in (1, 4):
                stats = gpu_models.Stats(num_spec_steps=steps, accept_lengths=[1] * steps, draft_seconds=0.4)
                stats.wall_seconds, stats.time_to_first_token, stats.verify_seconds = wall + 1, 1.0, 0.8
                results.append(type("Result", (), {"token_ids": [0] * (steps + 1), "stats": stats})())
            return results

    monkeypatch.setattr(gpu_models, "Pipeline", Pipe)
    monkeypatch.setattr(gpu_models, "_WARM_UP", 2)
    method = gpu_models.Method("plain")
    (row,) = gpu_models.time_answers(model, [method], [["a", "b"]] * 3, max_new_tokens=5)
    assert row["step_ms"] == pytest.approx(1000 * 4 / 4)
    assert (row["draft_ms"], row["verify_ms"], row["rest_ms"]) == pytest.approx((100, 200, 700))
    assert row["tokens_per_second"] == pytest.approx(5 / 4)
    assert (row["steps"], row["batch"], row["equal"], row["groups"]) == (12, 2, 3, 3)


@pytest.mark.parametrize("batch", [1, 3])
def test_figures_of_generate_are_those_of_decoding(model, batch, monkeypatch):
    """Half a second per token of all rows, and two seconds of prefill, which do not count."""
    asked = []

    def generate(input_ids, max_new_tokens, **_):
        asked.append((len(input_ids), max_new_tokens))

    def seconds(run, device, count, warm_up):
        run()
        return [2.0 + 0.5 * asked[-1][1]] * count

    monkeypatch.setattr(model.pipe.model, "generate", generate)
    monkeypatch.setattr(gpu_models, "device_seconds", seconds)
    row = gpu_models.time_generate(model, "dynamic", batch, (4, 12), 3)
    assert set(asked) == {(batch, 4), (batch, 12)}
    assert (row["batch"], row["token_ms"], row["tokens_per_second"]) == pytest.approx((batch, 500, 2 * batch))
