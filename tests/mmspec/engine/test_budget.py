import random
from functools import partial
from statistics import fmean

import pytest
import torch

from mmspec import TokenTree
from mmspec.core.budget import Budget, CostTable
from mmspec.core.tree import build_tree
from mmspec.engine.budget import STEADY_SHAPES, AdaptiveBudget, DraftShape, Rates, SteadyBudget, StepTimeModel

FLAT = CostTable((1, 2, 4, 8, 16, 32, 64), (1.0, 1.0, 1.0, 1.05, 1.25, 1.7, 2.5))
STEEP = CostTable((1, 2, 64), (1.0, 2.0, 64.0))
FREE = CostTable((1, 64), (1.0, 1.0))


def test_costs_are_interpolated_and_carried_on():
    table = CostTable((1, 4, 8), (1.0, 2.5, 3.0))
    assert [table(n) for n in (1, 2, 3, 4, 6, 8, 12)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 2.75, 3.0, 3.5])


def test_width_is_the_cheapest_that_fits():
    dear_when_small = CostTable((1, 2, 4, 8, 16), (1.4, 1.5, 1.2, 1.0, 1.3))
    assert [dear_when_small.width(n) for n in (1, 2, 4, 8, 9, 16, 40)] == [8, 8, 8, 8, 9, 16, 40]
    assert dear_when_small.width(1, batch=3) == 2  # 8 tokens hold two nodes of three rows
    assert all(STEEP.width(n) == n for n in range(1, 70))


@pytest.mark.parametrize("nodes", [0, 1, 5, 30])
def test_a_fixed_budget_is_fixed(nodes):
    budget = Budget(nodes, depth=6)
    budget.remaining = 4
    assert budget.drafts() == (nodes > 0)
    assert budget.max_depth == 4
    rows = [([5] * count, list(range(count))) for count in (3, 12)]
    drafted = build_tree(torch.tensor([1, 2]), rows, [[0.9] * 3, [0.9] * 12])
    assert budget.prune(drafted).drafted == [min(nodes, 3), min(nodes, 12)]
    assert budget.prune(build_tree(torch.tensor([1, 2]), rows)).nodes == 13  # nothing tells which to keep
    assert budget.prune(TokenTree.root(torch.tensor([1]))).nodes == 1
    budget.remaining = 0
    assert not budget.drafts()


# ---------------------------------------------------------------------- adaptive


def drafted(budget, claims, accepted, cost, draft_seconds):
    """One step with a chain of the given path probabilities; seconds it took and tokens it gave, drafts asked for."""
    budget.remaining = 1000
    if not budget.drafts():
        budget.observe(1, [[0]], 0.0, cost(1))
        return cost(1), 1, 0
    size = budget.take([claims])
    path = list(range(1 + min(size, accepted)))
    budget.observe(size + 1, [path], draft_seconds, cost(size + 1))
    return cost(size + 1) + draft_seconds, len(path), size


def simulate(budget, steps, acceptance, cost=FLAT, draft_seconds=0.02, claim=0.8, seed=0):
    """Seconds per token over many steps of a chain drafter that says ``claim`` and is right with ``acceptance``."""
    rng, seconds, tokens = random.Random(seed), 0.0, 0
    for _ in range(steps):
        accepted = 0
        while accepted < 12 and rng.random() < acceptance:
            accepted += 1
        spent, emitted, _ = drafted(budget, [claim ** (i + 1) for i in range(12)], accepted, cost, draft_seconds)
        seconds, tokens = seconds + spent, tokens + emitted
    return seconds / tokens


def adaptive(cost=FLAT, batch=1, **keywords):
    """A budget after its first steps, which are plain."""
    budget = AdaptiveBudget(cost, batch=batch, **keywords)
    for _ in range(2):
        budget.observe(1, [[0]] * batch, 0.0, cost(batch))
    budget.begin()
    return budget


