"""Several drafters in one tree, look-up drafters that grow it together, and drafts after drafts of another origin."""

import pytest
import torch

from mmspec import UserError
from mmspec.core.drafter import Drafter, Wrapper
from mmspec.core.plan import Payoff, StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree, build_tree
from mmspec.core.verify import accept_path
from mmspec.drafters.growth import LookUpDrafter, LookUps
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.registry import make_drafter
from mmspec.drafters.small import Small
from mmspec.drafters.union import PerSequence, Union
from mmspec.ops import kernels
from tests.mmspec.drafters.test_drafters import assert_equal, begun, paths, target_of
from tests.mmspec.engine.test_engine import Silent
from tests.targets import prefilled
from tests.tiny import root_path, shared_model, valid_nodes
from tests.tiny.models import text_inputs

ADAPTIVE = StepPlan(adaptive=True)
TEXT = [5, 6, 7, 8, 5, 6, 9, 8, 5, 6, 7, 5]


def test_every_member_sees_every_step_and_proposes():
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
    found: list[float] = []
    monkeypatch.setattr(Payoff, "add", lambda payoff, gain: found.append(gain))
    return found


class Fixed(Silent):
    """Always drafts the same token, in so many seconds."""

    def __init__(self, token: int, seconds: float, now: list[float]) -> None:
        self.token, self.seconds, self.now, self.asked = token, seconds, now, 0

    def propose(self, token, plan):
        self.asked += 1
        self.now[0] += self.seconds
        return build_tree(token, [([self.token], [0])] * len(token), [[0.5]] * len(token))


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
    first = Fixed(7, 0.0, now)
    first.propose = lambda token, plan: build_tree(token, [([5], [0]), ([7], [0])], [[0.5]] * 2)
    union = Union([first, Fixed(8, 0.0, now)])
    tree = union.propose(torch.tensor([3, 3]), ADAPTIVE)
    verdict = accept_path(tree, torch.tensor([[7, 99, 99], [7, 99, 99]]))
    verdict.packed[0, 0] = 0
    now[0] += 0.05
    union.observe(tree, verdict, None)
    assert gains == [1.0, 0.0]
    tree = union.propose(torch.tensor([3, 3]), ADAPTIVE)
    verdict = accept_path(tree, torch.full((2, 3), 99))
    verdict.packed[:, 0] = 0  # all of them
    union.observe(tree, verdict, None)
    assert len(gains) == 2


@pytest.mark.parametrize("broken", [False, True])
def test_steps_that_do_not_draft_count_for_no_member(now, gains, broken):
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
    union = Union([Fixed(7, 0.0, now), Fixed(8, 0.002, now), Fixed(7, 0.0, now)])
    tree = union.propose(torch.tensor([3, 3]), ADAPTIVE)
    now[0] += 0.008
    union.observe(tree, accept_path(tree, torch.tensor([[7, 99, 99], [7, 99, 99]])), None)
    assert gains == [0.0, pytest.approx(-0.002 / 0.005), 0.0]  # 10 ms for two tokens of each row, drafted twice


class Table(LookUpDrafter):
    """Drafts what follows a path, of each row: ``{path: {token: probability}}``."""

    reliability = 1.0

    def __init__(self, *tables, reliability=1.0, on_host=True):
        super().__init__()
        self.tables, self.reliability, self._on_host = tables, reliability, on_host

    @property
    def on_host(self):
        return self._on_host

    def begin(self, prompt, output, history):
        self.rows += [*range(len(self.rows), len(self.rows) + len(history))]

    def start(self, row, path=()):
        assert self.on_host
        table = self.tables[self.rows[row]]
        return tuple(path), lambda at: [(token, p, (*at, token)) for token, p in table.get(at, {}).items()]


def together(*parts, rows=1):
    look_ups = LookUps(parts)
    look_ups.begin(None, None, [[1]] * rows)
    return look_ups


def tree_of(look_ups, rows=1, **sizes):
    plan = StepPlan(**{"nodes": 30, "depth": 3, "floor": 0.0, **sizes})
    return look_ups.propose(torch.ones(rows, dtype=torch.long), plan)


