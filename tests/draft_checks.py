"""Checks of a drafter: the probabilities of its nodes, and that its trees change no token."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mmspec import SamplingParams, plugins
from mmspec.core.budget import Budget
from mmspec.engine.stopping import Stopper
from mmspec.sampling import defaults
from mmspec.sampling.sampler import Sampler
from tests.decoding import decode
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


class Recorded:
    """Notes the trees that a drafter proposes, and of each row the history and its length at that time."""

    def __init__(self, drafter):
        self._rows, self._trees = [], []
        begin, select, propose = drafter.begin, drafter.select, drafter.propose

        def recorded_begin(prompt, output, history):
            self._rows += history
            begin(prompt, output, history)

        def recorded_select(rows):
            self._rows = [self._rows[row] for row in rows]
            select(rows)

        def recorded_propose(token, budget):
            tree = propose(token, budget)
            self._trees.append((tree, [(history, len(history)) for history in self._rows]))
            return tree

        drafter.begin, drafter.select, drafter.propose = recorded_begin, recorded_select, recorded_propose

    def take(self):
        """What was proposed since the last call."""
        trees, self._trees = self._trees, []
        return trees


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
    budget, recorded = Watched(nodes, depth, skip), Recorded(drafter)
    sampler = Sampler(defaults.processors(params or SamplingParams()), do_sample=params is not None)
    lengths: Counter[int] = Counter()
    stopper, said = Stopper(new, eos_token_ids=[]), []
    for rows in decode(target, drafter, prompt_of(inputs), sampler, stopper, budget):
        for tree, histories in recorded.take():
            for number, (history, length) in enumerate(histories):
                b = next(b for b, row in enumerate(rows) if row.history is history)
                tokens = history[rows[b].prompt_length : length]
                assert int(tree.tokens[number, 0]) == tokens[-1]
                drafted = valid_nodes(tree, number)[1:]
                paths = [[int(tree.tokens[number, i]) for i in root_path(tree, number, node)[1:]] for node in drafted]
                expected = gains(target, b, tokens, paths)
                found = [tree.path_probs[number][node - 1] for node in drafted]
                assert found == pytest.approx(expected, rel=5e-3, abs=1e-6)
        lengths.update(len(row.emitted) for row in rows)
        said = [row.token_ids for row in rows]
    if params is None:
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert said == ids[:, inputs["input_ids"].shape[1] :].tolist()
    return lengths


def chain_of_five(drafter, model, inputs, first):
    """Draft a chain of five levels of hidden states after a prompt of one row.

    Returns:
        The drafts, and the logits of each level, (vocabulary,).
    """
    drafter.top_k = 1
    target = plugins.target_class(model.config)(model)
    drafter.attach(target)
    target.features = drafter.features
    prompt = prompt_of(inputs)
    output = target.prefill(prompt, 16)
    drafter.begin(prompt, output, [[*inputs["input_ids"][0].tolist(), first]])
    scores, seen = drafter._scores, []

    def noted(state):
        seen.append(scores(state).flatten())
        return scores(state)

    drafter._scores = noted
    path = drafter.propose(torch.tensor([first]), Budget(5, 5)).tokens[0, 1:].tolist()
    assert len(path) == len(seen) == 5
    return path, seen
