import json
import time
from importlib.metadata import version

import pytest
import torch

import mmspec
import mmspec.engine.calibrate as calibrate
from mmspec.core.budget import CostTable
from mmspec.core.target import Prompt
from mmspec.drafters.ngram import Ngram
from mmspec.engine.budget import AdaptiveBudget, SteadyBudget
from mmspec.engine.stopping import Stopper
from mmspec.files import cache_folder
from mmspec.sampling.sampler import Sampler
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import shared_model
from tests.tiny.configs import TEXT_CONFIGS

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


def test_measured_once_then_read_until_refreshed(target, measured):
    assert calibrate.stored_cost(target) is None
    assert [calibrate.cost_table(target) for _ in range(3)] == [TABLE] * 3
    assert calibrate.stored_cost(target) == TABLE
    assert len(measured) == 1
    calibrate.cost_table(target, refresh=True)
    assert len(measured) == 2
    (path,) = cache_folder().iterdir()  # written whole: nothing else is left there
    stored = json.loads(path.read_text())
    assert (stored["architecture"], stored["dtype"], stored["tokens"]) == ("LlamaForCausalLM", "float32", [1, 2, 4])


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"tokens": [1, 2]}',
        '{"tokens": 3, "seconds": 4}',
        '{"tokens": [1, 2, 4], "seconds": [0.5, 0.2]}',
        '{"tokens": ["1", "2"], "seconds": [0.5, 0.2]}',
        '{"tokens": [1, 2], "seconds": [0.5, NaN]}',
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
    ("place", "name", "other"),
    [
        (torch, "get_num_threads", lambda: 97),
        (calibrate, "processor", lambda: "another"),
        (calibrate, "build", lambda: "another"),
        (calibrate, "__version__", "0"),
        *(
            (calibrate, "version", lambda name, old=old: version(name) + "0" * (name == old))
            for old in ("torch", "transformers")
        ),
    ],
)
def test_other_machines_and_versions_are_measured_apart(target, measured, monkeypatch, place, name, other):
    calibrate.cost_table(target)
    monkeypatch.setattr(place, name, other)
    assert calibrate.stored_cost(target) is None
    calibrate.cost_table(target)
    assert len(measured) == len(list(cache_folder().iterdir())) == 2


def test_a_measurement_is_the_shortest_pass_of_each_size(target, monkeypatch):
    """Three rounds; a pass over n nodes takes n seconds, in the first two rounds ten times that, but after another size
    half of it."""
    now, forward, passes = [0.0], target.verify, []

    def timed(tree, *rest):
        now[0] += tree.nodes * (10.0 if len(passes) < 8 * len(calibrate.SIZES) else 1.0)
        if passes[-1:] != [tree.nodes]:
            now[0] -= tree.nodes / 2
        passes.append(tree.nodes)
        return forward(tree, *rest)

    monkeypatch.setattr(calibrate, "clock", lambda: now[0])
    monkeypatch.setattr(calibrate, "process_time", lambda: now[0])
    monkeypatch.setattr(target, "verify", timed)
    table = calibrate.measure(target, prefix=8, seconds=1.0)
    assert passes == [size for size in calibrate.SIZES for _ in range(4)] * 3
    assert table == CostTable(calibrate.SIZES, tuple(map(float, calibrate.SIZES)))


def test_prefix_leaves_room_within_the_context(monkeypatch):
    """Of a model whose vocabulary has fewer tokens than the largest tree has nodes."""
    config = TEXT_CONFIGS["llama"]()
    config.vocab_size = 20
    target = TransformersTarget(type(shared_model("llama"))(config))
    monkeypatch.setattr(target, "context_limit", 70)
    seen = []
    prefill = target.prefill
    monkeypatch.setattr(
        target,
        "prefill",
        lambda prompt, max_new_tokens: seen.append(prompt.input_ids.shape) or prefill(prompt, max_new_tokens),
    )
    calibrate.measure(target, prefix=128, seconds=0.01)
    assert seen == [torch.Size([1, 6])]


def decoded(target, table, seconds, steps=40, batch=1, kind=AdaptiveBudget):
    """A pipeline whose budget has seen so many plain steps of a calibrated target; passes take ``seconds``."""
    pipe = mmspec.Pipeline(target, drafter=Ngram())
    pipe.calibrate()
    assert pipe._speculation.budgets.of(batch, None)._table == table
    pipe.budget = kind(table, batch=batch)
    for _ in range(steps):
        pipe._speculation.budgets.of(batch, None).observe(1, [[0]] * batch, 0.0, seconds)
    return pipe._speculation.budgets.of(batch, None)


@pytest.mark.parametrize("kind", [AdaptiveBudget, SteadyBudget])
@pytest.mark.parametrize(
    ("seconds", "steps", "kept"),
    [(0.5, 40, True), (0.35, 40, True), (0.15, 40, False), (0.15, 20, True), (5.0, 40, True)],
)
def test_a_calibration_that_decoding_shows_to_be_wrong_is_measured_at_the_next_load(
    target, measured, seconds, steps, kept, kind
):
    """One token was calibrated at 0.5 s, two, to which one is padded, at 0.25 s.

    Slower passes show nothing: prefixes grow, and machines are busy.
    """
    calibrate.cost_table(target)
    decoded(target, TABLE, seconds, steps, kind=kind)
    assert (calibrate.stored_cost(target) == TABLE) == kept
    calibrate.cost_table(TransformersTarget(target.model))
    assert len(measured) == (1 if kept else 2)