def best_fixed(cost, acceptance, draft_seconds):
    """Seconds per token of the best chain length, by enumeration; no drafting is one of them."""
    rates = [cost(1)]
    for n in range(1, 13):
        expected = sum(acceptance**i for i in range(n + 1))
        rates.append((cost(n + 1) + draft_seconds) / expected)
    return min(rates)


@pytest.mark.parametrize("cost", [FLAT, FREE], ids=["flat", "free"])
@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("claim", [0.7, 0.9])
def test_comes_close_to_the_enumerated_best_size(cost, acceptance, claim):
    budget = adaptive(cost)
    simulate(budget, 400, acceptance, cost, claim=claim)
    assert simulate(budget, 600, acceptance, cost, claim=claim, seed=1) < 1.15 * best_fixed(cost, acceptance, 0.02)


def test_takes_all_that_is_free_up_to_its_limit_and_nothing_that_is_too_dear():
    gains = [0.9**i for i in range(1, 30)]
    assert adaptive(FREE).take([gains]) >= 8
    assert adaptive(STEEP).take([[0.2, 0.1, 0.05]]) == 0
    assert adaptive(FLAT).take([[]]) == 0
    for limit in (0, 1, 7):
        assert adaptive(FREE, nodes=limit).take([[0.99] * 50]) <= limit


@pytest.mark.parametrize(("cost", "draft_seconds"), [(FLAT, 0.02), (FLAT, 0.5), (STEEP, 0.02), (STEEP, 1.0)])
@pytest.mark.parametrize("claim", [0.5, 0.95])
def test_useless_drafts_cost_next_to_nothing(cost, draft_seconds, claim):
    assert simulate(adaptive(cost), 500, 0.0, cost, draft_seconds, claim) < (1.06 + 0.03 * draft_seconds) * cost(1)


def test_drafting_stops_while_it_is_useless_and_comes_back():
    budget = adaptive()
    good = simulate(budget, 300, 0.9)
    assert good < 0.5 * FLAT(1)
    for _ in range(20):  # a good record earns patience, for a while
        budget.begin()
        simulate(budget, 100, 0.0, draft_seconds=0.3)
    budget.begin()
    asked = [drafted(budget, [0.8**i for i in range(1, 12)], 0, FLAT, 0.3)[2] for _ in range(300)]
    assert sum(size > 0 for size in asked) < 60
    simulate(budget, 500, 0.9)
    assert simulate(budget, 300, 0.9, seed=2) < 1.2 * good


DEARER = CostTable((1, 2, 4, 8, 16, 32, 64), (1.0, 1.15, 1.2, 1.4, 1.8, 2.8, 4.8))


@pytest.mark.parametrize("acceptance", [0.1, 0.2, 0.5, 0.8])
def test_draft_steps_that_are_slower_than_measured_ahead_are_given_up_if_they_do_not_pay(acceptance):
    """Sampling, for example, adds a time per node that calibration does not contain."""
    budget = adaptive(FLAT)
    spent = [simulate(budget, 400, acceptance, DEARER, 0.03, claim=acceptance, seed=seed) for seed in range(6)][1:]
    plain, best = DEARER(1), best_fixed(DEARER, acceptance, 0.03)
    assert sum(spent) / 5 < (1.06 * plain if best > 0.97 * plain else 0.95 * plain)


@pytest.mark.parametrize("before", [1, 8])
def test_two_dozen_draft_steps_show_a_loss(before):
    """Also those of the last row of a batch, whose plain steps are measured first."""
    budget, asked = adaptive(FREE, batch=before), []
    for _ in range(42):
        budget.resize(1)
        budget.remaining = 50
        asked.append(budget.drafts())
        budget.take([[0.5]])
        if asked[-1]:
            budget.observe(2, [[0, 1] if sum(asked) % 4 == 1 else [0]], 1e-3, 1.5)
        else:
            budget.observe(1, [[0]], 0.0, 1.0)
    first = asked.index(True)
    assert 12 <= asked.index(False, first) - first <= 24


