"""The GPU benchmark: a rehearsal of all parts in tiny shapes, and what becomes of parts that fail."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from mmspec.eval import gpu
from mmspec.eval.kernels import gpu_kernels, gpu_models, gpu_parts
from mmspec.eval.kernels.gpu_kernels import Inputs, KernelTimer, attention_rows, binary_tree, compaction_row, scan_rows
from mmspec.eval.scale_up.axes import Shape
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


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A whole run in tiny shapes; its parts are processes of their own."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    result = call("--device", "cpu", "--quick", "--minutes", "60", "--out", str(out))
    return result, json.loads(out.read_text())


def rows_of(content, part):
    return content["parts"][part]["rows"]


@pytest.mark.long
def test_a_rehearsal_has_all_parts(rehearsal):
    result, content = rehearsal
    assert result.exit_code == 0, result.output
    assert list(content["parts"]) == PARTS
    assert {"device", "torch", "transformers", "commit", "kernels", "caveat"} <= content.keys()
    assert content["quick"] is True
    assert json.loads(result.output.splitlines()[-1]) == content
    assert rows_of(content, "machine")[0]["copy_gb_per_second"] > 0
    assert [row["drafter"] for row in rows_of(content, "tokens")] == [
        *("none", "msd", "flash", "recycle", "ngram"),
        *("none", "flash", "mamba"),
    ]
    assert all(row["equal_cpu"] == row["answers"] == 2 for row in rows_of(content, "tokens"))
    for title in ("passes 7b, milliseconds", "answers 7b, milliseconds", "Tokens per second, 7b, batch size 1"):
        assert title in result.output


@pytest.mark.long
def test_a_rehearsal_measures_passes_and_drafts(rehearsal):
    _, content = rehearsal
    for part, cases in (("passes 7b", [(1, 20), (2, 20), (1, 40)]), ("passes 8b-hybrid", [(1, 20), (2, 5)])):
        built, *passes = rows_of(content, part)
        assert built["weight_gb"] > 0
        assert [(row["batch"], row["prefix"]) for row in passes] == cases
        for row in passes:
            assert row["pass_ms"].keys() == {"1", "4", "8"}
            assert row["over_plain"]["8"] == pytest.approx(row["pass_ms"]["8"] / row["pass_ms"]["1"])
            assert row["plain_of_floor"] == pytest.approx(row["floor_ms"] / row["pass_ms"]["1"])
            assert row["draft_ms"].keys() == {"flash", "eagle3", "dflash"} | ({"msd"} if part == "passes 7b" else set())
            assert min(row["commit_ms"], *row["draft_ms"].values()) > 0


@pytest.mark.long
def test_a_rehearsal_decodes_answers(rehearsal):
    _, content = rehearsal
    shapes = ("tree 7", "adaptive", "chain 3")
    for part, groups, methods in (
        ("answers 7b", 1, ["plain", *(f"{name} {kind}" for name in ("msd", "flash") for kind in shapes)]),
        ("batch 7b", 1, ["plain", "msd tree 7", "msd chain 3", "flash tree 7", "flash chain 3"]),
        ("sampling 7b", 1, ["plain", "msd tree 7", "msd chain 3", "flash tree 7", "flash chain 3"]),
        ("answers 8b-hybrid", 1, ["plain", *(f"{name} {kind}" for name in ("flash", "ngram") for kind in shapes)]),
    ):
        rows = rows_of(content, part)
        assert [row["method"] for row in rows] == methods
        for row in rows:
            assert row["batch"] == (2 if part == "batch 7b" else 1)
            assert row["equal"] == row["groups"] == groups  # exact in float32; a seed gives the same tokens
            assert row["steps"] <= 7
            assert row["tokens_per_step"] > (1.5 if row["method"] != "plain" else 0.99)
            assert row["step_ms"] == pytest.approx(row["draft_ms"] + row["verify_ms"] + row["rest_ms"])
            assert row["tokens_per_second"] > 0
        assert rows[0]["steps"] == 7
        assert rows[0]["ratio_plain"] == 1
    modes = [(row["method"], row["batch"]) for row in rows_of(content, "generate 7b")]
    assert modes == [(f"generate {mode}", batch) for batch in (1, 2) for mode in ("dynamic", "static", "compiled")]


@pytest.mark.long
def test_a_rehearsal_times_kernels(rehearsal):
    _, content = rehearsal
    rows = rows_of(content, "kernels")
    assert {row["operation"] for row in rows} == {
        *("tree attention", "masked attention", "unmasked attention", "follow", "quantile", "choose_drawn"),
        *("top_log_probs", "next_beam", "keep_best", "compact_kv", "tree_scan", "tree_conv", "commit_scan"),
    }
    for row in rows:
        assert row["us"] > 0
        assert row["over_floor"] == pytest.approx(row["us"] / row["floor_us"])
        assert row["error"] == 0  # references are compared with themselves


@pytest.mark.long
def test_one_part_is_run_and_kept(tmp_path):
    out = tmp_path / "gpu.json"
    first = call("--device", "cpu", "--quick", "--only", "machine", "--out", str(out))
    assert first.exit_code == 0
    content = json.loads(out.read_text())
    assert list(content["parts"]) == ["machine"]
    content["parts"]["machine"]["rows"][0]["copy_gb_per_second"] = 7
    out.write_text(json.dumps(content))
    again = call("--device", "cpu", "--quick", "--only", "machine", "--out", str(out))
    assert json.loads(again.output.splitlines()[-1])["parts"]["machine"]["rows"][0]["copy_gb_per_second"] == 7


# ---------------------------------------------------------------------- parts that fail

ROW = """
from mmspec.eval.kernels.gpu_parts import row_or_error, write_rows
import os, torch
def rows():
    print("chatter")
    os.write(1, b"more of it")
    yield {"row": 1}
    yield from row_or_error(step, torch.device("cpu"), batch=3)
    yield {"row": 2}
