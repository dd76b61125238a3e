"""Times of methods by a clock that only named calls move; ratios of answers of unequal length."""

from functools import wraps

import pytest

import mmspec
from eval.harness.timing import PLAIN, TRANSFORMERS, Way, measure, ratios
from mmspec.drafters.recycle import Recycle
from mmspec.transformers_target import TransformersTarget
from tests.standin import save_text_model

SECONDS = {"prefill": 100.0, "begin": 20.0, "propose": 5.0, "forward_tree": 3.0, "commit": 1.0}
REQUESTS = [{"prompt": "Describe the image."}, {"prompt": "A red circle"}]


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """A pipeline whose calls take as long as ``SECONDS`` says."""
    now = [0.0]
    for module in ("mmspec.engine", "eval.harness.timing", "eval.harness.drafters"):
        monkeypatch.setattr(f"{module}.clock", lambda: now[0])

    def timed(call, seconds):
        @wraps(call)
        def longer(*arguments, **keywords):
            now[0] += seconds
            return call(*arguments, **keywords)

        return longer

    for name, seconds in SECONDS.items():
        owner = Recycle if hasattr(Recycle, name) else TransformersTarget
        monkeypatch.setattr(owner, name, timed(getattr(owner, name), seconds))
    return mmspec.load(str(save_text_model(tmp_path)), drafter=None)


def test_every_second_has_its_place(pipe):
    ways = [Way(PLAIN), Way("recycle", Recycle(), 6)]
    measure(pipe, REQUESTS, ways, rounds=3, max_new_tokens=9)
    assert ways[0].tokens == ways[1].tokens == [9, 9]
    for way, drafting in zip(ways, (False, True), strict=True):
        for spent, length in zip(way.seconds, way.lengths, strict=True):
            steps = round(8 / length)
            # What a drafter makes of the prompt comes after the first token: it is drafting, and decoding.
            begin, propose = (SECONDS["begin"], SECONDS["propose"]) if drafting else (0.0, 0.0)
            # Nothing is drafted for a last token.
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
    slow, fast = Way(PLAIN, tokens=[10, 5, 1, 4]), Way("fast", tokens=[20, 3, 6, 1])
    slow.seconds = [{"total": total, "decoding": total - 1} for total in (20.0, 10.0, 3.0, 4.0)]
    fast.seconds = [{"total": total, "decoding": total - 2} for total in (10.0, 12.0, 3.0, 4.0)]
    assert ratios(slow, fast, "total") == pytest.approx([2.0 / 0.5, 2.0 / 4.0, 3.0 / 0.5, 1.0 / 4.0])
    # The last two prompts have an answer of one token.
    assert ratios(slow, fast, "decoding") == pytest.approx([(19 / 9) / (8 / 19), (9 / 4) / (10 / 2)])


def test_transformers_answers_are_counted_too(pipe):
    way = Way(TRANSFORMERS)
    measure(pipe, REQUESTS[:1], [way], rounds=1, max_new_tokens=5)
    assert way.tokens == [len(way.answers[0])] == [5]
    way.clear()
    assert way.tokens == way.answers == []
