"""Biases and penalties of the output, against a loop that counts the output's tokens; ends that are biased."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

import mmspec
from mmspec import Pipeline, SamplingParams, UserError
from mmspec.checking.oracle import Oracle
from tests.mmspec.sampling.plain import decode_plainly
from tests.tiny import byte_model, byte_tokenizer

NEW, EOS, PROMPT = 24, 2, "Say: a a a a"
IDS = torch.tensor([byte_tokenizer()(PROMPT)["input_ids"]])
CASES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {101: 1.5, 32: -100}},
    "all": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {101: 2.0}, "repetition_penalty": 1.2},
    "late end": {"min_new_tokens": 9, "logit_bias": {EOS: 30.0}},
}


def pipeline(drafter: Any = "ngram", **options: Any) -> Pipeline:
    return mmspec.load(byte_model(), drafter, processor=byte_tokenizer(), **options)


def counted(case: dict[str, Any], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The formula of OpenAI's API, with a count of the output's tokens."""
    output = ids[0, IDS.shape[1] :].tolist()
    scores = hf.RepetitionPenaltyLogitsProcessor(case.get("repetition_penalty", 1.0))(ids, scores)
    if len(output) < case.get("min_new_tokens", 0):
        scores[:, EOS] = -torch.inf
    for token, bias in case.get("logit_bias", {}).items():
        scores[:, token] += bias
    for token, count in Counter(output).items():
        scores[:, token] -= case.get("frequency_penalty", 0.0) * count + case.get("presence_penalty", 0.0)
    return scores


@pytest.mark.parametrize("source", ["auto", "mmspec"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_scores_follow_the_formula(case: dict[str, Any], source: str) -> None:
    """Exact on trees: ``PROCESSORS`` of ``test_sampler``."""
    defaults = pipeline(generation_config=source).defaults
    chain = defaults.processors(defaults.complete(SamplingParams(**case)), IDS)
    for output in ([], [101], [101, 32, 101, 7] * 3):
        ids = torch.cat([IDS, torch.tensor([output], dtype=torch.long)], dim=1)
        scores = torch.randn(1, 259, generator=torch.Generator().manual_seed(len(output)))
        torch.testing.assert_close(chain(ids, scores.clone()), counted(case, ids, scores.clone()))


def test_tokens_are_those_of_a_plain_loop() -> None:
    case = CASES["all"]
    chain = [lambda *given: counted(case, *given)]
    expected = decode_plainly(byte_model(), {"input_ids": IDS}, chain, NEW, None, [EOS])
    assert expected != pipeline().generate(PROMPT, max_new_tokens=NEW).token_ids
    answer = pipeline(Oracle([expected], vocab=250, spoil=0.3)).generate(PROMPT, max_new_tokens=NEW, nodes=10, **case)
    assert answer.token_ids == expected
    assert answer.stats.mean_acceptance_length > 1.5


@pytest.mark.parametrize("source", ["auto", "mmspec"])
def test_an_end_that_is_ignored(source: str) -> None:
    bias = {"logit_bias": {EOS: 100.0}, "max_new_tokens": 5}
    pipe = pipeline(generation_config=source)
    ended = pipe.generate(PROMPT, nodes=4, **bias)
    assert (ended.token_ids, ended.finish_reason) == ([EOS], "stop")
    ignored = pipe.generate(PROMPT, nodes=4, ignore_eos=True, **bias)
    assert (ignored.token_ids, ignored.finish_reason, ignored.text) == ([EOS] * 5, "length", "")
    late = pipe.generate(PROMPT, nodes=4, min_new_tokens=3, **bias)
    assert (late.token_ids[3:], late.finish_reason) == ([EOS], "stop")
    assert EOS not in late.token_ids[:3]


@pytest.mark.parametrize("end", [EOS, 40, 41])
@pytest.mark.parametrize("source", ["auto", "mmspec", "the model"])
def test_no_end_of_several_comes_early(source: str, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is forbidden at first, and ends the answer then."""
    config = byte_model().generation_config
    monkeypatch.setattr(config, "eos_token_id", [EOS, 40, 41])
    own = source == "the model"
    monkeypatch.setattr(config, "min_new_tokens", 3 if own else None)
    pipe = pipeline(generation_config="auto" if own else source)
    assert pipe.model.generation_config is config
    fields = {} if own else {"min_new_tokens": 3}
    answer = pipe.generate(PROMPT, nodes=4, logit_bias={end: 100.0}, max_new_tokens=8, **fields)
    assert (answer.token_ids[3:], answer.finish_reason) == ([end], "stop")
    assert not {EOS, 40, 41} & set(answer.token_ids[:3])


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_biased_tokens_are_those_of_the_vocabulary(penalty: float) -> None:
    """The last token id of the vocabulary is allowed, the next id is an error."""
    pipe = pipeline()
    vocab = pipe.model.config.vocab_size
    options = {"nodes": 4, "max_new_tokens": 3, "frequency_penalty": penalty}
    assert pipe.generate(PROMPT, logit_bias={vocab - 1: 100.0}, **options).token_ids[:1] == [vocab - 1]
    with pytest.raises(UserError, match=rf"^biased tokens must be below the vocabulary's size {vocab}: got {vocab}$"):
        pipe.generate(PROMPT, logit_bias={vocab: 1.0}, **options)


def test_mistakes() -> None:
    for wrong in ({"a": 1.0}, {1: 101}, {-1: 1}, {1.5: 1}, {True: 1}, "1=2", [(1, 2, 3)], ((1,),), {1: float("nan")}):
        with pytest.raises(UserError, match="logit_bias must be token ids with biases"):
            SamplingParams(logit_bias=wrong)
    assert SamplingParams(logit_bias={"7": 1, 3: 2}).logit_bias == ((3, 2.0), (7, 1.0))