def test_trust_follows_what_was_accepted():
    budget = adaptive()
    for _ in range(300):
        drafted(budget, [0.5, 0.4, 0.3], 0, FREE, 0.0)
    doubtful = budget._correct(0.5)
    for _ in range(600):
        drafted(budget, [0.5, 0.4, 0.3], 3, FREE, 0.0)
    assert doubtful < 0.45 < 0.9 < budget._correct(0.5)


def test_rows_that_have_finished_teach_nothing():
    both, alone = adaptive(FREE, batch=2), adaptive(FREE, batch=2)
    for _ in range(30):
        size = both.take([[0.5] * 6, [0.5] * 6])
        both.observe(size + 1, [list(range(size + 1)), []], 0.0, FREE(1))
        same = alone.take([[0.5] * 6])
        alone.observe(same + 1, [list(range(same + 1))], 0.0, FREE(1))
        assert size == same > 0
    assert both._correct(0.5) == pytest.approx(alone._correct(0.5))


@pytest.mark.parametrize("batch", [1, 8])
def test_one_more_drafter_pass_pays_by_what_it_adds_to_each_row(batch):
    """Rows that are alike draft alike, however many they are, where a pass over all costs as much as over one."""
    budget = adaptive(FREE, batch=batch)
    for _ in range(2):
        budget.drafts()
        budget.observe(1, [[0]] * batch, 0.5, 1.0)
    # Of late 4.5 tokens of each row took 5.5 seconds, so that half a second is worth 0.41 tokens of each. Of a tree of
    # one level, half of the time is taken for the level's.
    assert budget.least_gain == pytest.approx(0.206, abs=0.01)


def test_the_price_of_a_level_is_that_of_more_levels():
    """Other costs of a draft are not the level's: a drafter that has drafted single levels goes on to deeper trees."""
    budget = adaptive(FREE)

    def draft(levels):
        budget.drafts()
        budget.levels = levels
        budget.observe(2, [[0, 1]], 0.6 + 0.05 * levels, 1.0)
        return budget.least_gain * budget._time / budget._tokens

    for _ in range(40):
        shallow = draft(1)
    assert shallow < 0.5 * 0.65 + 0.01
    for step in range(60):
        deep = draft(1 + 3 * (step % 2))
    assert deep == pytest.approx(0.05, abs=0.015)


KNEE = CostTable((1, 8, 64, 512), (1.0, 1.0, 8.0, 64.0))


@pytest.mark.parametrize("cost", [KNEE, FLAT], ids=["knee", "flat"])
def test_a_tree_is_priced_for_all_rows(cost):
    """The best size by enumeration: tokens of all rows, less what the pass over all of them costs beyond plain
    decoding."""
    gains, taken = [0.75**i for i in range(1, 17)], []
    for batch in (1, 3, 8):
        price = batch / cost(batch)
        earned = [batch * sum(gains[:n]) - price * (cost(batch * (n + 1)) - cost(batch)) for n in range(17)]
        budget = adaptive(cost, batch=batch)
        taken.append(budget.take([gains] * batch))
        assert earned[taken[-1]] == max(earned)
    assert taken[0] > taken[2]


def test_padding_is_priced_for_all_rows():
    """Three rows of one node are padded to five nodes each, whose 15 tokens take less time than three."""
    table = CostTable((1, 8, 16, 64), (1.0, 0.5, 0.6, 4.0))
    budget = adaptive(table, batch=3)
    assert budget._cost[0] == pytest.approx(table(15))
    budget.resize(1)
    assert budget._cost[0] == pytest.approx(table(8))