"""
FAILS = ROW + "def step(): raise ValueError('no luck')\nwrite_rows(rows())"
WORKS = ROW + "def step(): return {'row': 'one'}\nwrite_rows(rows())"
DIES = ROW + "def step(): os.abort()\nwrite_rows(rows())"
RAISES = "raise RuntimeError('at the start')"
WAITS = "import time; print('{}', flush=True); time.sleep(3600)"


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


@pytest.mark.long
def test_a_failure_costs_one_part_only():
    programs = {"a": WORKS, "step": FAILS, "dead": DIES, "start": RAISES, "b": WORKS}
    content, saved = run_fake_parts(programs)
    parts = content["parts"]
    assert parts["a"]["rows"] == parts["b"]["rows"] == [{"row": 1}, {"row": "one"}, {"row": 2}]
    assert "error" not in parts["a"]
    first, failed, last = parts["step"]["rows"]
    assert (first, last) == ({"row": 1}, {"row": 2})  # the other steps still run
    assert failed["batch"] == 3
    assert failed["error"] == parts["step"]["error"] == "ValueError: no luck"
    assert "in step" in failed["where"]
    assert parts["dead"]["rows"] == [{"row": 1}]
    assert parts["dead"]["error"] == "signal 6 (SIGABRT)"
    assert "chatter" in parts["dead"]["log"]
    assert "more of it" in parts["dead"]["log"]
    assert parts["start"]["error"] == "exit status 1"
    assert parts["start"]["log"].endswith("RuntimeError: at the start")
    assert set(saved) == set(range(len([row for part in parts.values() for row in part["rows"]]) + 1)) - {0}
    assert gpu_parts.failures(content) == {name: parts[name]["error"] for name in ("step", "dead", "start")}


def test_a_part_is_ended_at_its_limit():
    content, _ = run_fake_parts({"slow": WAITS, "b": "print('{}')"}, slow=1)
    assert content["parts"]["slow"]["error"] == "not finished after 1 s"
    assert content["parts"]["b"]["rows"] == [{}]


def test_parts_are_ended_at_the_deadline(monkeypatch):
    limits = []
    monkeypatch.setattr(gpu_parts, "clock", lambda: 100.0)
    monkeypatch.setattr(gpu_parts, "run_part", lambda command, seconds, on_row: limits.append(seconds))
    run_fake_parts({"short": WORKS, "long": WORKS}, deadline=130.0, short=10)
    assert limits == [10, 30]


def test_no_part_begins_after_the_deadline():
    content, _ = run_fake_parts({"a": RAISES}, deadline=0.0)
    assert content["parts"]["a"] == {"rows": [], "skipped": "no time was left"}
    assert gpu_parts.failures(content) == {}


def test_finished_parts_are_not_run_again():
    done = {"rows": [{"row": 1}], "seconds": 1.0}
    content, _ = run_fake_parts({"a": RAISES, "b": "print('{}')"}, content={"parts": {"a": done}})
    assert content["parts"]["a"] == done
    assert content["parts"]["b"]["rows"] == [{}]


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


def test_tables_show_what_was_measured():
    row = {"shape": "7b", "batch": 1, "nodes": 8, "us": 12.34, "floor_us": 6.17, "over_floor": 2.0, "error": 0.003}
    part = {"rows": [{"operation": "follow", **row}, {"error": "x", "where": "y"}]}
    text = shown(gpu.part_table("kernels", part))
    assert [cell.strip() for cell in text.splitlines()[4].split("│")[1:-1]] == [
        *("follow", "7b", "1", "8", "12.3", "6.2", "2.00x", "3e-03")
    ]
    assert "vocab" not in text  # which no row has


def test_tables_of_passes_have_a_column_for_each_size_and_drafter():
    row = {"batch": 1, "prefix": 9, "floor_ms": 1.0, "plain_of_floor": 0.5, "commit_ms": 0.25, "peak_bytes": 3e9}
    rows = [
        {"weight_gb": 1.0, "build_seconds": 2.0},
        {**row, "pass_ms": {"1": 2.0, "64": 3.5}, "draft_ms": {"msd": 1.25}},
        {**row, "pass_ms": {"1": 2.5}, "draft_ms": {"flash": 0.75}},
    ]
    lines = shown(gpu.part_table("passes 7b", {"rows": rows})).splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[4:6]]
    assert cells == [
        ["1", "9", "2.00", "3.50", "1.00", "50%", "0.25", "1.25", "", "3.0"],
        ["1", "9", "2.50", "", "1.00", "50%", "0.25", "", "0.75", "3.0"],
    ]


def test_the_summary_compares_the_best_tree_with_the_best_chain():
    def row(method, rate, batch=1):
        return {"method": method, "batch": batch, "tokens_per_second": rate, "tokens_per_step": 2.0, "step_ms": 3.0}

    answers = [row("plain", 10.0), row("msd tree 15", 30.0), row("msd tree 31", 25.0), row("msd chain 3", 20.0)]
    answers += [row("msd chain 5", 28.0), row("msd adaptive", 29.0)]
    generate = [{"method": "generate compiled", "batch": batch, "tokens_per_second": 15.0 * batch} for batch in (1, 8)]
    content = {"parts": {"answers 7b": {"rows": answers}, "generate 7b": {"rows": generate}}}
    lines = shown(gpu.summary(content, gpu.FULL)).splitlines()
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == [
        *("plain", "generate compiled", "msd chain 5", "msd adaptive", "msd tree 15")
    ]
    assert "method" in shown(gpu.summary({"parts": {}}, gpu.FULL))


# ---------------------------------------------------------------------- measurements


def test_floors_count_bytes():
    """Attention reads keys and values of prefix and tree, and queries, and writes results, 4 bytes each in float32."""
    tree, masked, unmasked = attention_rows(TIMER, "any", SHAPE, 2, 11, 5)
    expected = 1e6 * 4 * (2 * 2 * 2 * 16 * 8 + 2 * 2 * 4 * 5 * 8) / 1e9
    assert [row["floor_us"] for row in (tree, masked, unmasked)] == pytest.approx([expected] * 3)
    commit = list(scan_rows(TIMER, "small", 2, 3))[-1]
    assert commit["floor_us"] == pytest.approx(1e6 * 2 * 4 * 2 * 8 * 64 * 64 / 1e9)


def test_masked_attention_is_tree_attention(monkeypatch):
    """Both rows are of the same results: the alternative is a fair one."""
    made = {}

    def row(timer, make, num_bytes, operation, **facts):
        made[operation] = make(Inputs(timer))()
        return {}

    monkeypatch.setattr(KernelTimer, "row", row)
    list(attention_rows(TIMER, "any", SHAPE, 2, 11, 5))
    torch.testing.assert_close(made["tree attention"], made["masked attention"])
    assert not torch.allclose(made["tree attention"], made["unmasked attention"])


@pytest.mark.parametrize("error", [0.02, 0.005])
def test_a_wrong_kernel_is_refused(error, monkeypatch):
    """One whose results are off by more than 1 % of the reference's norm, not one that rounds."""
    attend, calls = gpu_kernels.ops.tree_attention, []

    def wrong(*args, **options):
        calls.append(gpu_kernels.os.environ.get("MMSPEC_KERNELS"))
        return attend(*args, **options) * (1.0 if calls[-1] == "reference" else 1 + error)

    monkeypatch.setattr(gpu_kernels.ops, "tree_attention", wrong)
    if error > gpu_kernels.TOLERANCE:
        with pytest.raises(
            AssertionError, match=r"tree attention differs from its reference by 0\.02, more than 0\.01"
        ):
            next(attention_rows(TIMER, "any", SHAPE, 1, 11, 5))
    else:
        assert next(attention_rows(TIMER, "any", SHAPE, 1, 11, 5))["error"] == pytest.approx(error, rel=1e-3)
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


