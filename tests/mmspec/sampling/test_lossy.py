"""Lossy acceptance: drafts up to a negative log probability, and nothing for requests that do not ask for it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.generation import logits_process as hf

import mmspec
from mmspec import Pipeline, SamplingParams
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.drafters.small import Small
from mmspec.errors import UserError
from mmspec.sampling.batch_sampler import lossy_choices
from tests.tiny import byte_model, byte_tokenizer

PROMPTS = ["The second one, the second one", "and then", "x"]
LIMIT = 4.0


def plain_walk(tree: TokenTree, row: int, scores: torch.Tensor, limit: float) -> list[int]:
    """Emitted tokens by the rule: the target's token, or else the most probable child that is probable enough."""
    node, emitted = 0, []
    while True:
        log_probs = scores[row, node].double().log_softmax(-1)
        children = [k for k in range(1, tree.nodes) if tree.parents[row, k] == node]
        if tree.valid is not None:
            children = [k for k in children if tree.valid[row, k]]
        target = int(log_probs.argmax())
        following = [k for k in children if int(tree.tokens[row, k]) == target]
        if not following:
            near = [k for k in children if log_probs[tree.tokens[row, k]] >= -limit]
            following = sorted(near, key=lambda k: -float(log_probs[tree.tokens[row, k]]))[:1]
        if not following:
            return [*emitted, target]
        node = following[0]
        emitted.append(int(tree.tokens[row, node]))


@pytest.mark.parametrize("seed", range(20))
def test_the_choices_follow_the_rule(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 3, 5], [-1, 0, 0, 0, 2, 2, 4, 4, 4]])
    tokens = torch.stack([torch.randperm(12, generator=g)[:9] for _ in range(2)])
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, 7:] = False
    tree = TokenTree(tokens, parents, valid)
    scores = 2 * torch.randn(2, 9, 12, generator=g)
    for limit in (0.5, 2.0, 9.0):
        verdict = accept_path(tree, lossy_choices(tree, scores, limit))
        assert [tokens for _, tokens in verdict.host] == [plain_walk(tree, row, scores, limit) for row in (0, 1)]


@pytest.fixture
def pipe() -> Pipeline:
    """A target whose drafter is another model, which it often contradicts."""
    noisy, g = copy.deepcopy(byte_model()), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=g)
    return mmspec.load(byte_model(), Small(noisy), processor=byte_tokenizer(), max_num_seqs=4)


def distances(pipe: Pipeline, prompt: str, tokens: list[int]) -> list[tuple[float, bool]]:
    """Per token, the target's negative log probability, and whether it is the target's own choice."""
    ids = pipe.encode([{"prompt": prompt}]).input_ids
    with torch.no_grad():
        logits = pipe.model(torch.cat([ids, torch.tensor([tokens])], 1)).logits[0, ids.shape[1] - 1 : -1]
    own = logits.double().log_softmax(-1)
    return [(-float(row[token]), int(row.argmax()) == token) for row, token in zip(own, tokens, strict=True)]


def test_tokens_are_the_targets_or_near_enough_beside_lossless_ones(pipe: Pipeline) -> None:
    params = [SamplingParams(lossy=limit, max_new_tokens=30) for limit in (LIMIT, 0.0)]
    requests = [{"prompt": prompt, "params": one} for prompt in PROMPTS for one in params]
    answers = pipe.generate_batch(requests, nodes=8)
    for prompt, lossy, answer in zip(PROMPTS, answers[::2], answers[1::2], strict=True):
        found = distances(pipe, prompt, lossy.token_ids)
        assert all(own or distance <= LIMIT + 1e-4 for distance, own in found)
        assert not all(own for _, own in found)
        ids = pipe.encode([{"prompt": prompt}]).input_ids
        expected = pipe.model.generate(ids, do_sample=False, max_new_tokens=30)
        assert answer.token_ids == expected[0, ids.shape[1] :].tolist()
        assert answer.stats.lossless
        assert lossy.stats.lossless is lossy.stats.to_dict()["lossless"] is False


def test_grammars_and_processors_hold(pipe: Pipeline) -> None:
    pattern = "[a-m]{20,30}"
    answer = pipe.generate(PROMPTS[0], regex=pattern, lossy=9.0, nodes=8)
    assert set(answer.text) <= set("abcdefghijklm")
    banned = list(range(3, 120))
    keywords = {"lossy": 9.0, "nodes": 8, "max_new_tokens": 30}
    answer = pipe.generate(PROMPTS[0], logits_processor=[hf.SuppressTokensLogitsProcessor(banned)], **keywords)
    assert not set(answer.token_ids) & set(banned)
    by_path = pipe.generate(PROMPTS[0], logits_processor=[lambda ids, scores: scores], **keywords)
    assert by_path.token_ids == pipe.generate(PROMPTS[0], **keywords).token_ids


def test_sampling_is_refused_in_one_line(pipe: Pipeline) -> None:
    with pytest.raises(UserError, match="lossy goes with greedy decoding, temperature 0: got lossy 2 and sampling"):
        pipe.generate("x", lossy=2.0, temperature=0.7)
