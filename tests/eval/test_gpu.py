"""The command for GPUs, tried on tiny shapes: every part gives its figures; one that fails does not end the rest."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from eval import gpu, gpu_kernels, gpu_models
from eval.gpu_kernels import Place, attention, binary_tree, seconds
from eval.scale_up import Shape


def call(*arguments):
    return CliRunner().invoke(gpu.main, arguments, standalone_mode=True)


def test_without_a_gpu_it_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call()
    assert result.exit_code == 2
    assert (
        result.output == "Error: expected a CUDA device, found none (--device cpu --quick tries the flow without one)\n"
    )
    result = call("--device", "cpu")
    assert result.exit_code == 2
    assert "real shapes need a CUDA device: got 'cpu'" in result.output


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run in which one part fails half-way."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    written = []
    compaction, write = gpu_kernels.compaction, gpu.write_result

    def broken(place, shape, batch, *rest):
        if batch > 1:
            raise RuntimeError("out of luck")
        return compaction(place, shape, batch, *rest)

    def noted(content, path):
        written.append(sorted(content["parts"]))
        write(content, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_kernels, "compaction", broken)
        patch.setattr(gpu, "write_result", noted)
        patch.setattr(gpu_models, "FRAMES", 2)
        result = call("--device", "cpu", "--quick", "--out", str(out))
    return result, json.loads(out.read_text()), written


def test_a_quick_run_gives_everything(quick):
    _, content, written = quick
    parts = content["parts"]
    assert [len(names) for names in written] == list(range(1, len(parts) + 1))
    assert {"device", "torch", "transformers", "commit", "kernels", "caveat"} <= content.keys()
    assert content["quick"] is True
    assert parts["memory"]["rows"][0]["copy_gb_per_second"] > 0
    assert parts["tests"]["rows"][0]["status"] == 0
    for name in ("attention", "verification", "growing", "scans"):
        rows = parts[name]["rows"]
        assert rows
        assert all(row["us"] > 0 and row["over_floor"] == pytest.approx(row["us"] / row["floor_us"]) for row in rows)
    built, narrow, wide, *answers = parts["model 7b"]["rows"]
    assert built["parameters"] > 0
    assert (narrow["batch"], wide["batch"]) == (1, 2)
    assert narrow["pass_ms"].keys() == {"1", "4", "8"}
    assert narrow["draft_ms"].keys() == {"msd", "flash"}
    *ours, theirs = answers
    assert theirs["way"] == "transformers generate"
    assert {row["batch"] for row in ours} == {1, 2}
    assert {"plain", "msd, 3 nodes", "flash, adaptive"} <= {row["way"] for row in ours}
    for row in ours:
        assert row["equal"] == row["batch"]  # float32: the very tokens
        assert row["tokens_per_second"] > 0
        assert row["mean_acceptance_length"] > (1.2 if row["way"] == "msd, 7 nodes" else 0.9)


def test_a_part_that_fails_is_recorded(quick):
    result, content, _ = quick
    part = content["parts"]["compaction"]
    assert part["error"] == "RuntimeError: out of luck"
    assert len(part["rows"]) == 1  # what was measured before is kept
    assert [name for name, found in content["parts"].items() if "error" in found] == ["compaction"]
    assert result.exit_code == 1
    assert "failed: compaction" in result.output
    assert json.loads(result.output.splitlines()[-2]) == content


def test_failing_tests_are_named(tmp_path):
    (tmp_path / "test_two.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    bench = gpu.Bench(replace(gpu.QUICK, tests=(str(tmp_path),)), torch.device("cpu"), 99, True)
    (row,) = bench.tests()
    assert (row["status"], len(row["failed"])) == (1, 1)
    assert "test_bad" in row["failed"][0]
    assert "1 failed, 1 passed" in row["summary"]


def test_floors_count_bytes():
    """Of attention: keys and values of the prefix and the tree, queries and results, 4 bytes each in float32."""
    place = Place(torch.device("cpu"), 1e9, torch.float32)
    row = attention(place, Shape(32, 32, 2, 4, 2, 8, 99), 2, 11, 5, False)
    assert row["floor_us"] == pytest.approx(1e6 * 4 * (2 * 2 * 2 * 16 * 8 + 2 * 2 * 4 * 5 * 8) / 1e9)
    assert row["flex_us"] is None


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(gpu_kernels.ops, "tree_attention", lambda q, *_, **__: torch.full_like(q, 7.0).transpose(1, 2))
    place = Place(torch.device("cpu"), 1e9, torch.float32)
    with pytest.raises(AssertionError):
        attention(place, Shape(32, 32, 2, 4, 2, 8, 99), 1, 11, 5, False)


def test_times_and_trees():
    assert seconds(lambda: sum(range(20_000)), torch.device("cpu")) > 1e-5
    tree = binary_tree(2, 7, torch.device("cpu"))
    assert tree.parents[1].tolist() == [-1, 0, 0, 1, 1, 2, 2]