def probs(tree, row=0):
    """Of each path, its probability."""
    drafted = valid_nodes(tree, row)[1:]
    found = {
        tuple(tree.tokens[row, root_path(tree, row, n)[1:]].tolist()): float(tree.log_probs[row, n].exp())
        for n in drafted
    }
    assert len(found) == len(drafted)
    return found


def say(look_ups, *said, draft=True):
    """A step in which each row emits these tokens, and what it drafts of them, 99; nothing, if it has ended."""
    tree = tree_of(look_ups, len(said)) if draft else TokenTree.root(torch.ones(len(said), dtype=torch.long))
    choices = torch.full_like(tree.tokens, 99)
    for row, tokens in enumerate(said):
        node = 0
        for token in tokens:
            choices[row, node] = token
            node = tree.children[row][node].get(token, node)
    verdict = accept_path(tree, choices)
    for row, tokens in enumerate(said):
        verdict.packed[row, 0] *= bool(tokens)
    assert [emitted[: len(tokens)] for (_, emitted), tokens in zip(verdict.host, said, strict=True)] == [*said]
    look_ups.observe(tree, verdict, None)


def test_odds_add_up():
    """5 has odds of 1 and 1/3, 6 of 1."""
    found = probs(tree_of(together(Table({(): {5: 0.5}}), Table({(): {5: 0.25, 6: 0.5}}))))
    assert found == {(5,): pytest.approx(0.4), (6,): pytest.approx(0.3)}


def test_a_drafter_that_does_not_know_a_token_says_nothing_below_it():
    first = Table({(): {5: 0.5}, (5,): {7: 0.5}, (6,): {7: 0.9}, (5, 7): {8: 0.5}})
    other = Table({(): {6: 0.5}, (5,): {9: 0.9}, (6,): {7: 0.75}, (6, 7): {5: 0.5}})
    found = probs(tree_of(together(first, other)))
    assert found == pytest.approx(
        {(5,): 1 / 3, (6,): 1 / 3, (5, 7): 1 / 6, (6, 7): 1 / 4, (5, 7, 8): 1 / 12, (6, 7, 5): 1 / 8}
    )


def test_what_one_is_certain_of_leaves_no_nodes_to_another():
    sure, guess = Table({(5,) * n: {5: 0.98} for n in range(9)}), Table({(): dict.fromkeys(range(6, 12), 0.1)})
    assert paths(tree_of(together(guess, sure), nodes=8, depth=8)) == [[5] * n for n in range(1, 9)]


def test_a_drafter_counts_as_much_as_it_is_reliable():
    found = probs(tree_of(together(Table({(): {5: 0.5}}), Table({(): {6: 0.8}}, reliability=0.5))))
    odds = {5: 0.5 / 0.5, 6: 0.4 / 0.6}
    assert found == pytest.approx({(token,): odd / (1 + sum(odds.values())) for token, odd in odds.items()})


def test_no_token_is_certain_however_reliable_its_drafter():
    assert probs(tree_of(together(Table({(): {5: 0.9}}, reliability=1.2)))) == {(5,): pytest.approx(0.995)}