@pytest.mark.parametrize("kind", [AdaptiveBudget, SteadyBudget])
def test_the_last_rows_of_a_batch_draft(kind):
    """Where all rows are busy plain decoding is fastest; a row that is left over drafts at once, although no request
    has begun since."""
    budget, gains = kind(KNEE, batch=8), [0.9**i for i in range(1, 8)]
    budget.begin()
    sizes = []
    for batch in [8] * 50 + [1] * 10:
        budget.resize(batch)
        budget.remaining = 99
        size = 0
        if budget.drafts():
            size = min(budget.nodes, 7) if kind is SteadyBudget else budget.take([gains] * batch)
        path = list(range(size + 1))
        budget.observe(size + 1, [path] * batch, 0.01 * (size > 0), KNEE(batch * (size + 1)))
        sizes.append(size)
    assert max(sizes[10:50]) < 7 <= max(sizes[50:])


@pytest.mark.parametrize(("batch", "best"), [(1, 7), (2, 3), (8, 0)])
def test_sizes_are_priced_for_all_rows(batch, best):
    """Up to eight tokens in all are free, and the others cost as much as plain decoding."""
    budget = SteadyBudget(KNEE, [DraftShape(nodes, False, 12) for nodes in (3, 7)], batch)
    size = budget.nodes if budget.drafts() else 0
    assert size == best


def test_plain_steps_are_measured_for_each_size_of_batches_and_anew():
    """Two at first, as the first one of all may compile something; then one after a hundred draft steps."""
    budget, plain = AdaptiveBudget(FREE, batch=1), []
    for step, batch in enumerate([1] * 110 + [2] * 4 + [3] * 4 + [1] * 4):
        budget.resize(batch)
        budget.remaining = 50
        if budget.drafts():
            budget.observe(2, [[0, 1]] * batch, 0.1, 1.0)
        else:
            plain.append(step)
            budget.observe(1, [[0]] * batch, 0.0, 5.0 if step == 0 else 1.0)
    assert plain == [0, 1, 102, 110, 111]
    assert budget._payoff._gains[-1] == pytest.approx(2 - 1.1)


def test_trees_that_cost_less_than_calibrated_are_taken():
    budget = adaptive(DEARER)
    for size in [0, 16, 16, 16] * 30:
        budget.observe(size + 1, [[0]], 0.0, 1.0 if size == 0 else 0.5 * DEARER(size + 1))
    assert budget.take([[0.8**i for i in range(1, 9)]]) >= 4
    assert min(budget._extra(size) for size in range(1, 17)) >= 0.0


def test_tokens_that_a_grammar_forces_in_the_first_step_show_nothing():
    budget = AdaptiveBudget(FREE)
    budget.observe(4, [[0, 1, 2, 3]], 0.1, 1.0)
    assert not budget._payoff._gains


def test_what_every_step_takes_makes_nodes_cheaper():
    """A step in which Python takes as long as the pass, whatever the tree."""
    gains, sizes = [0.5**i for i in range(1, 9)], []
    for python in (0.0, 1.0):
        budget = adaptive(DEARER)
        for size in [0, 2, 4, 1] * 30:
            budget.observe(size + 1, [[0]], 0.0, DEARER(size + 1) + python)
        sizes.append(budget.take([gains]))
        price = budget._tokens / budget._time
        best = max(range(9), key=lambda n: sum(gains[:n]) - price * (DEARER(n + 1) - 1.0) / (1.0 + python))
        assert abs(sizes[-1] - best) <= 1
    assert sizes[1] > sizes[0]


@pytest.mark.parametrize(
    ("tokens", "seconds", "message"),
    [
        ((1,), (0.5,), r"^sizes must ascend from 1, with a time each: got \(1,\) and \(0.5,\)$"),
        ((2, 4), (0.5, 0.6), "sizes must ascend from 1"),
        ((1, 4, 2), (0.5, 0.6, 0.7), "sizes must ascend from 1"),
        ((1, 2), (0.5,), "with a time each"),
        ((1, 2), (0.5, 0.0), r"^times must be positive: got \(0.5, 0.0\)$"),
        *(((1, 2, 4), (one, 2.0, 3.0), "times must be positive") for one in (0.0, -1.0)),
        *(((1, 2, 4), (1.0, 2.0, one), "times must be positive") for one in (float("inf"), float("nan"))),
    ],
)
def test_refuses_tables_that_say_nothing(tokens, seconds, message):
    with pytest.raises(ValueError, match=message):
        CostTable(tokens, seconds)


