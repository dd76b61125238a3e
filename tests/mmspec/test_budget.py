import random

import pytest

from mmspec.budget import AdaptiveBudget, Budget, CostTable

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
    assert budget.take([[0.9] * 3, [0.9] * 12]) == min(nodes, 12)
    assert budget.take([]) == 0
    budget.remaining = 0
    assert not budget.drafts()


def enumerated_best(cost, gains, batch):
    """The size with the most expected tokens per second, all tried; the smallest of equals."""
    rates = []
    for n in range(max(map(len, gains)) + 1):
        tokens = batch + sum(sum(row[:n]) for row in gains)
        rates.append(tokens / cost(batch * cost.width(n + 1, batch)))
    return rates.index(max(rates))


@pytest.mark.parametrize("cost", [FLAT, STEEP, FREE])
@pytest.mark.parametrize("batch", [1, 3])
def test_takes_the_enumerated_best_size(cost, batch):
    rng = random.Random(batch)
    for _ in range(50):
        gains = [sorted((rng.random() ** 2 for _ in range(rng.randint(0, 40))), reverse=True) for _ in range(batch)]
        budget = AdaptiveBudget(cost, nodes=64, batch=batch)  # untried: trusts the drafter as it is
        assert budget.take(gains) == enumerated_best(cost, gains, batch)


def test_trust_follows_what_was_accepted():
    budget = AdaptiveBudget(FLAT)
    before = budget.take([[0.9, 0.8, 0.7, 0.6] * 4])
    assert before > 0
    for _ in range(200):
        size = budget.take([[0.9] * 16])
        budget.observe(size + 1, [[0]], 0.0, FLAT(size + 1))  # all of it refused
    # At most eight nodes are free of charge; none of more is taken on trust.
    assert budget.take([[0.9] * 16]) <= 7
    assert budget._correct(0.9) < 0.1
    for _ in range(400):
        size = budget.take([[0.9] * 16])
        budget.observe(size + 1, [list(range(size + 1))], 0.0, FLAT(size + 1))
    assert budget._correct(0.9) > 0.8


def test_rows_that_have_finished_teach_nothing():
    budget, alone = AdaptiveBudget(FLAT, batch=2), AdaptiveBudget(FLAT, batch=2)
    for _ in range(30):
        size = budget.take([[0.9] * 6, [0.9] * 6])
        budget.observe(size + 1, [list(range(size + 1)), []], 0.001, FLAT(2 * size + 2))
        same = alone.take([[0.9] * 6])
        alone.observe(same + 1, [list(range(same + 1))], 0.001, FLAT(2 * same + 2))
    assert budget._correct(0.9) == pytest.approx(alone._correct(0.9), rel=1e-6)
    assert budget._worth == pytest.approx(alone._worth, rel=0.2)


def simulate(budget, cost, steps, acceptance, draft_seconds, rng):
    """Steps with a chain drafter that claims 0.8 per token and is right with probability ``acceptance``; share drafted."""
    drafted = 0
    for _ in range(steps):
        budget.remaining = 1000
        if not budget.drafts():
            budget.observe(1, [[0]], 0.0, cost(1))
            continue
        drafted += 1
        size = budget.take([[0.8 ** (i + 1) for i in range(8)]])
        path = [0]
        while len(path) <= size and rng.random() < acceptance:
            path.append(len(path))
        budget.observe(size + 1, [path], draft_seconds, cost(size + 1))
    return drafted / steps


def test_gives_up_useless_drafts_and_comes_back():
    rng = random.Random(0)
    budget = AdaptiveBudget(FLAT)
    simulate(budget, FLAT, 50, 0.9, 0.05, rng)
    assert simulate(budget, FLAT, 100, 0.9, 0.05, rng) == 1.0
    simulate(budget, FLAT, 200, 0.0, 0.5, rng)
    assert simulate(budget, FLAT, 300, 0.0, 0.5, rng) < 0.15
    simulate(budget, FLAT, 300, 0.9, 0.05, rng)
    assert simulate(budget, FLAT, 100, 0.9, 0.05, rng) > 0.9


def test_pauses_are_bounded():
    rng = random.Random(0)
    budget = AdaptiveBudget(FLAT)
    simulate(budget, FLAT, 2000, 0.0, 1.0, rng)
    waited = 0
    while not budget.drafts():
        waited += 1
    assert waited <= 64


def test_one_more_drafter_pass_must_pay():
    budget = AdaptiveBudget(FLAT)
    assert budget.deeper(0.1)  # its price is not known yet
    budget.observe(1, [[0]], 0.5, 1.0)
    assert budget.deeper(0.9)
    assert not budget.deeper(0.01)


def test_a_hiccup_is_not_the_price_of_a_tree():
    budget = AdaptiveBudget(FLAT)
    for _ in range(20):
        budget.observe(9, [[0]], 0.01, FLAT(9))
    before = budget.take([[0.9, 0.8, 0.7]])
    budget.observe(9, [[0]], 50.0, 500.0)
    assert budget._scale <= 1.2
    assert budget.take([[0.9, 0.8, 0.7]]) == before


@pytest.mark.parametrize(
    ("tokens", "seconds", "message"),
    [
        ((1,), (0.5,), r"^sizes must ascend from 1, with a time each: got \(1,\) and \(0.5,\)$"),
        ((2, 4), (0.5, 0.6), "sizes must ascend from 1"),
        ((1, 4, 2), (0.5, 0.6, 0.7), "sizes must ascend from 1"),
        ((1, 2), (0.5,), "with a time each"),
        ((1, 2), (0.5, 0.0), r"^times must be positive: got \(0.5, 0.0\)$"),
        ((1, 2), (0.5, float("nan")), "times must be positive"),
    ],
)
def test_refuses_tables_that_say_nothing(tokens, seconds, message):
    with pytest.raises(ValueError, match=message):
        CostTable(tokens, seconds)
