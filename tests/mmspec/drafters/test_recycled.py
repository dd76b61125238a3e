"""The table of Token Recycling on a device holds and drafts what that of the host does."""

from itertools import pairwise

import pytest
import torch

from mmspec import TokenTree, accept_path
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.drafters import recycle as recycled
from mmspec.drafters.recycle import Rankings, Recycle
from mmspec.ops import kernels
from tests.tiny import root_path

VOCAB = 60
PATHS = ([0], [0, 1, 3], [0, 2], [0, 1, 3, 5], [0, 1])


def pair(monkeypatch, **settings):
    """A drafter that looks up on the host, and one on the device; each takes its own turn."""

    def turns():
        for fixed, drafter in zip((False, True), drafters, strict=True):
            monkeypatch.setattr(kernels, "static_shapes", lambda device, fixed=fixed: fixed)
            yield drafter

    drafters = Recycle(**settings), Recycle(**settings)
    return turns


def same_rankings(host, device):
    expected = {
        context: {token: p for token, p in ranking.items() if p > 0} for context, ranking in host._rankings().items()
    }
    found = device._rankings()
    assert found.keys() == expected.keys()
    for context, ranking in expected.items():
        assert found[context] == pytest.approx(ranking, rel=1e-4)


def steps(batch, g):
    """A prompt and trees in which no token stands twice, so that a step has no context twice."""
    ids = torch.randint(VOCAB, (batch, 3), generator=g)
    yield ids, torch.randn(batch, 1, VOCAB, generator=g) * 2
    roots, parents = torch.arange(40, 40 + batch), torch.tensor([[-1, 0, 0, 1, 1, 3]]).expand(batch, -1)
    for number in range(12):
        tokens = torch.cat([roots[:, None], torch.randperm(40, generator=g)[: 5 * batch].view(batch, 5)], dim=1)
        said = roots[:, None].expand(-1, 6).clone()
        for above, below in pairwise(PATHS[number % len(PATHS)]):
            said[:, above] = tokens[:, below]
        yield TokenTree(tokens, parents, check=False), said, torch.randn(batch, 6, VOCAB, generator=g) * 2


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("pairs", [True, False])
def test_it_learns_what_the_table_of_the_host_learns(batch, pairs, monkeypatch):
    turns = pair(monkeypatch, top_k=4, pairs=pairs)
    # Far more room than four successors take, so that none has to go.
    monkeypatch.setattr(recycled, "Rankings", lambda slots, width, device: Rankings(slots, VOCAB, device))
    monkeypatch.setattr(Recycle, "_average", unlimited)
    (ids, logits), *trees = steps(batch, torch.Generator().manual_seed(batch))
    roots = torch.arange(40, 40 + batch)
    history = [[*row, int(root)] for row, root in zip(ids.tolist(), roots, strict=True)]
    for drafter in turns():
        drafter.begin(Prompt(ids), TargetOutput(logits, {}), history)
    for number, (tree, said, logits) in enumerate(trees):
        if number == 8:
            kept = list(range(batch))[::-2]
            for drafter in turns():
                drafter.select(kept)
        if number >= 8:
            tree, said, logits = TokenTree(tree.tokens[kept], tree.parents[kept], check=False), said[kept], logits[kept]
        verdict = accept_path(tree, said)
        for drafter in turns():
            if drafter._on_device is not None:
                drafter.propose(tree.tokens[:, 0], StepPlan(5, 3))  # updates with the step before
            drafter.observe(tree, verdict, TargetOutput(logits, {}))
    host, device = turns()
    device.propose(tree.tokens[:, 0], StepPlan(5, 3))
    same_rankings(host, device)
    last = device._on_device.last
    assert last.data[: last.rows].tolist() == [list(last) for last in host.rows]


def unlimited(self, context, latest):
    """As ``Recycle._average``, without forgetting."""
    ranking = self._table.setdefault(context, {})
    known = bool(ranking)
    for token in ranking:
        ranking[token] *= 0.7
    for token, p in latest:
        ranking[token] = ranking.get(token, 0.0) + (0.3 if known else 1.0) * p


