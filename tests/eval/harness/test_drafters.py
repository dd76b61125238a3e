"""Copies of drafters for methods, and profiling."""

import pytest
import torch

import mmspec
from mmspec.drafters.recycle import Recycle
from mmspec.eval.harness.timing import ProfiledDrafter
from mmspec.pipeline import Pipeline
from mmspec.vision.drafters.msd import MSD
from tests.model_folders import save_llava
from tests.tiny.models import msd_network


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return mmspec.load(str(save_llava(tmp_path_factory.mktemp("tiny"))), drafter=None)


def test_a_fork_learns_separately_and_shares_weights(pipe):
    table, drafter = Recycle(), MSD(msd_network(pipe.model), torch.arange(90))
    copied = table.fork(pipe.target)
    Pipeline(pipe.target, pipe.processor, copied).generate("Describe the image.", max_new_tokens=8, nodes=5)
    assert table.entries == 0 < copied.entries
    assert drafter.fork(pipe.target) is not drafter
    assert drafter.fork(pipe.target).network is drafter.network
    assert drafter.lend(pipe.target) is drafter
    assert table.lend(pipe.target) is not table


def test_attaching_the_same_target_again_changes_nothing(pipe):
    """Captured CUDA graphs hold the addresses of weights and cache."""
    drafter = MSD(msd_network(pipe.model), torch.arange(90))
    drafter.attach(pipe.target)
    held = drafter.node_inputs, drafter._scores, drafter._grow, drafter.cache
    drafter.attach(pipe.target)
    assert held == (drafter.node_inputs, drafter._scores, drafter._grow, drafter.cache)
    drafter.attach(type(pipe.target)(pipe.model))
    assert not set(map(id, held)) & {*map(id, (drafter.node_inputs, drafter._scores, drafter._grow, drafter.cache))}


def test_profiling_counts_trees(pipe):
    assert ProfiledDrafter(Recycle()).learns
    observer = ProfiledDrafter(MSD(msd_network(pipe.model), depth=3, total_tokens=6))
    stats = Pipeline(pipe.target, pipe.processor, observer).generate("A star", max_new_tokens=9, nodes=6).stats
    assert observer.proposals == sum(sum(stats.accept_lengths[:k]) < 7 for k in range(stats.num_spec_steps))
    assert 0 < observer.seconds < stats.draft_seconds