def test_drafting_in_vain_becomes_rare():
    budget = AdaptiveBudget(CostTable((1, 64), (1e-3, 2e-3)))
    budget.begin()

    def asked(emitted):
        budget.remaining = 50
        drafts = budget.drafts()
        budget.observe(1, [list(range(emitted))], 2e-4 if drafts else 0.0, 1e-3)
        return drafts

    assert [asked(1) for _ in range(14)] == [False] * 2 + [True] * 12
    for _ in range(48):
        asked(1)
    assert 4 <= sum(asked(1) for _ in range(96)) <= 20
    while not asked(6):  # a guess that holds: drafting is back in every step
        pass
    assert all(asked(1) for _ in range(11))


# ---------------------------------------------------------------------- sizes chosen ahead


def steady(cost, accepted, draft_seconds=0.1, steps=600, batch=1, **keywords):
    """Sizes that a steady budget chose, where a tree's first ``accepted`` nodes are always right."""
    budget, chosen = SteadyBudget(cost, batch=batch, **keywords), []
    for _ in range(steps):
        size = budget.nodes if budget.drafts() else 0
        chosen.append(size)
        path = list(range(min(accepted, size) + 1))
        spent = draft_seconds if size else 0.0
        budget.observe(size + 1, [path] * batch, spent, cost(batch * (size + 1)))
    return chosen


@pytest.mark.parametrize(("accepted", "best"), [(4, 7), (10, 15), (28, 31), (60, 63)])
def test_a_steady_budget_takes_the_size_that_holds_what_is_accepted(accepted, best):
    chosen = steady(CostTable((1, 64), (1.0, 3.0)), accepted)
    assert chosen[-20:-4].count(best) >= 14


def test_a_steady_budget_does_not_draft_in_vain():
    for cost, accepted in ((FREE, 0), (STEEP, 1)):
        chosen = steady(cost, accepted)
        assert chosen[-100:].count(0) >= 97  # and looks now and then whether that still holds
        assert sum(size > 0 for size in chosen[-128:]) >= 1


def test_rows_that_have_finished_say_nothing():
    shape = DraftShape(7, False, 4)
    budgets = one, _ = SteadyBudget(FREE, [shape]), SteadyBudget(FREE, [shape], batch=2)
    for _ in range(30):
        for budget, paths in zip(budgets, ([[0, 1, 2]], [[0, 1, 2], []]), strict=True):
            budget.observe(8, paths, 0.1, 1.0, shape=shape)
    assert [budget._trees[4]._rates for budget in budgets] == [one._trees[4]._rates] * 2
    assert one._trees[4].total(1) == pytest.approx(1.0, abs=0.3)
    assert one._trees[4].total(7) - one._trees[4].total(6) < 0.2


def test_a_hiccup_is_not_the_price_of_a_size():
    budget = SteadyBudget(FREE)
    budget.observe(64, [[0, 1, 2, 3, 4, 5]], 5.0, 50.0, shape=DraftShape(63, False, 12))
    assert budget.drafts()
    assert budget.nodes >= 31


@pytest.mark.parametrize("budget", [Budget(2), AdaptiveBudget(STEEP), SteadyBudget(FREE)])
def test_drawn_trees_and_those_without_probabilities_stay_whole(budget):
    rows = [([5] * 70, list(range(70)))]
    unscored, drawn = build_tree(torch.tensor([1]), rows), build_tree(torch.tensor([1]), rows, [[0.01] * 70])
    drawn.draft_probs = torch.full((1, 71, 9), 1 / 9)
    assert budget.prune(unscored) is unscored
    assert budget.prune(drawn) is drawn
    assert budget.prune(build_tree(torch.tensor([1]), rows, [[0.01] * 70])).nodes < 71


