"""Where two answers part, and how close the choice was there."""

import pytest
import torch

from mmspec import compare as module
from mmspec.cli.session import _comparison_lines
from mmspec.compare import Comparison, Difference, Speed, compare, first_difference, next_token_scores
from mmspec.core.target import Prompt
from mmspec.engine.stats import Stats
from mmspec.pipeline import Generation, Pipeline
from mmspec.sampling import defaults
from mmspec.sampling.params import SamplingParams
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer, shared_model

PROMPT = [5, 17, 40, 9]
TOKENS = [3, 33, 61, 7, 12]


class Encoded(Processor):
    """Encodes every request as ``PROMPT``."""

    def encode(self, requests: object, **options: object) -> Prompt:
        return Prompt(torch.tensor([PROMPT]))


def pipeline() -> Pipeline:
    return Pipeline(TransformersTarget(shared_model("llama")), Encoded())


@pytest.mark.parametrize("length", [0, 1, len(TOKENS)])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_scores_are_those_of_a_plain_pass(length: int, penalty: float) -> None:
    model = shared_model("llama")
    ids = torch.tensor([PROMPT + TOKENS[:length]])
    params = SamplingParams(repetition_penalty=penalty)
    with torch.no_grad():
        expected = defaults.processors(params)(ids, model(ids).logits[:, -1])[0]
    scores = next_token_scores(
        TransformersTarget(model), Prompt(torch.tensor([PROMPT])), TOKENS[:length], defaults.processors(params)
    )
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def test_margin_at_the_first_difference() -> None:
    pipe = pipeline()
    scores = next_token_scores(pipe.target, pipe.encode([]), TOKENS[:2], defaults.processors(SamplingParams()))
    best, second = scores.topk(2).indices.tolist()
    found = first_difference(pipe, {}, {}, [*TOKENS[:2], best, 1], [*TOKENS[:2], second])
    assert (found.position, found.speculative, found.plain) == (2, best, second)
    assert found.margin == pytest.approx(float(scores[best] - scores[second]))
    swapped = first_difference(pipe, {}, {}, [*TOKENS[:2], second], [*TOKENS[:2], best])
    assert swapped.margin == pytest.approx(found.margin)


@pytest.mark.parametrize(("token", "shown"), [(5, "'#'"), (None, "the end")])
def test_a_difference_in_words(token: int | None, shown: str) -> None:
    """Our token first, then plain decoding's."""
    pipe = Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), None)
    fast, slow = Speed(10.0, 1.0, 0.1), Speed(4.0, 3.0, 0.5)
    first, second, last = _comparison_lines(Comparison(3, fast, slow, False, Difference(2, token, 7, 0.5)), pipe)
    assert last == f"tokens: differ first at position 2: {shown} against '%', logit margin 0.5 (float32)"
    assert first == "decoding: 2.50x plain decoding (10.0 against 4.0 tokens/s)"
    assert second.startswith("end to end: 5.00x (1.000 against 3.000 s); medians of 3 interleaved rounds, ")
    one = Speed(0.0, 1.0, 0.1)
    first, *_, last = _comparison_lines(Comparison(3, one, one, False, Difference(2, token, 7, None)), pipe)
    assert first == "decoding: nothing to compare in an answer of one token"
    assert last.endswith("against '%' (float32)")


def test_an_answer_that_ends_early() -> None:
    found = first_difference(pipeline(), {}, {}, TOKENS, TOKENS[:3])
    assert (found.position, found.speculative, found.plain, found.margin) == (3, TOKENS[3], None, None)


@pytest.mark.parametrize(("seed", "equal"), [(None, None), (3, False)])
def test_ratios_are_of_seconds_per_token(seed: int | None, equal: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled answers differ in length: 12 tokens in 6 seconds against 4 tokens in 3, of which prefills take 1 each."""
    now = [0.0]

    class Scripted:
        def __init__(self, target: object, processor: object, drafter: object, **_: object) -> None:
            self.count, self.seconds = (12, 6.0) if drafter else (4, 3.0)

        def generate(self, **_: object) -> Generation:
            now[0] += self.seconds
            stats = Stats(accept_lengths=[self.count - 1], wall_seconds=self.seconds, time_to_first_token=1.0)
            return Generation("", list(range(self.count)), "length", stats)

    monkeypatch.setattr(module, "clock", lambda: now[0])
    pipe, drafter = pipeline(), object()
    monkeypatch.setattr(module, "Pipeline", Scripted)
    found = compare(pipe, lambda: drafter, {}, {"temperature": 1.0, "seed": seed})  # type: ignore[arg-type, return-value]
    assert (found.equal, found.speculative.seconds, found.plain.seconds) == (equal, 6.0, 3.0)
    assert found.end_to_end_ratio == pytest.approx((3 / 4) / (6 / 12))
    assert found.decode_ratio == pytest.approx((11 / 5) / (3 / 2))
