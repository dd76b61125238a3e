"""Log probabilities of emitted tokens against transformers' own passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec.engine.stats import token_logprobs
from mmspec.errors import UserError
from mmspec.pipeline import Generation, Pipeline
from mmspec.sampling.params import MOST_LOGPROBS
from mmspec.vision.embedded import samples

REQUEST = {"prompt": "Describe the image.", "images": str(samples() / "scene.png")}
SAMPLED = {"temperature": 1.5, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return mmspec.load("tiny-llava", device="cpu", dtype="float32")


def raw_logprobs(pipe: Pipeline, answer: Generation) -> torch.Tensor:
    """(tokens, vocab): transformers' log_softmax at the position before each token of an answer."""
    prompt = pipe.encode([REQUEST])
    ids = torch.cat([prompt.input_ids, torch.tensor([answer.token_ids])], dim=1)
    with torch.no_grad():
        logits = pipe.model(input_ids=ids, pixel_values=prompt.inputs["pixel_values"]).logits[0].float()
    return logits[prompt.input_ids.shape[1] - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("sampling", [{}, {**SAMPLED, "seed": 3}], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_the_model_before_sampling_parameters(pipe: Pipeline, sampling: dict[str, Any]) -> None:
    answer = pipe.generate(**REQUEST, max_new_tokens=30, logprobs=5, **sampling)
    assert answer.token_ids == pipe.generate(**REQUEST, max_new_tokens=30, **sampling).token_ids
    expected = raw_logprobs(pipe, answer)
    assert [one.token_id for one in answer.logprobs] == answer.token_ids
    own = torch.tensor([one.logprob for one in answer.logprobs])
    torch.testing.assert_close(own, expected[torch.arange(len(own)), answer.token_ids], atol=1e-4, rtol=1e-4)
    best = expected.topk(5, dim=-1)
    assert [[token for token, _ in one.top] for one in answer.logprobs] == best.indices.tolist()
    found = torch.tensor([[value for _, value in one.top] for one in answer.logprobs])
    torch.testing.assert_close(found, best.values, atol=1e-4, rtol=1e-4)


def test_half_precision_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = logits.double().log_softmax(-1)
    found = token_logprobs(logits, [4, 400, 7], 5)
    assert [one.logprob for one in found] == pytest.approx(expected[range(3), [4, 400, 7]].tolist(), abs=1e-5)
    best = [value for one in found for _, value in one.top]
    assert best == pytest.approx(expected.topk(5, dim=-1).values.flatten().tolist(), abs=1e-5)


@pytest.mark.parametrize("vocab", [1, 7, MOST_LOGPROBS - 1, MOST_LOGPROBS, MOST_LOGPROBS + 1])
def test_there_are_no_more_alternatives_than_tokens(vocab: int) -> None:
    (found,) = token_logprobs(torch.arange(float(vocab))[None], [0], MOST_LOGPROBS)
    assert [token for token, _ in found.top] == list(range(vocab))[::-1][:MOST_LOGPROBS]


def test_a_stream_has_the_logprobs_of_its_tokens(pipe: Pipeline) -> None:
    whole = pipe.generate(**REQUEST, max_new_tokens=20, logprobs=1)
    for stop in (None, *whole.text.split()):  # most are inside the tokens of a step
        pieces = list(pipe.stream(**REQUEST, max_new_tokens=20, logprobs=1, stop=stop))
        assert all([one.token_id for one in piece.logprobs] == piece.token_ids for piece in pieces)
        found = [one.logprob for piece in pieces for one in piece.logprobs]
        assert found == pytest.approx([one.logprob for one in whole.logprobs[: len(found)]], abs=1e-4)
        assert stop or len(found) == 20


def test_requests_of_a_batch_record_their_own(pipe: Pipeline) -> None:
    alone = [pipe.generate(prompt, max_new_tokens=12, logprobs=2) for prompt in ("Hello.", "What is this?")]
    together = pipe.generate_batch([{"prompt": "Hello."}, {"prompt": "What is this?"}], max_new_tokens=12, logprobs=2)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert [x.logprob for x in one.logprobs] == pytest.approx([x.logprob for x in other.logprobs], abs=1e-4)


def test_they_are_recorded_on_request_only(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.engine.sequence.token_logprobs", lambda *_: pytest.fail("recorded"))
    assert pipe.generate("Hello.", max_new_tokens=4).logprobs == []
    with pytest.raises(UserError, match=r"logprobs must be <= 20: got 21"):
        pipe.generate("Hello.", logprobs=21)
