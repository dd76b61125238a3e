"""Timing of methods, with a fake clock that only chosen calls advance; speedups of answers of unequal length."""

from functools import partial, wraps

import pytest

import mmspec
from mmspec.drafters.recycle import Recycle
from mmspec.eval.harness.measuring import interleaved
from mmspec.eval.harness.timing import PLAIN, TRANSFORMERS, Method, compare_methods, time_ratios
from mmspec.targets.decoder import Decoder
from mmspec.targets.transformers_target import TransformersTarget
from tests.model_folders import save_text_model

SECONDS = {"prefill": 100.0, "begin": 20.0, "propose": 5.0, "forward_tree": 3.0, "commit": 1.0}
REQUESTS = [{"prompt": "Describe the image."}, {"prompt": "A red circle"}]


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """A pipeline whose calls take ``SECONDS`` on the fake clock."""
    now = [0.0]
    for module in (
        "mmspec.engine.core",
        "mmspec.engine.request_state",
        "mmspec.eval.harness.timing",
        "mmspec.eval.harness.drafters",
    ):
        monkeypatch.setattr(f"{module}.clock", lambda: now[0])
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
    return mmspec.load(str(save_text_model(tmp_path)), drafter=None)


def test_every_second_is_attributed_to_a_phase(pipe):
    methods = [Method(PLAIN), Method("recycle", Recycle(), 6)]
    compare_methods(pipe, REQUESTS, methods, rounds=3, max_new_tokens=9)
    assert methods[0].tokens == methods[1].tokens == [9, 9]
    for method, drafting in zip(methods, (False, True), strict=True):
        for spent, length in zip(method.seconds, method.lengths, strict=True):
            steps = round(8 / length)
            # The drafter's prefill comes after the first token: it counts as drafting, and as decoding.
            begin, propose = (SECONDS["begin"], SECONDS["propose"]) if drafting else (0.0, 0.0)
            # No tree is drafted when one token is left.
            assert spent["draft"] - begin in (steps * propose, (steps - 1) * propose)
            assert spent == {
                "total": 100.0 + spent["draft"] + steps * (3.0 + 1.0),
                "decoding": spent["draft"] + steps * (3.0 + 1.0),
                "prefill": 100.0,
                "draft": spent["draft"],
                "verify": steps * 3.0,
                "commit": steps * 1.0,
                "tree": propose,
                "pass": 3.0,
            }


def test_ratios_are_of_seconds_per_token():
    slow, fast = Method(PLAIN, tokens=[10, 5, 1, 4]), Method("fast", tokens=[20, 3, 6, 1])
    slow.seconds = [{"total": total, "decoding": total - 1} for total in (20.0, 10.0, 3.0, 4.0)]
    fast.seconds = [{"total": total, "decoding": total - 2} for total in (10.0, 12.0, 3.0, 4.0)]
    assert time_ratios(slow, fast, "total") == pytest.approx([2.0 / 0.5, 2.0 / 4.0, 3.0 / 0.5, 1.0 / 4.0])
    # The last two prompts are left out: one of their answers has one token.
    assert time_ratios(slow, fast, "decoding") == pytest.approx([(19 / 9) / (8 / 19), (9 / 4) / (10 / 2)])


def test_transformers_answers_are_counted(pipe):
    method = Method(TRANSFORMERS)
    compare_methods(pipe, REQUESTS[:1], [method], rounds=1, max_new_tokens=5)
    assert method.tokens == [len(method.answers[0])] == [5]
    method.clear()
    assert method.tokens == method.answers == []


def test_calls_are_interleaved_in_rotating_order_after_a_warm_up():
    order = []

    def call(name):
        order.append(name)
        return float(len(order))

    calls = {name: partial(call, name) for name in ("a", "b")}
    assert interleaved(calls, 2, 2) == {"a": [5.0, 8.0], "b": [6.0, 7.0]}
    assert order == ["a", "b", "b", "a"] * 2