def test_reliability_is_learned_from_the_first_tokens():
    """Of all rows that have not ended. What is drafted below them counts for nothing."""
    first = [{(): {5: 0.6, 4: 0.4}, (5,): {7: 0.9}, (6,): {5: 0.9}}, {(): {5: 0.6}}, {(): {5: 0.6}}]
    look_ups = together(Table(*first), Table({(): {6: 0.8}}, {(): {6: 0.8}}, {}), rows=3)
    came, given = [10.0, 10.0], [10.0, 10.0]
    rnd = torch.Generator().manual_seed(0)
    for step in range(40):
        emitted = [5 if float(torch.rand(1, generator=rnd)) < 0.7 else 6 for _ in range(3)]
        second = [7 if emitted[0] == 5 else 5] if step % 2 else []
        said = [[emitted[0], *second], [emitted[1]], [emitted[2]] if step < 20 else []]
        for row, tokens in enumerate(said):
            for part, (token, p) in enumerate(((5, 0.6), (6, 0.8))):
                if tokens and (part, row) != (1, 2):
                    came[part] = 0.98 * came[part] + (tokens[0] == token)
                    given[part] = 0.98 * given[part] + p
        say(look_ups, *said)
    reliable = [a / b for a, b in zip(came, given, strict=True)]
    assert reliable[1] < 0.6 < 1.0 < reliable[0]
    odds = {5: 0.6 * reliable[0], 6: 0.8 * reliable[1]}
    odds = {token: p / (1 - p) for token, p in odds.items()}
    expected = {(token,): odd / (1 + sum(odds.values())) for token, odd in odds.items()}
    assert probs(tree_of(look_ups, 3), 1) == pytest.approx(expected, rel=1e-4)


def test_continuations_do_not_disturb_what_is_learned():
    tables = {(): {5: 0.6}, (5,): {7: 0.9}}, {(): {6: 0.8}, (5,): {8: 0.9}}
    asked, plain = (together(*map(Table, tables)) for _ in range(2))
    for step in range(12):
        for path in ((), (5,), (6, 7)) if step % 2 else ():
            asked.continuations(0, path)
        tree = tree_of(asked)
        assert probs(tree) == probs(tree_of(plain))
        verdict = accept_path(tree, torch.full_like(tree.tokens, 5))
        for path in ((), (5,), (9,)):
            asked.continuations(0, path)
        for one in (asked, plain):
            one.observe(tree, verdict, None)
    assert asked._borne_out == plain._borne_out


def test_nothing_is_expected_of_rows_that_have_left():
    """Rows leave after a proposal that is not verified, as after an error."""
    look_ups = together(*(Table(*[{(): {5: p}}] * 4) for p in (0.5, 0.6)), rows=3)
    before = [list(counts) for counts in look_ups._borne_out]
    tree_of(look_ups, 3)
    look_ups.select([])
    look_ups.begin(None, None, [[1]])
    say(look_ups, [5], draft=False)
    assert look_ups._borne_out == before


def test_of_a_table_on_a_device_trees_are_merged():
    device = Table({}, on_host=False)
    device.propose = lambda token, plan: tree_of(together(Table({(): {9: 0.25}})))
    look_ups = together(Table({(): {5: 0.5}}), device)
    assert probs(tree_of(look_ups)) == {(5,): 0.5, (9,): 0.25}
    assert look_ups.continuations(0, ()) == [(5, pytest.approx(0.5))]