def test_a_few_fast_or_many_mixed_passes_forget_nothing(target, measured):
    calibrate.cost_table(target)
    pipe = mmspec.Pipeline(target, drafter=Ngram())
    pipe.calibrate()
    for step in range(200):
        pipe._speculation.budgets.of(1, None).observe(1, [[0]], 0.0, 0.1 if step % 5 < 2 else 0.5)
    assert calibrate.stored_cost(target) == TABLE


def test_another_process_s_new_measurement_is_not_forgotten(target, measured):
    calibrate.cost_table(target)
    pipe = mmspec.Pipeline(target, drafter=Ngram())
    pipe.calibrate()
    newer = {"tokens": [1, 2, 4], "seconds": [0.1, 0.2, 0.3]}
    calibrate._store(target, newer)
    for _ in range(40):
        pipe._speculation.budgets.of(1, None).observe(1, [[0]], 0.0, 0.1)
    assert calibrate.stored_cost(target) == CostTable((1, 2, 4), (0.1, 0.2, 0.3))


def test_requests_with_adaptive_drafts_calibrate_an_idle_target(target, monkeypatch):
    """Once; those with drafts of a fixed size or without a drafter do not."""
    pipe, plain, measured = mmspec.Pipeline(target, drafter=Ngram()), mmspec.Pipeline(target), []
    monkeypatch.setattr(calibrate, "measure", lambda one, prefix: measured.append((one, one.runner.rows)) or TABLE)

    def answer(pipe, num_draft_tokens=None):
        (row,) = pipe.add(Prompt(torch.tensor([[5, 6, 7, 5, 6]])), Sampler(), Stopper(4), num_draft_tokens)
        pipe.engine.drain()
        assert len(row.token_ids) == 4
        return len(measured)

    assert [answer(plain), answer(pipe, 2), answer(pipe), answer(pipe), answer(plain)] == [0, 0, 1, 1, 1]
    assert measured == [(target, 0)]
    assert (target.cost, pipe.budget._table) == (TABLE, TABLE)
    for _ in range(40):  # passes that take hours less than calibrated
        pipe.budget.check.add(0.0, 1.0)
    assert [answer(pipe), answer(pipe), answer(pipe)] == [1, 2, 2]  # the first one notices


@pytest.mark.parametrize("kind", [AdaptiveBudget, SteadyBudget])
def test_wrong_calibrations_are_noticed_once_each(target, measured, kind, monkeypatch):
    """The measurement that follows may be wrong, too."""
    pipe, forgotten = mmspec.Pipeline(target, drafter=Ngram()), []
    forget = calibrate.forget_cost
    monkeypatch.setattr("mmspec.engine.budget.forget_cost", lambda one: forgotten.append(one) or forget(one))
    monkeypatch.setattr("mmspec.engine.budget.AdaptiveBudget", kind)
    pipe.calibrate()
    for times in range(1, 4):
        wrong = pipe.budget
        for _ in range(100):
            pipe._speculation.budgets.of(1, None).observe(1, [[0]], 0.0, 0.1)
        assert times == 1 or pipe.budget is wrong  # not within a request
        assert len(forgotten) == times
        for _ in range(2):
            pipe.calibrate()
            assert len(measured) == 1 + times
        assert pipe._speculation.budgets.of(1, None) is not wrong


@pytest.mark.parametrize("kind", [AdaptiveBudget, SteadyBudget])
def test_passes_are_compared_with_those_of_as_many_rows(target, measured, kind, monkeypatch):
    """Three rows were calibrated at 0.625 s, one at 0.5 s or, padded to two nodes, 0.25 s."""
    pipe = mmspec.Pipeline(target, drafter=Ngram())
    monkeypatch.setattr("mmspec.engine.budget.AdaptiveBudget", kind)
    pipe.calibrate()
    alone = 0.25 if kind is AdaptiveBudget else 0.5
    for rows, seconds, kept in ((1, alone, True), (3, 0.625, True), (1, alone, True), (3, 0.35, False)):
        for _ in range(40):
            pipe._speculation.budgets.of(rows, None).observe(1, [[0]] * rows, 0.0, seconds)
        assert (pipe._speculation.budgets.of(rows, None).check.overestimated) != kept


def test_time_of_other_processes_is_not_measured(target, monkeypatch):
    """Passes of more than one node wait for a processor."""
    forward = target.verify

    def waits(tree, *rest):
        time.sleep(0.05 * (tree.nodes > 1))
        return forward(tree, *rest)

    monkeypatch.setattr(target, "verify", waits)
    assert max(calibrate.measure(target, prefix=8, seconds=0.01).seconds) < 0.05