def test_seconds_of_calls_in_succession():
    ran = []
    times = gpu_kernels.device_seconds(lambda: ran.append(sum(range(20_000))), CPU, 4)
    assert (len(times), len(ran)) == (4, 4 + 3)
    assert min(times) > 1e-5


def test_binary_tree():
    tree = binary_tree(2, 7, CPU)
    assert tree.parents[1].tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert gpu_kernels.last_path(2, 7, CPU).tolist() == [tree.ancestors[0, -1].nonzero()[:, 0].tolist()] * 2


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


@pytest.mark.parametrize("batch", [1, 3])
def test_floors_of_passes_read_every_rows_keys_and_values(model, batch):
    target = model.pipe.target
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


def test_chains_have_one_child_per_node(model):
    methods = {m.name: m for m in gpu_models.answer_methods(model, (7,), (3, 5), adaptive=False)}
    assert list(methods) == ["plain", *(f"{n} {s}" for n in ("msd", "flash") for s in ("tree 7", "chain 3", "chain 5"))]
    assert (methods["msd chain 5"].drafter.top_k, methods["msd chain 5"].nodes) == (1, 5)
    assert methods["msd tree 7"].drafter.top_k > 1


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
    method = gpu_models.AnswerMethod("plain")
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


def test_the_benchmark_takes_its_parts_by_name():
    parts = gpu.GpuBenchmark(gpu.FULL, CPU, 0, True).parts()
    assert list(parts) == PARTS
    assert isinstance(parts["batch 7b"][1], partial)
    assert parts["batch 7b"][1].args == ("7b", 8)
