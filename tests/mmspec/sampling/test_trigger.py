"""Grammars that begin after a text: the reference is a loop that looks for the text in the whole output each time."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("llguidance")

from transformers.generation import logits_process as hf

import mmspec
from mmspec import Pipeline, SamplingParams
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.registry import make_drafter
from mmspec.eval.decoding.oracle import Oracle
from mmspec.plugins import model_path
from tests.mmspec.sampling.plain import allowed_tokens, decode_plainly, llguidance_tokenizer, masking, source

NEW, PROMPT = 24, "What is in a picture?"
LETTERS, DIGITS = r"[ a-z]{0,2}[ o-z]{4,16}\.", r"[0-9]{3,6}"
SAMPLED: dict[str, Any] = {"temperature": 1.2, "seed": 3}


@cache
def plain() -> Pipeline:
    return mmspec.load("tiny-llava", None, device="cpu", dtype="float32")


@cache
def known() -> Any:
    return llguidance_tokenizer(plain().processor.tokenizer, plain().target.eos_token_ids[0])


def allowed(said: list[int], trigger: str, pattern: str) -> list[int] | None:
    """What may come after some tokens; None where the output is free."""
    text, wanted = known().decode_bytes(said), trigger.removeprefix("^").encode()
    at = text.find(wanted)
    if at < 0 or (trigger.startswith("^") and at):
        return None
    begun = next(n for n in range(len(said) + 1) if len(known().decode_bytes(said[:n])) >= at + len(wanted))
    first = known().decode_bytes(said[:begun])[at + len(wanted) :]
    rest = [*known().tokenize_bytes(first), *said[begun:]]
    return allowed_tokens(plain().processor.tokenizer, plain().target.eos_token_ids, source("regex", pattern), rest)


@cache
def plainly(trigger: str, pattern: str, sampled: bool) -> list[int]:
    pipe = plain()
    ids = pipe.encode([{"prompt": PROMPT}]).input_ids
    chain: list[Any] = [masking(lambda said, vocab: allowed(said, trigger, pattern), ids.shape[1])]
    chain += [hf.TemperatureLogitsWarper(SAMPLED["temperature"])] if sampled else []
    seed = SAMPLED["seed"] if sampled else None
    return decode_plainly(pipe.model, {"input_ids": ids}, chain, NEW, seed, pipe.target.eos_token_ids)


@cache
def free(sampled: bool) -> str:
    answer = plain().generate(PROMPT, max_new_tokens=NEW, **(SAMPLED if sampled else {}))
    return plain().processor.tokenizer.decode(answer.token_ids)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["oracle", "flash+ngram"])
@pytest.mark.usefixtures("one_thread")
def test_tokens_are_those_of_a_plain_loop(drafter: str, sampled: bool) -> None:
    """Triggers of all ends within and between tokens, in one batch; with digits, tokens that go on are free."""
    text = free(sampled)
    cases = [(text[4 : 7 + end], LETTERS) for end in range(4)] + [(text[3:9], DIGITS), ("^" + text[:5], LETTERS)]
    cases += [("^" + text[1:5], DIGITS), ("never said", DIGITS)]
    expected = [plainly(trigger, pattern, sampled) for trigger, pattern in cases]
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
