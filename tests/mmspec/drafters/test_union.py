"""Several drafters in one tree."""

import pytest
import torch

from mmspec import UserError
from mmspec.core.drafter import Drafter
from mmspec.core.plan import Payoff, StepPlan
from mmspec.core.target import TargetOutput
from mmspec.core.tree import TokenTree, build_tree
from mmspec.core.verify import accept_path
from mmspec.drafters.lookup import LookUps
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.registry import make_drafter
from mmspec.drafters.small import Small
from mmspec.drafters.union import Union
from tests.mmspec.drafters.test_drafters import begun, paths, target_of
from tests.tiny import shared_model

ADAPTIVE = StepPlan(adaptive=True)


def test_every_member_sees_every_step_and_proposes():
    """Each node is one that a member drafts alone, and all of these are there."""
    row = [[4, 5, 6, 4, 5]]
    ngram, recycle = Ngram(), Recycle()
    union = Union([ngram, recycle])
    logits = begun(union, row)
    row[0].append(4)
    plan = StepPlan(1000, depth=3, floor=0.0)
    tree = union.propose(torch.tensor([4]), plan)
    alone = [path for drafter in (ngram, recycle) for path in paths(drafter.propose(torch.tensor([4]), plan))]
    assert sorted(paths(tree)) == sorted({tuple(path): path for path in alone}.values())
    assert [5, 6] in paths(tree)
    known = recycle.entries
    output = TargetOutput(logits.expand(1, tree.nodes, -1), {})
    union.observe(tree, accept_path(tree, torch.full_like(tree.tokens, 9)), output)
    assert recycle.entries > known > 0


class Frozen(Ngram):
    learns = False


def test_names_joined_by_plus():
    union = make_drafter("ngram+recycle")
    assert isinstance(union, Union)
    assert [type(member) for member in union.drafters] == [Ngram, Recycle]
    assert union.members == union.drafters
    assert union.learns
    assert Union([Ngram(memory=0), Frozen()]).learns  # how far to trust what it finds
    assert not Union([Frozen(), Frozen()]).learns
    for name, message in (
        ("ngram+none", "^names joined by + must each be a drafter's: got 'ngram+none'$"),
        ("ngram+nonsense", "nonsense"),
        ("ngram+", "must each be a drafter's: got 'ngram+'$"),
    ):
        with pytest.raises(UserError, match=message.replace("+", r"\+")):
            make_drafter(name)
    with pytest.raises(UserError, match=r"^drafters joined by \+ must be at least two: got 1$"):
        Union([Ngram()])


def test_a_lent_union_shares_weights_and_forgets():
    target = target_of("llama")
    union = Union([Small(shared_model("qwen3")), Recycle()])
    union.attach(target)
    lent = union.lend(target)
    assert lent is not union
    assert lent.drafters[0].model is union.drafters[0].model
    lent.drafters[1]._table[1, 2] = {3: 1.0}
    assert union.drafters[1].entries == 0


def test_look_ups_draft_before_others():
    given = [Small(shared_model("qwen3")), Ngram(), Recycle()]
    union = Union(given)
    assert [type(guard.drafter) for guard in union._guards] == [LookUps, Small]
    assert list(union.drafters) == given


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time in seconds, which only drafts and verify passes advance."""
    now = [0.0]
    monkeypatch.setattr("mmspec.drafters.union.clock", lambda: now[0])
    return now


@pytest.fixture
def gains(monkeypatch) -> list[float]:
    """Gains of the members' drafts, in their order."""
    found: list[float] = []
    monkeypatch.setattr(Payoff, "add", lambda payoff, gain: found.append(gain))
    return found


class Fixed(Drafter):
    """Always drafts the same token, in so many seconds."""

    def __init__(self, token: int, seconds: float, now: list[float]) -> None:
        self.token, self.seconds, self.now, self.asked = token, seconds, now, 0

    def begin(self, prompt, output, history):
        pass

    def select(self, rows):
        pass

    def propose(self, token, plan):
        self.asked += 1
        self.now[0] += self.seconds
        return build_tree(token, [([self.token], [0])] * len(token), [[0.5]] * len(token))

    def observe(self, tree, verdict, output):
        pass


def steps(union: Union, now: list[float], plan: StepPlan, count: int, right: int) -> None:
    """Verify passes of 4 ms, in which the draft ``right`` would be accepted."""
    for _ in range(count):
        tree = union.propose(torch.tensor([3]), plan)
        now[0] += 0.004
        chosen = torch.full((1, tree.nodes), 99)
        chosen[0, 0] = right
        union.observe(tree, accept_path(tree, chosen), None)


def test_a_member_that_costs_more_than_it_adds_rests_alone(now):
    useful, slow, same = Fixed(7, 0.0, now), Fixed(8, 0.002, now), Fixed(7, 0.003, now)
    steps(Union([useful, slow, same]), now, ADAPTIVE, 80, right=7)
    assert useful.asked == 80
    assert slow.asked < 40  # never right
    assert same.asked < 40  # right, where another one is too


