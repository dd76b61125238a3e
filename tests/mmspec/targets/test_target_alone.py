"""A pipeline of a target that is not a model of transformers: the protocol is all that it needs."""

import pytest
import torch

from mmspec import Pipeline
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.errors import UserError
from mmspec.targets.processor import Processor
from tests.mmspec.engine.test_engine import TableTarget, said_plainly
from tests.tiny import byte_tokenizer

TABLE = torch.randn(259, 1, 259, generator=torch.Generator().manual_seed(0)).expand(-1, 259, -1)
"""Scores of the next token by the token before the last."""


class Table(TableTarget):
    dtype, context_limit, eos_token_ids = torch.float32, 200, (2,)

    def __init__(self):
        super().__init__(TABLE)

    def fork(self):
        return Table()


@pytest.mark.parametrize("nodes", [None, 0, 6])
@pytest.mark.parametrize("drafter", [None, Ngram, Recycle])
def test_a_target_alone_decodes(drafter, nodes):
    pipe = Pipeline(Table(), Processor(byte_tokenizer()), drafter and drafter())
    prompts = ["one, two", "ab", "one, two, one, two"]
    answers = pipe.generate_batch([{"prompt": prompt} for prompt in prompts], max_new_tokens=40, nodes=nodes)
    rows = [byte_tokenizer()(prompt)["input_ids"] for prompt in prompts]
    assert [answer.token_ids for answer in answers] == [said_plainly(TABLE, row, 40, eos=(2,)) for row in rows]
    assert answers[0].text == byte_tokenizer().decode(answers[0].token_ids, skip_special_tokens=True)
    assert pipe.name == "Table"
    if drafter is Recycle and nodes == 6:
        assert answers[0].stats.mean_acceptance_length > 1


def test_its_limits_hold():
    pipe = Pipeline(Table(), Processor(byte_tokenizer()))
    with pytest.raises(UserError, match=r"context of 200 tokens: got 200$"):
        pipe.generate("x" * 200)
    assert len(pipe.generate("x" * 190, max_new_tokens=99).token_ids) <= 10
