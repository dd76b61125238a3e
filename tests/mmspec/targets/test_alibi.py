"""ALiBi at the end of a model's positions; its families are compared with ``generate`` in test_targets.py."""

import pytest
import torch
from transformers import MptConfig, MptForCausalLM

from mmspec import plugins
from mmspec.core.budget import Budget
from mmspec.core.target import Prompt
from mmspec.engine.stopping import Stopper
from mmspec.eval.decoding.oracle import Oracle
from mmspec.sampling.sampler import Sampler
from tests.decoding import SteppedEngine

LONGEST = 32


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_at_the_last_position_drafts_as_deep_as_the_others(order):
    torch.manual_seed(0)
    config = MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=90, max_seq_len=LONGEST)
    model = MptForCausalLM(config).eval()
    prompts, new = [list(range(3, 31)), [40, 41, 42]][::order], [4, 20][::order]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)[0]
        for ids, count in zip(prompts, new, strict=True)
    ]
    said = [row[len(ids) :].tolist() + [5] * LONGEST for ids, row in zip(prompts, expected, strict=True)]
    engine = SteppedEngine(
        plugins.target_class(config)(model), Oracle(said, vocab=90, seed=0), lambda batch, nodes: Budget(12)
    )
    rows = [
        row
        for ids, count in zip(prompts, new, strict=True)
        for row in engine.add(Prompt(torch.tensor([ids])), Sampler(), Stopper(count))
    ]
    engine.wait(lambda: all(row.done for row in rows))
    assert [row.error for row in rows] == [None, None]
    assert [row.history for row in rows] == [row.tolist() for row in expected]
