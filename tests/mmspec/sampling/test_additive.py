"""Biases and penalties of the output, exact on trees: the reference is a loop that counts the output's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from mmspec import Pipeline, SamplingParams, UserError
from mmspec.core.drafter import Drafter
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.small import Small
from mmspec.drafters.union import Union
from mmspec.eval.decoding.oracle import Oracle
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.mmspec.sampling.plain import decode_plainly
from tests.tiny import byte_model, byte_tokenizer

NEW, EOS, TEMPERATURE = 24, 2, 0.8
PROMPTS = ("Say: a a a a", "What is it? It is it", "Count: one two one two")
CASES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {101: 1.5, 32: -100}},
    "all": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {101: 2.0}, "repetition_penalty": 1.2},
    "late end": {"min_new_tokens": 9, "logit_bias": {EOS: 30.0}},
}
DRAFTERS: dict[str, Callable[[Sequence[Sequence[int]]], Drafter | None]] = {
    "plain": lambda _: None,
    "oracle": lambda references: Oracle(references, vocab=250, spoil=0.3),
    "union": lambda _: Union([Small(byte_model(), top_k=2), Ngram()]),
    "recycle": lambda _: Recycle(top_k=3),
}


class Counted(hf.LogitsProcessor):
    """The formula of OpenAI's API, with a count of the output's tokens."""

    def __init__(self, prompt_length: int, case: dict[str, Any]) -> None:
        self.first, self.case = prompt_length, case

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = ids[0, self.first :].tolist()
        scores = hf.RepetitionPenaltyLogitsProcessor(self.case.get("repetition_penalty", 1.0))(ids, scores)
        if len(output) < self.case.get("min_new_tokens", 0):
            scores[:, EOS] = -torch.inf
        for token, bias in self.case.get("logit_bias", {}).items():
            scores[:, token] += bias
        for token, count in Counter(output).items():
            scores[:, token] -= self.case.get("frequency_penalty", 0.0) * count
            scores[:, token] -= self.case.get("presence_penalty", 0.0)
        return scores


def plainly(prompt: str, seed: int | None, case: dict[str, Any]) -> list[int]:
    ids = torch.tensor([byte_tokenizer()(prompt)["input_ids"]])
    chain = [Counted(ids.shape[1], case), *([] if seed is None else [hf.TemperatureLogitsWarper(TEMPERATURE)])]
    return decode_plainly(byte_model(), {"input_ids": ids}, chain, NEW, seed, [EOS])


def pipeline(drafter: Drafter | None, **options: Any) -> Pipeline:
    return Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), drafter, **options)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_a_plain_loop(drafter: str, sampled: bool) -> None:
    """Rows of all cases in one batch, with prompts of different lengths."""
    seeds = [number if sampled else None for number in range(len(CASES))]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(CASES))]
    asked = list(zip(prompts, seeds, CASES.values(), strict=True))
    expected = [plainly(prompt, seed, case) for prompt, seed, case in asked]
    without = [plainly(prompt, seed, {}) for prompt, seed, _ in asked]
    assert all(one != other for one, other in zip(expected, without, strict=True))
    temperature = TEMPERATURE if sampled else 0.0
    requests = [
        {
            "prompt": prompt,
            "params": SamplingParams(temperature=temperature, seed=seed, max_new_tokens=NEW, **case),
        }
        for prompt, seed, case in asked
    ]
    pipe = pipeline(DRAFTERS[drafter](expected))
    answers = pipe.generate_batch(requests, nodes=0 if drafter == "plain" else 10)
    assert [answer.token_ids for answer in answers] == expected
    if drafter == "oracle":
        assert max(answer.stats.mean_acceptance_length for answer in answers) > 1.5


def test_beside_a_processor_that_runs_path_by_path() -> None:
    case = CASES["all"]
    answer = pipeline(Ngram()).generate(
        PROMPTS[0], nodes=6, max_new_tokens=NEW, logits_processor=[lambda ids, scores: scores], **case
    )
    assert answer.token_ids == plainly(PROMPTS[0], None, case)


@pytest.mark.parametrize("source", ["auto", "mmspec"])
def test_an_end_that_is_ignored(source: str) -> None:
    bias = {"logit_bias": {EOS: 100.0}, "max_new_tokens": 5}
    pipe = pipeline(Ngram(), generation_config=source)
    ended = pipe.generate(PROMPTS[0], nodes=4, **bias)
    assert (ended.token_ids, ended.finish_reason) == ([EOS], "stop")
    ignored = pipe.generate(PROMPTS[0], nodes=4, ignore_eos=True, **bias)
    assert (ignored.token_ids, ignored.finish_reason, ignored.text) == ([EOS] * 5, "length", "")
    late = pipe.generate(PROMPTS[0], nodes=4, min_new_tokens=3, **bias)
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
    pipe = pipeline(Ngram(), generation_config="auto" if own else source)
    assert pipe.model.generation_config is config
    fields = {} if own else {"min_new_tokens": 3}
    answer = pipe.generate(PROMPTS[0], nodes=4, logit_bias={end: 100.0}, max_new_tokens=8, **fields)
    assert (answer.token_ids[3:], answer.finish_reason) == ([end], "stop")
    assert not {EOS, 40, 41} & set(answer.token_ids[:3])


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_biased_tokens_are_those_of_the_vocabulary(penalty: float) -> None:
    """The last token id of the vocabulary is allowed, the next id is an error."""
    pipe = pipeline(Ngram())
    vocab = pipe.model.config.vocab_size
    options = {"nodes": 4, "max_new_tokens": 3, "frequency_penalty": penalty}
    assert pipe.generate(PROMPTS[0], logit_bias={vocab - 1: 100.0}, **options).token_ids[:1] == [vocab - 1]
    with pytest.raises(UserError, match=rf"^biased tokens must be below the vocabulary's size {vocab}: got {vocab}$"):
        pipe.generate(PROMPTS[0], logit_bias={vocab: 1.0}, **options)


def test_mistakes() -> None:
    for wrong in ({"a": 1.0}, {1: 101}, {-1: 1}, {1.5: 1}, {True: 1}, "1=2", [(1, 2, 3)], ((1,),), {1: float("nan")}):
        with pytest.raises(UserError, match="logit_bias must be token ids with biases"):
            SamplingParams(logit_bias=wrong)
    assert SamplingParams(logit_bias={"7": 1, 3: 2}).logit_bias == ((3, 2.0), (7, 1.0))
