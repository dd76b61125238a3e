"""The GPU benchmark on tiny shapes: every part gives its figures, and a failing part does not stop the rest."""

import contextlib
import json

import pytest
import torch
from click.testing import CliRunner

from mmspec.errors import UserError
from mmspec.eval import gpu
from mmspec.eval.kernels import gpu_kernels, gpu_models, gpu_parts
from mmspec.eval.kernels.gpu_kernels import KernelTimer, binary_tree, median_seconds, time_attention
from mmspec.eval.scale_up.axes import SHAPES, Shape


def call(*arguments):
    return CliRunner().invoke(gpu.main, arguments, standalone_mode=True)


def test_a_missing_gpu_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call()
    assert result.exit_code == 2
    assert result.output == "Error: expected a CUDA device, found none (--device cpu --quick rehearses without one)\n"
    result = call("--device", "cpu")
    assert result.exit_code == 2
    assert "real shapes need a CUDA device: got 'cpu'" in result.output


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run in which one part and one step of another part fail."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    written = []
    compaction, write, calibrate = gpu_kernels.time_compaction, gpu_parts.write_result, gpu_models.calibrate

    def broken(timer, shape, batch, *rest):
        if batch > 1:
            raise RuntimeError("out of luck")
        return compaction(timer, shape, batch, *rest)

    def calibrated_once(model, *, refresh):
        if not refresh:
            raise ValueError("not today")
        yield from calibrate(model, refresh=refresh)

    def record_rows(content, path):
        written.append(sum(len(part["rows"]) for part in content["parts"].values()))
        write(content, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_kernels, "time_compaction", broken)
        patch.setattr(gpu_parts, "write_result", record_rows)
        patch.setattr(gpu_models, "calibrate", calibrated_once)
        patch.setattr(gpu_models, "FRAMES", 2)
        result = call("--device", "cpu", "--quick", "--out", str(out))
    return result, json.loads(out.read_text()), written


@pytest.mark.long
def test_a_quick_run_has_all_parts(quick):
    _, content, written = quick
    parts = content["parts"]
    assert list(parts) == [
        *("memory", "attention", "verification", "growing", "compaction", "scans"),
        *("model 7b", "batches 7b"),
    ]
    assert set(written) == set(range(1, written[-1] + 1))  # written after every row
    assert {"device", "torch", "transformers", "commit", "kernels", "caveat"} <= content.keys()
    assert content["quick"] is True
    assert parts["memory"]["rows"][0]["copy_gb_per_second"] > 0
    for name in ("attention", "verification", "growing", "scans"):
        rows = parts[name]["rows"]
        assert rows
        assert all(row["us"] > 0 and row["over_floor"] == pytest.approx(row["us"] / row["floor_us"]) for row in rows)
    assert len(parts["model 7b"]["rows"][2]["pass_ms_by_nodes"]) > 3
    for part, batch, methods in (("model 7b", 1, 8), ("batches 7b", 2, 5)):
        built, passes, *answers = [row for row in parts[part]["rows"] if not {"error", "pass_ms_by_nodes"} & row.keys()]
        assert built["parameters"] > 0
        assert passes["batch"] == batch
        assert passes["pass_ms"].keys() == ({"1", "4", "8"} if batch == 1 else {"1", "4"})
        assert passes["draft_ms"].keys() == {"msd", "flash"}
        assert passes["commit_ms"] > 0
        assert {row["batch"] for row in answers} == {batch}
        assert {"plain", "msd, 3 nodes", "flash, adaptive"} <= {row["method"] for row in answers}
        assert len(answers) == methods
        check_answers(answers)


def check_answers(rows):
    for row in rows:
        assert row["equal"] == row["batch"]  # exact in float32
        assert row["tokens_per_second"] > 0
        assert row["mean_acceptance_length"] > (1.2 if row["method"] == "msd, 7 nodes" else 0.9)


