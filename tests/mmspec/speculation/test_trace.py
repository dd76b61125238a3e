"""The record of a request's trees agrees with its tokens, its figures and the model's own probabilities."""

import pytest
import torch

from mmspec import Pipeline
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.speculation.trace import Traced
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

PROMPT = "abcabcabcabd"


def pipeline(drafter):
    return Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), drafter)


@pytest.mark.parametrize("make", [Ngram, Recycle])
def test_the_steps_spell_the_answer(make):
    traced = Traced(make())
    answer = pipeline(traced).generate(PROMPT, max_new_tokens=30, nodes=6)
    untraced = pipeline(make()).generate(PROMPT, max_new_tokens=30, nodes=6)
    assert answer.token_ids == untraced.token_ids
    assert answer.stats.accept_lengths == untraced.stats.accept_lengths
    (steps,) = traced.rows
    assert len(steps) == answer.stats.num_spec_steps
    said = answer.token_ids[:1]
    for step in steps:
        assert step.tokens[0] == said[-1]
        said += [*(step.tokens[node] for node in step.path[1:]), step.bonus]
    assert said[: len(answer.token_ids)] == answer.token_ids
    assert sum(len(step.tokens) - 1 for step in steps) == answer.stats.num_draft_tokens > 0


def test_probabilities_are_the_models_own():
    traced = Traced(Recycle())
    answer = pipeline(traced).generate(PROMPT, max_new_tokens=30, nodes=6)
    prefix = byte_tokenizer()(PROMPT)["input_ids"] + answer.token_ids[:1]
    checked = 0
    for step in traced.rows[0]:
        for node, parent in enumerate(step.parents):
            if node:
                above = [parent]
                while step.parents[above[0]] >= 0:
                    above.insert(0, step.parents[above[0]])
                ids = torch.tensor([prefix + [step.tokens[n] for n in above[1:]]])
                with torch.no_grad():
                    expected = byte_model()(ids).logits[0, -1].softmax(-1)[step.tokens[node]]
                assert step.probs[node] == pytest.approx(float(expected), abs=1e-5)
                checked += 1
        prefix += [*(step.tokens[node] for node in step.path[1:]), step.bonus]
        with torch.no_grad():
            expected = byte_model()(torch.tensor([prefix[:-1]])).logits[0, -1].softmax(-1)[step.bonus]
        assert step.bonus_prob == pytest.approx(float(expected), abs=1e-5)
    assert checked > 5


def test_guesses_are_shares_of_their_parents():
    traced = Traced(Ngram())
    pipeline(traced).generate(PROMPT, max_new_tokens=30, nodes=6)
    drafted = [step for step in traced.rows[0] if len(step.tokens) > 1]
    assert drafted
    for step in drafted:
        assert step.guesses is not None
        assert all(0 < guess <= 1 for guess in step.guesses)
        for parent in set(step.parents) - {-1}:
            shares = [g for g, p in zip(step.guesses, step.parents, strict=True) if p == parent]
            assert sum(shares) <= 1 + 1e-6


def test_each_row_and_request_has_its_own():
    traced = Traced(Recycle())
    pipe = pipeline(traced)
    requests = [{"prompt": "a"}, {"prompt": "The second one"}]
    rows = pipe.generate_batch(requests, max_new_tokens=12, nodes=6)
    for row, steps in zip(rows, traced.rows, strict=True):
        said = row.token_ids[:1]
        for step in steps:
            said += [*(step.tokens[node] for node in step.path[1:]), step.bonus]
        assert said[: len(row.token_ids)] == row.token_ids
    pipe.generate("b", max_new_tokens=3, nodes=6)
    assert len(traced.rows) == 1
