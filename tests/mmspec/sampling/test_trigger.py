"""Grammars that begin after a text: the reference is a loop that looks for the text in the whole output each time."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")

from llguidance import LLMatcher, hf

import mmspec
from mmspec import Pipeline, SamplingParams, UserError
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.registry import make_drafter
from mmspec.eval.decoding.oracle import Oracle
from mmspec.plugins import model_path
from mmspec.sampling.syntax import source

NEW, PROMPT = 24, "What is in a picture?"
LETTERS, DIGITS = r"[ a-z]{0,2}[ o-z]{4,16}\.", r"[0-9]{3,6}"
SAMPLED: dict[str, Any] = {"temperature": 1.2, "seed": 3}


@cache
def plain() -> Pipeline:
    return mmspec.load("tiny-llava", None, device="cpu", dtype="float32")


@cache
def known() -> Any:
    return hf.from_tokenizer(plain().processor.tokenizer, eos_token=plain().target.eos_token_ids[0])


def allowed(said: list[int], trigger: str, token: int | None, pattern: str, vocab: int) -> torch.Tensor:
    """(vocab,) bool: what may come after some tokens; all where the output is free."""
    everything, text = torch.ones(vocab, dtype=torch.bool), known().decode_bytes(said)
    if token is not None:
        if token not in said:
            return everything
        rest, begun = said[said.index(token) + 1 :], len(said)
    else:
        wanted = trigger.removeprefix("^").encode()
        at = text.find(wanted)
        if at < 0 or (trigger.startswith("^") and at):
            return everything
        begun = next(n for n in range(len(said) + 1) if len(known().decode_bytes(said[:n])) >= at + len(wanted))
        first = known().decode_bytes(said[:begun])[at + len(wanted) :]
        rest = [*known().tokenize_bytes(first), *said[begun:]]
    matcher = LLMatcher(known(), source("regex", pattern), log_level=0)
    if not matcher.consume_tokens(rest):
        return everything
    bias = matcher.compute_logit_bias()
    return torch.tensor([token < len(bias) and bias[token] != 0 for token in range(vocab)])


@cache
def plainly(trigger: str, token: int | None, pattern: str, sampled: bool) -> list[int]:
    pipe, said = plain(), []
    numbers = torch.rand(64, generator=torch.Generator().manual_seed(SAMPLED["seed"]))
    ids, ends = pipe.encode([{"prompt": PROMPT}]).input_ids, pipe.target.eos_token_ids
    while len(said) < NEW and not (said and said[-1] in ends):
        row = torch.cat([ids, torch.tensor([said], dtype=torch.long)], dim=1)
        with torch.no_grad():
            scores = pipe.model(input_ids=row, use_cache=False).logits[0, -1].float()
        scores = scores.masked_fill(~allowed(said, trigger, token, pattern, len(scores)), -torch.inf)
        if sampled:
            total = (scores / SAMPLED["temperature"]).softmax(-1).double().cumsum(-1)
            said.append(int((total <= numbers[len(said)].double() * total[-1]).sum()))
        else:
            said.append(int(scores.argmax()))
    return said


@cache
def free(sampled: bool) -> str:
    answer = plain().generate(PROMPT, max_new_tokens=NEW, **(SAMPLED if sampled else {}))
    return plain().processor.tokenizer.decode(answer.token_ids)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["oracle", "flash+ngram", "recycle"])
@pytest.mark.usefixtures("one_thread")
def test_tokens_are_those_of_a_plain_loop(drafter: str, sampled: bool) -> None:
    """Triggers of all ends within and between tokens, in one batch; with digits, tokens that go on are free."""
    text = free(sampled)
    cases = [(text[4 : 7 + end], LETTERS) for end in range(4)] + [(text[3:9], DIGITS), ("^" + text[:5], LETTERS)]
    cases += [("^" + text[1:5], DIGITS), ("never said", DIGITS)]
    expected = [plainly(trigger, None, pattern, sampled) for trigger, pattern in cases]
    assert len({tuple(one) for one in expected}) >= 3
    made = (
        Oracle(expected, vocab=250, spoil=0.3)
        if drafter == "oracle"
        else make_drafter(drafter, model_path("tiny-llava"))
    )
    pipe = Pipeline(plain().target, plain().processor, made)
    options = SAMPLED if sampled else {}
    answers = pipe.generate_batch(
        [
            {
                "prompt": PROMPT,
                "params": SamplingParams(regex=pattern, grammar_trigger=trigger, max_new_tokens=NEW, **options),
            }
            for trigger, pattern in cases
        ],
        nodes=8,
    )
    assert [answer.token_ids for answer in answers] == expected
    assert sum(answer.stats.num_draft_tokens for answer in answers) > 0


@pytest.mark.usefixtures("one_thread")
def test_a_special_token_is_a_trigger_by_its_id_and_shown() -> None:
    pipe = Pipeline(plain().target, plain().processor, Ngram())
    name, token = pipe.processor.tokenizer.pad_token, pipe.processor.tokenizer.pad_token_id
    text = pipe.generate(
        PROMPT, nodes=4, max_new_tokens=NEW, regex=DIGITS, grammar_trigger=name, logit_bias={token: 100}
    )
    assert text.token_ids[0] == token
    assert text.text.startswith(name)
    assert text.text.removeprefix(name).isdigit()


def test_mistakes() -> None:
    with pytest.raises(
        UserError, match="grammar_trigger goes with one of json_schema, regex, grammar: got none of them"
    ):
        SamplingParams(grammar_trigger="a")
