"""A target that is not a model of transformers: the protocol is all that the pipeline needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from mmspec import Pipeline
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.errors import UserError
from mmspec.targets.processor import Processor
from tests.tiny import byte_tokenizer

VOCAB = 259
SCORES = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(0))


def scores(history: Sequence[int]) -> torch.Tensor:
    """(vocab,) logits after a history: they depend on the sum of all of its tokens."""
    return SCORES[sum(history) % len(SCORES)]


class Sums:
    """A target whose state is the list of each row's tokens."""

    device, dtype = torch.device("cpu"), torch.float32
    context_limit: int | None = 200
    eos_token_ids = (2,)

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.tree: TokenTree | None = None

    def fork(self) -> Sums:
        return Sums()

    def prefill(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: Sequence[int],
        reads: Sequence[int | str] = (),
        chunk: int | None = None,
    ) -> Iterator[TargetOutput | None]:
        new = [row for prompt in prompts for row in prompt.unpadded()]
        self.rows += new
        yield TargetOutput(torch.stack([scores(row) for row in new])[:, None], {})

    def batch_key(self, prompt: Prompt) -> None:
        return None

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def _paths(self, row: int) -> list[list[int]]:
        """The tokens from the root to each node of a row of the last tree."""
        assert self.tree is not None
        tokens, paths = self.tree.tokens[row].tolist(), []
        for node, parent in enumerate(self.tree.parents[row].tolist()):
            paths.append([*(paths[parent] if parent >= 0 else []), tokens[node]])
        return paths

    def verify(self, tree: TokenTree, reads: Sequence[int | str] = (), width: int | None = None) -> TargetOutput:
        self.tree = tree
        rows = [[scores(history + path) for path in self._paths(row)] for row, history in enumerate(self.rows)]
        logits = torch.stack([torch.stack(row) for row in rows]) if rows else torch.zeros(0, tree.nodes, VOCAB)
        return TargetOutput(logits, {})

    def commit(self, verdict: Verdict) -> None:
        for row, (kept, _) in enumerate(verdict.host):
            self.rows[row] += self._paths(row)[kept[-1]] if kept else []


def expected(prompt: str, count: int) -> list[int]:
    """Greedy decoding by the definition."""
    history = list(byte_tokenizer()(prompt)["input_ids"])
    start = len(history)
    while len(history) < start + count and history[-1] != 2:
        history.append(int(scores(history).argmax()))
    return history[start:]


@pytest.mark.parametrize("nodes", [None, 0, 6])
@pytest.mark.parametrize("drafter", [None, Ngram, Recycle])
def test_a_target_alone_decodes(drafter, nodes):
    pipe = Pipeline(Sums(), Processor(byte_tokenizer()), drafter and drafter())
    prompts = ["one, two", "a", "one, two, one, two"]
    answers = pipe.generate_batch([{"prompt": prompt} for prompt in prompts], max_new_tokens=40, nodes=nodes)
    assert [answer.token_ids for answer in answers] == [expected(prompt, 40) for prompt in prompts]
    assert answers[0].text == byte_tokenizer().decode(answers[0].token_ids, skip_special_tokens=True)
    assert pipe.name == "Sums"
    if drafter is Recycle and nodes == 6:
        assert answers[0].stats.mean_acceptance_length > 1


def test_its_limits_hold():
    pipe = Pipeline(Sums(), Processor(byte_tokenizer()))
    with pytest.raises(UserError, match=r"context of 200 tokens: got 200$"):
        pipe.generate("x" * 200)
    assert len(pipe.generate("x" * 190, max_new_tokens=99).token_ids) <= 10
