"""Watching a drafter at work: what it claims of its trees, and that they change nothing of what is said."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mmspec import SamplingParams, plugins
from mmspec.budget import Budget
from tests.decoding import decode
from mmspec.sampling import Sampler
from mmspec.stopping import Stopper
from tests.targets import prompt_of
from tests.tiny import root_path, valid_nodes


class Watched(Budget):
    """Some steps are not drafted at all, others are shallow."""

    def __init__(self, nodes, depth, skip):
        super().__init__(nodes, depth)
        self.skip, self.step = skip, 0

    def drafts(self):
        self.step += 1
        return super().drafts() and self.step not in self.skip


def check_drafts(model, inputs, drafter, gains, *, nodes=7, depth=4, skip=(), new=12, params=None):
    """Decode; every node of every tree must have been given the probability that ``gains`` finds, and greedy output
    must be that of transformers.

    Args:
        gains: called with the target, a row's number, what it has said and paths of drafted tokens behind that; the
            paths' probabilities.

    Returns:
        How many steps emitted how many tokens.
    """
    target = plugins.target_class(model.config)(model)
    drafter.attach(target)
    budget, trees = Watched(nodes, depth, skip), []
    propose = drafter.propose
    drafter.propose = lambda token, b: trees.append(propose(token, b)) or trees[-1]
    sampler = Sampler((params or SamplingParams()).processors(), do_sample=params is not None)
    said: list[list[int]] = [[] for _ in inputs["input_ids"]]
    lengths: Counter[int] = Counter()
    for state in decode(target, drafter, prompt_of(inputs), sampler, Stopper(new, eos_token_ids=[]), budget):
        if trees:
            tree = trees.pop()
            for b, tokens in enumerate(said):
                if len(tokens) == new:
                    continue  # finished: what is drafted for it is not looked at
                assert int(tree.tokens[b, 0]) == tokens[-1]
                drafted = valid_nodes(tree, b)[1:]
                paths = [[int(tree.tokens[b, i]) for i in root_path(tree, b, node)[1:]] for node in drafted]
                expected = gains(target, b, tokens, paths)
                assert [tree.path_probs[b][node - 1] for node in drafted] == pytest.approx(expected, rel=2e-3, abs=1e-6)
        for b, row in enumerate(state):
            said[b] += row.emitted if said[b] != row.token_ids else []
            lengths[len(row.emitted)] += 1
    if params is None:
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert said == ids[:, inputs["input_ids"].shape[1] :].tolist()
    return lengths