def test_one_step_moves_prices_by_a_tenth_at_most():
    steady = SteadyBudget(CostTable((1, 64), (3.0, 3.0)))
    shape = DraftShape(63, False, 12)
    usual = steady._seconds[shape]
    steady.observe(64, [[0]], 0.0, 1000.0, shape=shape)
    assert steady._seconds[shape] == pytest.approx(1.1 * usual)


def test_a_loss_by_chance_ends_no_drafting():
    """Three guesses in ten hold and gain two tokens: the mean of twelve steps is often below zero, by little."""
    budget, rng = adaptive(FREE), random.Random(0)
    for _ in range(400):
        budget.remaining = 50
        budget.observe(1, [[0]], 0.0, 1.0)  # plain steps are measured too
        assert budget.drafts()
        budget.take([[0.5, 0.4]])
        budget.observe(3, [[0, 1, 2] if rng.random() < 0.3 else [0]], 0.05, 1.05)


def test_a_new_request_tries_drafting_anew():
    budget = adaptive(STEEP)
    simulate(budget, 60, 0.0, STEEP, 0.5)
    paused = [budget.drafts() for _ in range(3)]
    budget.begin(0.5)
    halfway = budget._payoff.rest
    budget.begin()
    assert (paused, budget._payoff.rest, budget.drafts()) == ([False] * 3, 0, True)
    assert halfway > 0


def test_shapes_beside_the_best_are_tried_again():
    budget = SteadyBudget(FREE)
    budget._trees[12] = Rates([1.0] * 15 + [0.0] * 48)  # 15 nodes earn most
    tried = {}
    for step in range(1, 513):
        budget.drafts()
        tried.setdefault(budget.shape, []).append(step)
    tried.pop((15, False, 12))
    assert tried == {
        (7, False, 12): [64, 320],
        (15, False, 4): [128, 384],
        (3, True, 3): [192],
        (31, False, 12): [256, 512],
        (7, True, 7): [448],
    }


@pytest.mark.parametrize(("levels", "best"), [(2, 4), (9, 12)])
def test_trees_are_as_deep_as_paths_go(levels, best):
    """A level costs as much as a tenth of a pass; paths go on for so many levels, whatever the shape."""
    budget, depths = SteadyBudget(FREE, [shape for shape in STEADY_SHAPES if not shape.chain]), []
    for _ in range(600):
        budget.drafts()
        path = list(range(1 + min(levels, budget.depth, budget.nodes)))
        budget.observe(budget.nodes + 1, [path], 0.1 * min(budget.depth, budget.nodes), 1.0, shape=budget.shape)
        depths.append(budget.depth)
    assert depths[-64:].count(best) >= 62  # all but probes


def test_paths_that_end_at_a_level_have_not_reached_the_next():
    budget = SteadyBudget(FREE)
    for _ in range(100):
        budget.observe(16, [[0, 1, 2], []], 0.1, 1.0, shape=DraftShape(15, False, 12))
    assert budget._reached.total(12) == pytest.approx(2, abs=0.1)


# ---------------------------------------------------------------------- chains in place of trees


def share_of_chains(budget, rng, right, draft_seconds, steps, batch=1):
    """Of the last 300 steps with drafts. A level of a chain is right as often as ``right`` says for chains."""
    chains = []
    for _ in range(steps):
        budget.resize(batch)
        budget.remaining, size = 50, 0
        if budget.drafts():
            chains.append(budget.chain)
            gains = [[0.8**i for i in range(1, 8)]] * batch
            size = budget.nodes if isinstance(budget, SteadyBudget) else budget.take(gains)
        paths = []
        for _ in range(batch):
            accepted = 0
            while accepted < min(size, 7) and rng.random() < right[budget.chain]:
                accepted += 1
            paths.append(list(range(accepted + 1)))
        budget.observe(size + 1, paths, draft_seconds[budget.chain] if size else 0.0, FREE(batch * (size + 1)))
    return fmean(chains[-300:])


