"""Sampled answers longer than one block of random numbers."""

import pytest
import torch

from mmspec.core.budget import Budget
from mmspec.engine.stopping import Stopper
from mmspec.eval.decoding.oracle import Oracle
from mmspec.sampling.sampler import Sampler
from tests.mmspec.engine.test_engine import VOCAB, run
from tests.tiny import table_model

NEW = 150


def sampled(table, rows, drafter):
    sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(5))
    result, steps = run(table, rows, drafter, Stopper(NEW), sampler, Budget(20, 8))
    return [row.token_ids for row in result], steps


@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_change_no_token(batch):
    table, rows = table_model(VOCAB), [[1, 2], [3, 4], [5, 6]][:batch]
    plain, _ = sampled(table, rows, None)
    assert [len(row) for row in plain] == [NEW] * batch
    for seed in range(3):
        drafted, steps = sampled(table, rows, Oracle(plain, vocab=VOCAB, seed=seed, nodes=20))
        assert drafted == plain
        assert len(steps) < NEW - 10


def test_no_random_number_is_used_twice():
    """Where all tokens are equally likely, equal tokens mean equal numbers."""
    tokens, _ = sampled(torch.zeros(VOCAB, VOCAB, VOCAB), [[1, 2], [1, 2]], None)
    first, second = (torch.tensor(row) for row in tokens)
    assert float((first == second).float().mean()) < 0.3
    for shift in range(1, NEW // 2):
        assert float((first[shift:] == first[:-shift]).float().mean()) < 0.35
