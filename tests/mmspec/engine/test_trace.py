"""The record of a request's trees agrees with its tokens, its statistics and the model's probabilities."""

import pytest
import torch

from mmspec import Pipeline
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

PROMPT = "abcabcabcabd"


def pipeline(drafter):
    return Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), drafter)


@pytest.mark.parametrize("make", [Ngram, Recycle])
def test_the_steps_spell_the_answer(make):
    answer = pipeline(make()).generate(PROMPT, max_new_tokens=30, nodes=6, trace=True)
    untraced = pipeline(make()).generate(PROMPT, max_new_tokens=30, nodes=6)
    assert answer.token_ids == untraced.token_ids
    assert answer.stats.accept_lengths == untraced.stats.accept_lengths
    steps = answer.trees
    assert untraced.trees == []
    assert len(steps) == answer.stats.num_spec_steps
    said = answer.token_ids[:1]
    for step in steps:
        assert step.tokens[0] == said[-1]
        said += [*(step.tokens[node] for node in step.path[1:]), step.bonus]
    assert said[: len(answer.token_ids)] == answer.token_ids
    assert sum(len(step.tokens) - 1 for step in steps) == answer.stats.num_draft_tokens > 0
    for step in steps:
        assert step.texts == [byte_tokenizer().decode([token]) for token in step.tokens]
        assert step.bonus_text == byte_tokenizer().decode([step.bonus])


def test_probabilities_are_the_models_own():
    answer = pipeline(Recycle()).generate(PROMPT, max_new_tokens=30, nodes=6, trace=True)
    prefix = byte_tokenizer()(PROMPT)["input_ids"] + answer.token_ids[:1]
    checked = 0
    for step in answer.trees:
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
    answer = pipeline(Ngram()).generate(PROMPT, max_new_tokens=30, nodes=6, trace=True)
    drafted = [step for step in answer.trees if len(step.tokens) > 1]
    assert drafted
    for step in drafted:
        assert step.guesses is not None
        assert all(0 < guess <= 1 for guess in step.guesses)
        for parent in set(step.parents) - {-1}:
            shares = [g for g, p in zip(step.guesses, step.parents, strict=True) if p == parent]
            assert sum(shares) <= 1 + 1e-6


def test_each_row_has_its_own():
    pipe = pipeline(Recycle())
    requests = [{"prompt": "a"}, {"prompt": "The second one"}]
    rows = pipe.generate_batch(requests, max_new_tokens=12, nodes=6, trace=True)
    rows.append(pipe.generate("b", max_new_tokens=3, trace=True))
    for row in rows:
        said = row.token_ids[:1]
        for step in row.trees:
            said += [*(step.tokens[node] for node in step.path[1:]), step.bonus]
        assert said[: len(row.token_ids)] == row.token_ids


def test_pieces_carry_the_trees_so_far():
    pieces = list(pipeline(Ngram()).stream(PROMPT, max_new_tokens=12, nodes=6, trace=True))
    counts = [len(piece.trees) for piece in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == pieces[-1].stats.num_spec_steps > 1
