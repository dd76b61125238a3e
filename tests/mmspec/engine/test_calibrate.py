import json

import pytest
import torch

import mmspec.engine.calibrate as calibrate
from mmspec.core.budget import CostTable
from mmspec.files import cache_folder
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import shared_model

TABLE = CostTable((1, 2, 4), (0.5, 0.25, 1.0))


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "made" / "on demand"))
    return TransformersTarget(shared_model("llama"))


@pytest.fixture
def measured(monkeypatch):
    """Counts measurements instead of making them."""
    calls = []
    monkeypatch.setattr(calibrate, "measure", lambda target, prefix: calls.append(prefix) or TABLE)
    return calls


def test_measured_once_then_read(target, measured):
    assert calibrate.stored_cost(target) is None
    assert [calibrate.cost_table(target) for _ in range(3)] == [TABLE] * 3
    assert calibrate.stored_cost(target) == TABLE
    assert len(measured) == 1


def test_refresh_measures_again(target, measured):
    calibrate.cost_table(target)
    calibrate.cost_table(target, refresh=True)
    assert len(measured) == 2


def test_the_file_says_what_was_measured(target, measured):
    calibrate.cost_table(target)
    (path,) = cache_folder().iterdir()  # written whole: nothing else is left there
    stored = json.loads(path.read_text())
    assert stored["architecture"] == "LlamaForCausalLM"
    assert stored["dtype"] == "float32"
    assert stored["tokens"] == [1, 2, 4]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"tokens": [1, 2]}',
        '{"tokens": 3, "seconds": 4}',
        '{"tokens": [], "seconds": []}',
        '{"tokens": [1], "seconds": [0.5]}',
        '{"tokens": [1, 2, 4], "seconds": [0.5, 0.2]}',
        '{"tokens": [1, 4, 2], "seconds": [0.5, 0.2, 0.1]}',
        '{"tokens": ["1", "2"], "seconds": [0.5, 0.2]}',
        '{"tokens": [1, 2], "seconds": [0.5, NaN]}',
        '{"tokens": [1, 2], "seconds": [0.5, 0.0]}',
        "\u0000\ufffd",
    ],
)
def test_a_damaged_file_is_measured_anew(target, measured, content):
    calibrate.cost_table(target)
    (path,) = cache_folder().iterdir()
    path.write_text(content)
    assert calibrate.cost_table(target) == TABLE
    assert len(measured) == 2
    assert calibrate.stored_cost(target) == TABLE


def test_a_spoilt_measurement_is_not_kept(target, monkeypatch):
    spoilt = CostTable((1, 2, 4), (0.01, 1.0, 0.02))
    monkeypatch.setattr(calibrate, "measure", lambda target, prefix: spoilt)
    assert calibrate.cost_table(target) == spoilt
    assert calibrate.stored_cost(target) is None


def test_a_folder_that_cannot_be_written_costs_a_measurement(target, measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "file" / "below a file"))
    assert calibrate.cost_table(target) == calibrate.cost_table(target) == TABLE
    assert len(measured) == 2


def test_other_models_and_dtypes_are_measured_apart(target):
    described = [calibrate.describe(target)]
    described.append(calibrate.describe(TransformersTarget(shared_model("qwen3"))))
    half = TransformersTarget(type(shared_model("llama"))(shared_model("llama").config).bfloat16())
    described.append(calibrate.describe(half))
    assert len({json.dumps(d, sort_keys=True) for d in described}) == 3


@pytest.mark.parametrize(
    ("place", "name", "values"),
    [
        (torch, "get_num_threads", (1, 2, 8)),
        (torch, "__version__", ("2.9.0", "2.10.0")),
        (calibrate.transformers, "__version__", ("5.17.0", "5.18.0")),
        (calibrate, "_processor", ("one", "another")),
    ],
)
def test_other_threads_software_and_processors_are_measured_apart(target, measured, monkeypatch, place, name, values):
    for count, value in enumerate(values, start=1):
        monkeypatch.setattr(place, name, value if name == "__version__" else lambda value=value: value)
        assert calibrate.stored_cost(target) is None
        calibrate.cost_table(target)
        assert len(measured) == len(list(cache_folder().iterdir())) == count


def test_a_measurement_is_the_median_pass_of_each_size(target, monkeypatch):
    """Three rounds; a pass over n nodes takes n seconds, in the first round ten times that."""
    now, forward, passes = [0.0], target.forward_tree, []

    def timed(tree):
        now[0] += tree.nodes * (10.0 if len(passes) < len(calibrate.SIZES) else 1.0)
        passes.append(tree.nodes)
        return forward(tree)

    monkeypatch.setattr(calibrate, "clock", lambda: now[0])
    monkeypatch.setattr(target, "forward_tree", timed)
    table = calibrate.measure(target, prefix=8, seconds=1.0)
    assert passes == list(calibrate.SIZES) * 3
    assert table == CostTable(calibrate.SIZES, tuple(map(float, calibrate.SIZES)))


def test_prefix_leaves_room_within_the_context(monkeypatch):
    model = shared_model("llama")
    target = TransformersTarget(model)
    monkeypatch.setattr(model.config, "max_position_embeddings", 70)
    seen = []
    prefill = target.prefill
    monkeypatch.setattr(
        target, "prefill", lambda prompt, room: seen.append(prompt.input_ids.shape) or prefill(prompt, room)
    )
    calibrate.measure(target, prefix=128, seconds=0.01)
    assert seen == [torch.Size([1, 6])]