def test_no_member_rests_where_sizes_are_fixed(now):
    slow = Fixed(8, 0.002, now)
    steps(Union([Fixed(7, 0.0, now), slow]), now, StepPlan(4), 40, right=7)
    assert slow.asked == 40


def test_rows_that_have_finished_count_for_no_member(now, gains):
    union = Union([Fixed(7, 0.0, now), Fixed(8, 0.0, now)])
    tree = union.propose(torch.tensor([3, 3]), ADAPTIVE)
    verdict = accept_path(tree, torch.tensor([[7, 99, 99], [7, 99, 99]]))
    verdict.packed[1, 0] = 0
    now[0] += 0.05
    union.observe(tree, verdict, None)
    assert gains == [1.0, 0.0]


@pytest.mark.parametrize("broken", [False, True])
def test_steps_that_do_not_draft_count_for_no_member(now, gains, broken):
    """Nor one that was broken off after the draft."""
    union = Union([Fixed(7, 0.0, now), Fixed(8, 0.001, now)])
    tree = union.propose(torch.tensor([3]), ADAPTIVE)
    if broken:
        union.select([])
    else:
        union.observe(tree, accept_path(tree, torch.tensor([[7, 99, 99]])), None)
    root = TokenTree.root(torch.tensor([3, 3]))  # another row has joined since
    union.observe(root, accept_path(root, torch.tensor([[7], [7]])), None)
    assert len(gains) == 2 * (not broken)


class Sure(Fixed):
    """Drafts a chain of three tokens, which it is sure of in every other step."""

    def propose(self, token, plan):
        self.asked += 1
        sure = self.asked % 2 == 0
        return build_tree(token, [([self.token] * 3, [0, 1, 2])], [[0.9] * 3 if sure else [0.1] * 3])


def test_a_member_rests_only_where_the_trees_before_it_expect_so_many_tokens(now):
    """The slow one is right where the first one is not sure, and adds nothing where it is."""
    first, slow = Sure(7, 0.0, now), Fixed(8, 0.001, now)
    union, asked = Union([first, slow]), {True: 0, False: 0}
    for _ in range(120):
        before = slow.asked
        tree = union.propose(torch.tensor([3]), ADAPTIVE)
        now[0] += 0.004
        sure = first.asked % 2 == 0
        asked[sure] += slow.asked - before
        chosen = torch.full((1, tree.nodes), 7 if sure else 99)
        chosen[0, 0] = 7 if sure else 8
        union.observe(tree, accept_path(tree, chosen), None)
    assert asked[False] == 60
    assert asked[True] < 30


@pytest.mark.parametrize(("right", "seconds"), [(7, (0.0, 0.002)), (8, (0.002, 0.0))])
def test_look_ups_are_charged_together_beside_another_drafter(now, right, seconds):
    """They draft 7, the other one 8; what is wrong costs time, and rests."""
    asked = [0]

    class Counted(Ngram):
        def start(self, row, path=()):
            asked[0] += 1
            now[0] += seconds[0]
            return super().start(row, path)

    other = Fixed(8, seconds[1], now)
    union = Union([Counted(memory=0), other, Ngram()])
    begun(union, [[3, 7, 4, 3, 7, 5, 3]])
    steps(union, now, ADAPTIVE, 80, right)
    rests, drafts = (other.asked, asked[0]) if right == 7 else (asked[0], other.asked)
    assert rests < 40
    assert drafts == 80


class PerRow(Fixed):
    """Drafts chains of three tokens, of another probability in each row."""

    def __init__(self, now, probs):
        super().__init__(7, 0.0, now)
        self.probs = probs

    def propose(self, token, plan):
        return build_tree(token, [([7] * 3, [0, 1, 2])] * len(self.probs), [[p, p * p, p**3] for p in self.probs])


@pytest.mark.parametrize("probs", [(0.95, 0.05), (0.05, 0.95)])
def test_what_is_expected_of_a_batch_is_its_mean(now, probs):
    union = Union([PerRow(now, probs), Fixed(8, 0.001, now)])
    union.propose(torch.tensor([3, 3]), ADAPTIVE)
    assert union._drafts[1][2] == 1


def test_a_step_of_several_rows_is_paid_by_the_tokens_of_one(now, gains):
    union = Union([Fixed(7, 0.0, now), Fixed(8, 0.002, now)])
    tree = union.propose(torch.tensor([3, 3]), ADAPTIVE)
    now[0] += 0.008
    union.observe(tree, accept_path(tree, torch.tensor([[7, 99, 99], [7, 99, 99]])), None)
    assert gains[1] == pytest.approx(-0.002 / 0.005)  # 10 ms for two tokens of each row