CHEAP, ALIKE = {False: 0.6, True: 0.1}, {False: 0.1, True: 0.1}
LITTLE, MUCH = {False: 0.74, True: 0.7}, {False: 0.9, True: 0.7}
"""Time of a draft, and how often a level is right, of trees and of chains: side nodes may bring little or much."""


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", [AdaptiveBudget, SteadyBudget])
def test_chains_are_drafted_where_they_are_faster(kind, batch):
    budget, rng = kind(FREE, batch=batch), random.Random(0)
    assert share_of_chains(budget, rng, LITTLE, CHEAP, 3000, batch) > 0.9
    assert share_of_chains(budget, rng, MUCH, ALIKE, 4000, batch) < 0.1
    assert share_of_chains(budget, rng, LITTLE, CHEAP, 4000, batch) > 0.9


def test_the_other_shape_is_tried_rarely():
    """A twenty-fifth of the steps, and not in a short first request."""
    budget, rng = adaptive(FREE), random.Random(0)
    assert share_of_chains(budget, rng, MUCH, ALIKE, 28) == 0.0
    assert 0.02 < share_of_chains(budget, rng, MUCH, ALIKE, 2000) < 0.04


def test_chains_and_trees_learn_apart():
    """How often drafts of a probability are accepted, and what a level costs."""
    budget = adaptive(FREE)
    for chain, kept, cost in ((True, 8, 0.05), (False, 1, 0.5)):
        budget.chain = chain
        for step in range(80):
            budget.remaining = 50
            budget.take([[0.5] * 7])
            budget.levels = 1 + step % 4
            budget.observe(8, [list(range(kept))], cost * budget.levels, FREE(8))
    prices = []
    for chain, low, high in ((True, 0.8, 1.0), (False, 0.0, 0.3)):
        budget.chain = chain
        assert low <= budget._correct(0.5) <= high
        prices.append(budget.least_gain)
    assert prices[1] > 3 * prices[0]


def test_a_chain_is_the_path_of_most_probable_children():
    rows = [([5, 6, 7, 8, 9], [0, 0, 1, 2, 3]), ([4, 3, 2], [0, 1, 1])]
    probs = [[0.6, 0.3, 0.25, 0.2, 0.1], [0.9, 0.5, 0.4]]
    for budget in (Budget(4, chain=True), Budget(2, chain=True)):
        tree = budget.prune(build_tree(torch.tensor([1, 2]), rows, probs))
        assert tree.children == [
            [{5: 1}, {7: 2}, {9: 3}, {}][: budget.nodes] + [{}] * (budget.nodes == 2),
            [{4: 1}, {3: 2}, {}] + [{}] * (budget.nodes == 4),
        ]
        assert tree.path_probs == [[0.6, 0.25, 0.1][: budget.nodes], [0.9, 0.5]]


# ---------------------------------------------------------------------- a machine that is busy for a moment


def sizes_of(budget, rng, acceptance, cost, draft_seconds, slower=1.0, steps=0, tokens=0, drafts=0):
    """Tree sizes on a machine that is ``slower``, for so many steps, tokens or draft steps."""
    slow, sizes, emitted = CostTable(cost.tokens, tuple(slower * t for t in cost.seconds)), [], 0
    while len(sizes) < steps or emitted < tokens or sum(size > 0 for size in sizes) < drafts:
        accepted = 0
        while accepted < 12 and rng.random() < acceptance:
            accepted += 1
        _, more, size = drafted(budget, [0.8**i for i in range(1, 13)], accepted, slow, slower * draft_seconds)
        sizes.append(size)
        emitted += more
    return sizes


