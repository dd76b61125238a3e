"""Every option of a request, in a batch with requests that lack it: each is answered as if it were alone.

A new field of ``SamplingParams`` or ``DecodeOptions`` fails here until ``CHANGES`` has a value for it.
"""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

import mmspec
from mmspec import Pipeline, SamplingParams, UserError
from mmspec.engine.request import DecodeOptions
from mmspec.pipeline import Generation
from tests.tiny import byte_model, byte_tokenizer

PROMPT = "The second one, the second one"
SAMPLED = SamplingParams(temperature=1.3, seed=4, max_new_tokens=20)
GREEDY = SamplingParams(seed=4, max_new_tokens=20)

CHANGES: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.3,
    "repetition_penalty": 2.5,
    "max_new_tokens": 7,
    "min_new_tokens": 19,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.2,
    "logit_bias": {2: -100.0, 101: 4.0},
    "grammar_trigger": " ",
    "grammar_aligned": True,
    "ignore_eos": True,
    "lossy": 1.5,
    "stop": "of the answer",  # replaced by a part of it
    "seed": 9,
    "json_schema": {"enum": [1, 2, 3]},
    "regex": "[a-z]{5,9}",
    "grammar": 'start: "x" | "yz"',
    "num_draft_tokens": 2,
    "max_time": 0,
    "logits_processor": [hf.SuppressTokensLogitsProcessor(range(3, 120))],
    "stopping_criteria": [lambda ids, scores: torch.tensor([ids.shape[1] >= len(PROMPT) + 5])],
    "trace": True,
    "logprobs": 2,
    "chat_template": False,
    "context_limit": len(PROMPT) + 11,
    "stop_token_ids": list(range(60, 120)),
}


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    return mmspec.load(byte_model(), None, processor=tokenizer, max_num_seqs=8)


def test_all_options_are_changed() -> None:
    """Or have tests of overlapping calls of their own: ``targets/test_lora.py``, ``sampling/test_reasoning.py``,
    ``serving/test_channels.py``."""
    assert {field.name for field in fields(DecodeOptions)} - CHANGES.keys() == {"adapter", "reasoning", "text_tokens"}


def facts(answer: Generation) -> tuple[Any, ...]:
    logprobs = [(one.token_id, len(one.top)) for one in answer.logprobs]
    return answer.token_ids, answer.text, answer.finish_reason, logprobs, len(answer.trees)


def changed(pipe: Pipeline, params: SamplingParams, name: str) -> SamplingParams:
    value = CHANGES[name]
    return replace(params, **{name: pipe.generate(PROMPT, params=params).text[3:5] if name == "stop" else value})


@pytest.mark.parametrize("base", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams) if field.name != "lossy"])
def test_rows_with_different_parameters(pipe: Pipeline, name: str, base: SamplingParams) -> None:
    if name in ("min_new_tokens", "ignore_eos"):
        base = replace(base, logit_bias={2: 100.0})  # ends at once
    if name in ("grammar_trigger", "grammar_aligned"):
        base = replace(base, regex="[a-z]{1,3}")
    other = changed(pipe, base, name)
    if name == "grammar_aligned" and not base.do_sample:
        with pytest.raises(UserError, match="grammar_aligned goes with sampling, a temperature above 0: got greedy"):
            pipe.generate(PROMPT, params=other)
        return
    asked = [base, other, base, other]
    alone = {params: facts(pipe.generate(PROMPT, params=params)) for params in (base, other)}
    sampled_only = not base.do_sample and name in ("top_p", "top_k", "min_p", "seed")
    assert (alone[base] == alone[other]) == sampled_only  # otherwise nothing would be tested
    together = pipe.generate_batch([{"prompt": PROMPT, "params": params} for params in asked])
    assert [facts(answer) for answer in together] == [alone[params] for params in asked]


@pytest.mark.parametrize("base", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", [field.name for field in fields(DecodeOptions) if field.name in CHANGES])
def test_calls_with_different_options(pipe: Pipeline, name: str, base: SamplingParams) -> None:
    """Calls overlap: streams that have begun, of which neither is finished."""
    asked = [{}, {name: CHANGES[name]}, {}, {name: CHANGES[name]}]
    alone = [facts(pipe.generate(PROMPT, params=base, **extras)) for extras in asked]
    if name != "num_draft_tokens":  # which decides about speed alone
        assert alone[0] != alone[1]
    streams = [pipe.stream(PROMPT, params=base, **extras) for extras in asked]
    pieces = [[next(stream)] for stream in streams]
    for stream, found in zip(streams, pieces, strict=True):
        found += stream
    for found, (token_ids, text, reason, logprobs, trees) in zip(pieces, alone, strict=True):
        assert [token for piece in found for token in piece.token_ids] == token_ids
        assert "".join(piece.text for piece in found) == text
        assert found[-1].finish_reason == reason
        assert [(one.token_id, len(one.top)) for piece in found for one in piece.logprobs] == logprobs
        assert len(found[-1].trees) == trees