@pytest.mark.parametrize("width", [None, 1, 2])
def test_it_drafts_the_likeliest_paths(width, monkeypatch):
    """Those of the host, which goes on with any node, not only with those of a beam; so the beam is wide."""
    turns = pair(monkeypatch, top_k=9, width=width)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (2, 3), generator=g)
    logits = torch.randn(2, 1, VOCAB, generator=g) * 4
    history = [[*row, 5] for row in ids.tolist()]
    trees = []
    for drafter in turns():
        drafter._table = {
            (-1, t): {(3 * t + k * k) % VOCAB: 0.5**k * (1 - t / 97) for k in range(1, 4)} for t in range(VOCAB)
        }
        drafter._table[int(ids[0, -1]), 5] = {11: 0.7, 12: 0.2}
        drafter._vocab = VOCAB
        drafter.begin(Prompt(ids), TargetOutput(logits, {}), history)
        trees.append(drafter.propose(torch.tensor([5, 5]), StepPlan(9, 4)))
    for b in range(2):
        paths = [
            {tuple(int(tree.tokens[b, i]) for i in root_path(tree, b, node)) for node in range(tree.nodes)}
            for tree in trees
        ]
        assert paths[0] == paths[1]


def test_of_contexts_that_share_a_slot_the_later_one_stays(monkeypatch):
    monkeypatch.setattr(recycled, "_SLOTS", 1)
    turns = pair(monkeypatch)
    _, drafter = turns()
    for token in (3, 4):
        logits = torch.full((1, 1, VOCAB), -20.0)
        logits[..., token + 10] = 20.0
        drafter.begin(Prompt(torch.tensor([[1, token]])), TargetOutput(logits, {}), [[1, token, 9]])
        drafter.select([])
    found = drafter._rankings()
    assert found.keys() == {(-1, 3), (-1, 4), (1, 4)}
    assert found[1, 4] == pytest.approx({14: 1.0})


def test_a_table_comes_from_the_host_and_goes_back(monkeypatch, tmp_path):
    table = {(-1, 3): {5: 0.5, 6: 0.25}, (2, 3): {7: 0.75}, (2, 4): {9: 0.125}}
    turns = pair(monkeypatch, top_k=2)
    logits = torch.zeros(1, 1, VOCAB)  # nothing is likely: nothing is learnt but the context
    for drafter in turns():
        drafter._table = {context: dict(ranking) for context, ranking in table.items()}
        drafter._vocab = VOCAB
        drafter.begin(Prompt(torch.tensor([[8, 9]])), TargetOutput(logits, {}), [[8, 9, 1]])
        found = drafter._rankings()
        assert {context: found[context] for context in table} == table
    device = drafter
    assert device._on_device is not None
    device.select([])
    monkeypatch.setattr(kernels, "static_shapes", lambda device: False)
    device.begin(Prompt(torch.tensor([[8, 9]])), TargetOutput(logits, {}), [[8, 9, 1]])
    assert device._on_device is None
    assert {context: device._table[context] for context in table} == table
    for drafter in turns():
        drafter.reset()
        assert drafter.entries == 0


def test_steps_without_a_request_for_drafts_teach_new_tokens_only():
    drafter, logits = Recycle(top_k=2), torch.randn(5, 1, 1, VOCAB, generator=torch.Generator().manual_seed(0))

    def step(number, token, after):
        tree = TokenTree.root(torch.tensor([token]))
        drafter.observe(tree, accept_path(tree, torch.tensor([[after]])), TargetOutput(logits[number], {}))
        return {context: dict(ranking) for context, ranking in drafter._rankings().items()}

    drafter.begin(Prompt(torch.tensor([[3, 4]])), TargetOutput(logits[0], {}), [[3, 4, 5]])
    first = step(1, 5, 4)
    assert (4, 5) in first
    assert step(2, 4, 4) == first  # 4 is known since the prompt
    drafter.propose(torch.tensor([4]), StepPlan())
    asked = step(3, 4, 5)
    assert asked != first
    assert step(4, 5, 6) == asked