@pytest.mark.parametrize(("slower", "draft_seconds"), [(3.0, 0.2), (10.0, 0.02), (10.0, 0.2)])
@pytest.mark.parametrize(("acceptance", "plain"), [(0.6, 0), (0.8, 20)])
def test_drafting_recovers_from_a_busy_moment_within_a_hundred_tokens(slower, draft_seconds, acceptance, plain):
    """20 draft steps on a slower machine, and a hundred tokens on the usual one."""
    for cost in (FLAT, DEARER):
        for seed in range(3):
            budget, rng = adaptive(cost), random.Random(seed)
            for _ in range(plain):
                budget.observe(1, [[0]], 0.0, cost(1))
            step = partial(sizes_of, budget, rng, acceptance, cost, draft_seconds)
            step(steps=100)
            before = step(steps=40)
            step(slower=slower, drafts=20)
            step(tokens=100)
            assert sum(step(steps=40)) >= 0.45 * sum(before)


# ---------------------------------------------------------------------- time of a step


def after(sizes, time, base=lambda size: 0.0, guess=0.0, model=None):
    model = model or StepTimeModel()
    for size in sizes:
        model.add(size, time(size), base(size), guess)
    return model


@pytest.mark.parametrize(("fixed", "slope"), [(0.3, 0.0), (0.0, 0.05), (2.0, 0.1), (-0.2, 0.02)])
def test_fixed_time_and_slope_are_found(fixed, slope):
    rng = random.Random(0)
    sizes = [rng.randrange(16) for _ in range(200)]
    model = after(
        sizes, lambda size: 1.0 + fixed + slope * size, base=lambda size: 1.0, model=StepTimeModel(least=-0.5)
    )
    assert model.slope == pytest.approx(slope, abs=0.01)
    assert model.fixed == pytest.approx(fixed, abs=0.05)


def test_steps_far_below_their_base_do_not_make_a_slope_negative():
    """Steps of a tree take half as long as calibrated, and plain ones as long."""
    model = after(
        [0, 16, 16, 16] * 40,
        lambda size: 1.2 if size else 1.0,
        base=lambda size: 1 + 0.15 * size,
        model=StepTimeModel(-0.5),
    )
    assert model.fixed >= -0.5
    assert 1.0 + model.fixed + model.slope * 16 > 0.0
    again = after([1, 9, 1, 1] * 40, lambda size: 0.05 + 0.08 * size)
    assert (again.fixed, again.slope) == (pytest.approx(0.05, abs=0.1), pytest.approx(0.08, abs=0.03))


def test_steps_of_one_size_show_no_slope():
    assert after([5] * 50, lambda size: 3.0, guess=0.4).slope == 0.4
    assert after([5] * 50, lambda size: 3.0).slope == 0.0


def test_other_load_is_no_slope():
    """A machine that is ten times slower while steps are large, for twenty of two hundred steps."""
    model = after([0, 4, 2, 8] * 25, lambda size: 1.0 + 0.05 * size)
    after([8] * 20, lambda size: 14.0, model=model)
    after([0, 4, 2, 8] * 5, lambda size: 1.0 + 0.05 * size, model=model)
    assert model.slope == pytest.approx(0.05, abs=0.02)
    assert model.fixed < 1.5


def test_an_interruption_is_no_difference():
    model = StepTimeModel()
    for size, fixed in [(2, 1.0), (8, 3.0)] * 30:
        model.interrupt()
        model.add(size, fixed)
    assert model.slope == 0.0


def test_the_first_drafts_of_a_shape_have_one_level():
    """The time of a level is known after a step with drafts that follows another. Its expected tokens are at most 1."""
    budget = adaptive(FREE)
    for chain in (False, True):
        budget.chain = chain
        for step in range(3):
            assert (budget.least_gain == 1.0) == (step < (1 if chain else 2)), (chain, step)
            budget.levels = 1
            budget.observe(4, [[0, 1]], 0.1, 1.0)


def test_an_interruption_forgets_no_times():
    model = StepTimeModel()
    for _ in range(100):
        model.add(1, 1.0)
    model.interrupt()
    assert model.measured
    model.add(1, 1.2)
    assert model.fixed < 1.1
