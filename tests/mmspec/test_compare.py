"""Where two answers part, and how close the choice was there."""

from __future__ import annotations

import pytest
import torch

from mmspec.compare import first_difference, next_token_scores
from mmspec.sampling import SamplingParams
from mmspec.target import Prompt
from mmspec.transformers_target import TransformersTarget
from tests.tiny import shared_model

PROMPT = [5, 17, 40, 9]
TOKENS = [3, 33, 61, 7, 12]


class Encoded(TransformersTarget):
    """A target without tokenizer, whose every request is ``PROMPT``."""

    def encode(self, requests: object, **inputs: object) -> Prompt:
        return Prompt(torch.tensor([PROMPT]))


@pytest.mark.parametrize("length", [0, 1, len(TOKENS)])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_scores_are_those_of_a_plain_pass(length: int, penalty: float) -> None:
    model = shared_model("llama")
    ids = torch.tensor([PROMPT + TOKENS[:length]])
    params = SamplingParams(repetition_penalty=penalty)
    with torch.no_grad():
        expected = params.processors()(ids, model(ids).logits[:, -1])[0]
    scores = next_token_scores(Encoded(model), Prompt(torch.tensor([PROMPT])), TOKENS[:length], params)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def test_margin_at_the_first_difference() -> None:
    target = Encoded(shared_model("llama"))
    scores = next_token_scores(target, target.encode([]), TOKENS[:2], SamplingParams())
    best, second = scores.topk(2).indices.tolist()
    found = first_difference(target, {}, {}, [*TOKENS[:2], best, 1], [*TOKENS[:2], second])
    assert (found.position, found.speculative, found.plain) == (2, best, second)
    assert found.margin == pytest.approx(float(scores[best] - scores[second]))
    swapped = first_difference(target, {}, {}, [*TOKENS[:2], second], [*TOKENS[:2], best])
    assert swapped.margin == pytest.approx(found.margin)


def test_an_answer_that_ends_early() -> None:
    found = first_difference(Encoded(shared_model("llama")), {}, {}, TOKENS, TOKENS[:3])
    assert (found.position, found.speculative, found.plain, found.margin) == (3, TOKENS[3], None, None)
