"""The GPU benchmark: a rehearsal of all parts in tiny shapes, what becomes of parts that fail, and set acceptance."""

import json
import sys
import time
from concurrent.futures import Future
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from mmspec import pipeline
from mmspec.engine.engine import Engine
from mmspec.eval import gpu
from mmspec.eval.gpu import Plan, SetAcceptance, config_of, number_processor, step_kernels
from mmspec.ops import graphs
from mmspec.pipeline import Pipeline
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.vision.drafters.msd import MSD
from tests.tiny.models import msd_network, text_model

PLAN = Plan(torch.device("cpu"), True, 0.8)
QUICK = ("--device", "cpu", "--quick", "--minutes", "60")


def call(*arguments):
    return CliRunner().invoke(gpu.main, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected a CUDA device, found none (--device cpu --quick rehearses without one)"),
        (("--device", "cpu"), "real shapes need a CUDA device: got 'cpu' (--quick takes tiny ones)"),
        ((*QUICK, "--only", "kernel"), "'kernel' is not one of 'machine', 'tokens'"),
        ((*QUICK, "--acceptance", "0"), "0.0 is not in the range 0<x<=1"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call(*arguments)
    assert (result.exit_code, message in result.output) == (2, True)


@pytest.mark.long
def test_a_rehearsal_of_all_parts(tmp_path):
    result = call(*QUICK, "--out", str(tmp_path / "gpu.json"))
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert json.loads(result.output.splitlines()[-1]) == content
    rows = {name: part["rows"] for name, part in content["parts"].items()}
    assert list(rows) == list(gpu.PARTS)
    assert rows["machine"][0]["copy_gb_per_second"] > 0
    assert [(row["drafter"], row["equal"]) for row in rows["tokens"]] == [
        (drafter, 2) for drafter in (None, "msd", "flash", "recycle", None, "flash", "mamba")
    ]
    for part, prefix in (("passes-7b", 20), ("passes-hybrid", 5)):
        assert [(row["batch"], row["prefix"]) for row in rows[part]] == [(1, 20), (8, prefix), (1, 40)]
        for row in rows[part]:
            assert row["draft_ms"].keys() == {"msd", "flash", "eagle3", "dflash"}
            assert row["pass_ms"].keys() == {"1", "4", "8"}
            assert min(row["commit_ms"], row["peak_bytes"], *row["draft_ms"].values(), *row["pass_ms"].values()) > 0
            assert row["floor_of_plain"] == pytest.approx(row["floor_ms"] / row["pass_ms"]["1"])
    for part, batch in (("answers-7b", 1), ("batch-7b", 8), ("sampling-7b", 1), ("answers-hybrid", 1)):
        methods = [row["method"].split()[:2] for row in rows[part]]
        kinds = [[name, kind] for name in row["draft_ms"] for kind in ("tree", "adaptive", "chain")]
        assert methods == [["plain"], *kinds]
        assert {row["equal"] for row in rows[part]} == {f"{4 * batch}/{4 * batch}"}
        fixed = [row for row in rows[part][1:] if "adaptive" not in row["method"]]  # adaptive: plain if that is faster
        assert all(row["steps"] < rows[part][0]["steps"] for row in fixed)
        assert {row["set_acceptance"] for row in rows[part][1:]} == {0.8}
    for part in ("generate-7b", "generate-batch-7b"):
        assert [row["method"] for row in rows[part]] == ["dynamic", "static", "compiled"]
    names = {"tree_attention", "compact_kv", "quantile", "top_log_probs", "tree_scan", "commit_scan", "tree_conv"}
    assert {row["kernel"] for row in rows["kernels"]} == names
    assert result.output.count("drafts are accepted at a set rate") == 4


def test_a_part_that_dies_or_hangs_costs_that_part_only(tmp_path, monkeypatch):
    row = "print('row: {\"a\": 1.5}', flush=True); print('chatter')"
    programs = {
        "machine": f"{row}; import os; os.write(2, b'the end of its log'); os.abort()",
        "tokens": f"{row}; import time; time.sleep(3600)",
        "kernels": row,
    }
    monkeypatch.setattr(gpu, "part_command", lambda name, plan: [sys.executable, "-c", programs[name]])
    monkeypatch.setattr(gpu, "PARTS", {name: (2 if name == "tokens" else 600, None) for name in programs})
    began = time.monotonic()
    result = call(*QUICK, "--out", str(tmp_path / "gpu.json"))
    assert time.monotonic() - began < 300
    assert result.exit_code == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {name: part.get("error") for name, part in parts.items()} == {
        "machine": "exit status -6",
        "tokens": "not finished after 2 s",
        "kernels": None,
    }
    assert parts["machine"]["log"] == "the end of its log"
    assert [part["rows"] for part in parts.values()] == [[{"a": 1.5}]] * 3


@pytest.mark.parametrize(("failure", "step"), [(None, True), ("capture of a pass", False), (None, False)])
def test_a_part_fails_with_a_step_or_a_capture(failure, step, monkeypatch):
    monkeypatch.setattr(graphs, "capture_failure", lambda: failure)

    def rows(plan):
        yield from gpu.attempt(lambda: {"ratio": 1 / (0 if step else 1)}, batch=3)
        yield {"row": 2}

    monkeypatch.setitem(gpu.PARTS, "machine", (1, rows))
    result = call(*QUICK, "--only", "machine", "--rows")
    first = {"failed": "ZeroDivisionError: division by zero"} if step else {"ratio": 1.0}
    lines = [line[5:] for line in result.output.splitlines() if line.startswith("row: ")]
    assert [json.loads(line) for line in lines] == [{"batch": 3, **first}, {"row": 2}]
    assert result.exit_code == int(step or failure is not None)


def test_calls_are_timed_one_by_one_after_a_warm_up():
    left = [0.3, 0.3, 0.3, 0.0, 0.06, 0.02]
    found = gpu.device_seconds(lambda: time.sleep(left.pop(0)), torch.device("cpu"), 3)
    assert [round(seconds / 0.02) for seconds in found] == [0, 3, 1]
    assert left == []


def test_a_copy_reads_and_writes_its_bytes(monkeypatch):
    seconds, copied = (4.0, 0.5, 1.0), []
    monkeypatch.setattr(gpu, "device_seconds", lambda run, _: [copied.append(run().nbytes) or s for s in seconds])
    assert Plan(torch.device("cpu"), True, 0.8).bandwidth == 2 * copied[0]


@pytest.mark.parametrize("name", ["tree_attention", "compact_kv"])
@pytest.mark.parametrize("error", [0.02, 0.005])
def test_a_wrong_kernel_is_refused(name, error, monkeypatch):
    """One whose results are off by more than 1 % of the reference's norm, not one that rounds; in place, too."""
    kernel = getattr(gpu.ops, name)

    def wrong(tensor, *args, **options):
        scale = 1.0 if gpu.os.environ.get("MMSPEC_KERNELS") == "reference" else 1 + error
        result = kernel(tensor, *args, **options)
        return tensor.mul_(scale) if result is None else result * scale

    monkeypatch.setattr(gpu.ops, name, wrong)
    chosen = next(one for one in step_kernels(config_of("7b", True), PLAN, 2, 11, 7) if one[0] == name)
    if error > 0.01:
        with pytest.raises(AssertionError, match=rf"{name} differs from its reference by 0\.02, more than 0\.01"):
            gpu.measure(chosen, PLAN)
    else:
        assert gpu.measure(chosen, PLAN)["error"] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rate", [0.5, 0.8, 1.0])
def test_drafts_are_accepted_at_the_set_rate(rate, temperature):
    """And answers equal plain decoding, for a batch whose rows end at different steps."""
    model = text_model("llama")
    target, processor = TransformersTarget(model), number_processor(model.config.vocab_size)
    requests = [{"prompt": [3 + row, 4, 5]} for row in range(3)]
    options = {"max_new_tokens": 200, "temperature": temperature, "seed": 2, "ignore_eos": True}
    expected = [r.token_ids for r in Pipeline(target, processor).generate_batch(requests, **options)]
    answers = {tuple(request["prompt"]): row for request, row in zip(requests, expected, strict=True)}
    drafter = SetAcceptance(MSD(msd_network(model), depth=4), answers, rate, model.config.vocab_size)
    results = Pipeline(target, processor, drafter).generate_batch(requests, nodes=9, **options)
    assert [r.token_ids for r in results] == expected
    accepted = sum(r.stats.num_accepted_draft_tokens for r in results)
    rejected = sum(sum(r.stats.acceptance_histogram[:4]) for r in results)  # steps that end before the fourth level
    assert accepted / (accepted + rejected) == pytest.approx(rate, abs=0.07)
    assert max(r.stats.num_spec_tokens for r in results) == 4


@pytest.mark.long
def test_a_rehearsal_on_a_fake_device(monkeypatch):
    """Shapes fit, devices are not mixed, all steps can be captured."""
    pytest.importorskip("triton")
    from tests.fake_cuda import fake_cuda

    patch, engines, tick = monkeypatch.setattr, set(), count(1)
    # The fake device is one thread's: clients run the steps themselves.
    patch(Engine, "_wake", lambda engine: engines.add(engine))

    def result(answer):
        for engine in engines:
            while engine._has_work():
                engine._turn()
        return Future.result(answer, 0)

    patch(pipeline, "Future", type("Answer", (Future,), {"result": result}))
    patch(gpu, "call_seconds", lambda calls, device: [call() for call in calls] and 1e-3)
    patch(gpu, "device_seconds", lambda run, *_: [(run(), 1e-3 * next(tick))[1]])
    for name in ("normal_", "uniform_"):
        patch(torch.Tensor, name, lambda x, *_, **__: x)
    patch(torch, "Generator", lambda *_: SimpleNamespace(manual_seed=lambda seed: None))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        patch(torch.cuda, name, lambda *_: None)
    patch(torch.cuda, "device", lambda *_: nullcontext())
    for name in ("max_memory_allocated", "memory_reserved", "memory_allocated"):
        patch(torch.cuda, name, lambda *_: 1)
    patch(torch.cuda, "mem_get_info", lambda *_: (int(60e9), int(80e9)))
    # Everything that is read is a one: prompts, too, and errors of kernels.
    patch(gpu, "Random", lambda _: SimpleNamespace(choices=lambda _, k: [1] * k, random=lambda: 0.0))
    drafters, kernels = gpu.random_drafters, gpu.step_kernels
    patch(gpu, "step_kernels", lambda *shape: [(*kernel[:4], 1.0) for kernel in kernels(*shape)])
    with torch.inference_mode(), fake_cuda(monkeypatch, strict=False) as device:
        plan = gpu.Plan(torch.device("cuda"), True, 0.8)
        parts = {name: list(gpu.PARTS[name][1](plan)) for name in ("passes-7b", "passes-hybrid", "kernels")}
        patch(gpu, "random_drafters", lambda target: {"msd": drafters(target)["msd"]})
        parts["answers-7b"] = list(gpu.PARTS["answers-7b"][1](plan))
    assert not [row for rows in parts.values() for row in rows if "failed" in row]
    assert device.captured > 20
    assert [row["captures"] for row in parts["answers-7b"]] == [0] * 4  # steps are captured beforehand