def test_continuations_beside_a_table_with_static_shapes(monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    union = Union([Recycle(), Ngram()])
    begun(union, [[5, 6, 7, 8, 5, 6]])
    assert not union.drafters[0].on_host
    assert dict(union.continuations(0, ())) == {7: pytest.approx(0.3)}
    assert union.failure(0) == ""


def attached(drafter, history):
    target = target_of("llama")
    drafter.attach(target)
    prompt = Prompt(torch.tensor([history[:-1]]))
    output = prefilled(target, prompt, 8)
    drafter.begin(prompt, output, [list(history)])
    return drafter


def first_level(drafter, history):
    """Children of the root of the drafter's tree: tokens and probabilities."""
    tree = drafter.propose(torch.tensor([history[-1]]), StepPlan(nodes=64, depth=1, floor=0.0))
    if tree.nodes == 1:
        return {}
    return dict(zip(tree.tokens[0, 1:].tolist(), tree.path_probs[0], strict=True))


def test_ngram_looks_up_drafts_like_emitted_tokens():
    for path in ((), (6,), (6, 7), (6, 9), (6, 7, 8, 5), (99,), (99, 6)):
        found = dict(attached(Ngram(), TEXT).continuations(0, path))
        longer = [*TEXT, *path]
        expected = first_level(attached(Ngram(), longer), longer)
        # Occurrences in the draft itself are not indexed.
        assert {token: p for token, p in found.items() if token in expected} == found
        if not path:
            assert found == expected
    assert (
        dict(attached(Ngram(), TEXT).continuations(0, (6,)))[7]
        > dict(attached(Ngram(), TEXT).continuations(0, (6,)))[9]
    )


def test_recycle_looks_up_the_last_two_tokens():
    drafter = attached(Recycle(top_k=3), TEXT)
    drafter._table = {(5, 6): {7: 0.6, 9: 0.3}, (-1, 5): {6: 1.0}, (6, 9): {8: 0.5}}
    assert drafter.continuations(0, (6,)) == [(7, 0.6), (9, 0.3)]
    assert drafter.continuations(0, (6, 9)) == [(8, 0.5)]
    assert drafter.continuations(0, (6, 9, 5)) == [(6, 1.0)]
    assert drafter.continuations(0, (1, 2)) == []
    assert dict(drafter.continuations(0, ())) == first_level(drafter, TEXT)


class Apart(Wrapper):
    """A drafter that does not grow its tree together with others."""

    def __init__(self, drafter):
        self.drafter = drafter


def test_ensembles():
    ngram = dict(attached(Ngram(), TEXT).continuations(0, (6,)))
    union = attached(Union([Apart(Recycle(top_k=3)), Ngram()]), TEXT)
    union.drafters[0].drafter._table = {(5, 6): {7: 0.1, 11: 0.3}}
    found = dict(union.continuations(0, (6,)))
    total = max(1.0, ngram[7] + ngram[9] + 0.3)
    assert found == {7: ngram[7] / total, 9: ngram[9] / total, 11: 0.3 / total}
    alone = attached(PerSequence(Ngram()), TEXT)
    assert dict(alone.continuations(0, (6,))) == ngram


@pytest.mark.drafter_fails
def test_an_error_names_the_drafters():
    class Broken(Ngram):
        def start(self, row, path=()):
            raise RuntimeError("in start")

    union = Union([Recycle(), Broken()])
    begun(union, [[5, 6, 5]])
    assert union.propose(torch.tensor([5]), StepPlan(4)).nodes == 1
    assert union.failure(0) == "Recycle+Broken: RuntimeError: in start"


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["recycle+ngram@chain4", "auto@chain", "recycle+early-exit:1@chain3"])
def test_chains(name, static, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: static)
    union, drafted = make_drafter(name), []
    propose = union.propose
    union.propose = lambda token, plan: drafted.append(propose(token, plan)) or drafted[-1]
    assert_equal(shared_model("llama"), union, text_inputs(2, 9), nodes=6)
    assert any(tree.max_depth > 1 for tree in drafted)
    for tree in drafted:
        for row in range(tree.batch):
            drawn = len(valid_nodes(tree, row))
            assert tree.parents[row, :drawn].tolist() == [*range(-1, drawn - 1)]


class Trees(Wrapper):
    drafter = Ngram()
    draft_chains = Drafter.draft_chains


def test_all_members_must_draft_chains():
    with pytest.raises(UserError, match=r"^chains need a drafter that can draft them: Trees cannot$"):
        Union([Recycle(), Trees()]).draft_chains(4)


@pytest.mark.parametrize("static", [False, True])
def test_chains_stay_chains_where_a_table_is_on_a_device(static, monkeypatch):
    """Of the second row, which copies nothing, that of the table."""
    monkeypatch.setattr(kernels, "static_shapes", lambda device: static)
    drafter = make_drafter("recycle+ngram@chain4")
    begun(drafter, [[5, 6, 7, 8, 5, 6, 9, 5, 6], [5, 7, 8, 9, 10, 11, 12, 13, 6]])
    tree = drafter.propose(torch.tensor([6, 6]), StepPlan(8, 4, floor=0.0))
    tree.check_values()
    for row in range(2):
        alive = tree.alive[row].tolist()
        assert tree.parents[row][tree.alive[row]].tolist() == list(range(-1, sum(alive) - 1))
        assert sum(alive) > 1
    assert tree.tokens[0, 1].item() in (7, 9)