@pytest.mark.long
def test_a_failing_part_is_recorded(quick):
    result, content, _ = quick
    part = content["parts"]["compaction"]
    assert part["error"] == "RuntimeError: out of luck"
    assert len(part["rows"]) == 1  # rows before the failure are kept
    assert content["parts"]["batches 7b"]["error"] == "ValueError: not today"
    assert gpu.failures(content) == ["compaction", "batches 7b"]
    assert result.exit_code == 1
    assert "failed: compaction, batches 7b" in result.output
    assert json.loads(result.output.splitlines()[-2]) == content


def run_fake_parts(parts, skip=(), content=None, out=None, patch=None):
    """Run parts that give one row each and may fail; returns the started and the recorded parts."""
    started = []

    def part(name):
        started.append(name)
        yield {"row": name}
        if name in ("bad", "deadly"):
            raise RuntimeError(name)

    content = {"parts": {}} if content is None else content
    patch.setattr(gpu_parts, "device_is_lost", lambda device: bool(started) and started[-1] == "deadly")
    named = {name: lambda name=name: part(name) for name in parts}
    with contextlib.suppress(UserError):
        gpu_parts.run_parts(named, content, out, torch.device("cpu"), skip)
    return started, content


def test_a_lost_device_ends_the_run(monkeypatch):
    started, content = run_fake_parts(["a", "bad", "b", "deadly", "c"], patch=monkeypatch)
    assert started == ["a", "bad", "b", "deadly"]
    assert gpu.failures(content) == ["bad", "deadly"]
    started, content = run_fake_parts(["a", "bad", "b", "deadly", "c"], ["bad"], content, patch=monkeypatch)
    assert started == ["c"]
    assert list(content["parts"]) == ["a", "bad", "b", "deadly", "c"]


def test_a_run_resumes_an_earlier_one(tmp_path, monkeypatch):
    facts = {"device": "d", "torch": "t", "transformers": "f", "commit": "c", "quick": True}
    out = tmp_path / "out.json"
    assert gpu_parts.finished_parts(out, facts, []) == {}
    _, content = run_fake_parts(["a", "bad"], content={**facts, "parts": {}}, out=out, patch=monkeypatch)
    content["parts"]["half"] = {"rows": [{"row": 1}]}
    gpu_parts.write_result(content, out)
    assert list(gpu_parts.finished_parts(out, facts, [])) == ["a"]
    assert list(gpu_parts.finished_parts(out, facts, ["bad"])) == ["a", "bad"]
    assert gpu_parts.finished_parts(out, {**facts, "commit": "other"}, []) == {}


def test_prompts_of_the_plan_fit_into_an_h200():
    for preset in gpu.FULL.shapes:
        for batch in gpu.FULL.batches:
            for prefix in gpu.FULL.prefixes if batch == 1 else gpu.FULL.prefixes[:1]:
                assert gpu_models.needed_bytes(SHAPES[preset], batch, prefix) < 0.95 * 139 * 2**30
    assert gpu_models.needed_bytes(SHAPES["8b-hybrid"], 16, 8000) > 2**40


def test_floors_count_bytes():
    """Attention reads keys and values of prefix and tree, and queries, and writes results, 4 bytes each in float32."""
    timer = KernelTimer(torch.device("cpu"), 1e9, torch.float32)
    row = time_attention(timer, Shape(32, 32, 2, 4, 2, 8, 99), 2, 11, 5)
    assert row["floor_us"] == pytest.approx(1e6 * 4 * (2 * 2 * 2 * 16 * 8 + 2 * 2 * 4 * 5 * 8) / 1e9)


def test_a_wrong_kernel_is_refused(monkeypatch):
    monkeypatch.setattr(gpu_kernels.ops, "tree_attention", lambda q, *_, **__: torch.full_like(q, 7.0).transpose(1, 2))
    timer = KernelTimer(torch.device("cpu"), 1e9, torch.float32)
    with pytest.raises(AssertionError):
        time_attention(timer, Shape(32, 32, 2, 4, 2, 8, 99), 1, 11, 5)


def test_median_seconds_and_binary_tree():
    assert median_seconds(lambda: sum(range(20_000)), torch.device("cpu")) > 1e-5
    tree = binary_tree(2, 7, torch.device("cpu"))
    assert tree.parents[1].tolist() == [-1, 0, 0, 1, 1, 2, 2]
