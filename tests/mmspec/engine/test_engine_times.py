"""Each second of a step is counted once, in its place, and the policy is given the times that the step measured."""

import pytest

from mmspec.core.plan import StepPlan
from mmspec.engine.policy import DraftPolicy
from mmspec.engine.stopping import Stopper
from mmspec.sampling.batch_sampler import BatchSampler
from mmspec.sampling.sampler import Sampler
from tests.decoding import decode
from tests.mmspec.engine.test_engine import VOCAB, Fixed, TableTarget, prompt_of, said_plainly
from tests.tiny import table_model

SECONDS = {  # powers of two: any sum tells its parts
    "prefill": 256.0,
    "begin": 64.0,
    "plan": 32.0,
    "propose": 16.0,
    "verify": 8.0,
    "choose": 4.0,
    "commit": 2.0,
    "observe": 1.0,
}


@pytest.fixture
def now(monkeypatch):
    """The time, a list of one number, as the engine reads it."""
    time = [0.0]
    for name in ("core.clock", "stats.perf_counter", "sequence.clock"):
        monkeypatch.setattr(f"mmspec.engine.{name}", lambda *device: time[0])
    return time


def take_time(now, part, *methods):
    """Let methods of an object take their seconds."""

    def timed(name, method):
        def call(*args, **kwargs):
            now[0] += SECONDS[name]
            return method(*args, **kwargs)

        return call

    for name in methods:
        setattr(part, name, timed(name, getattr(part, name)))


class Observed(DraftPolicy):
    """The third step is not drafted."""

    def __init__(self):
        super().__init__(StepPlan(9, 5))
        self.calls, self.asked = [], 0

    def plan(self, rows, remaining):
        self.asked += 1
        return StepPlan(0) if self.asked == 3 else super().plan(rows, remaining)

    def observe(self, plan, tree, paths, times):
        self.calls.append((tree.nodes, paths, times.draft, times.verify))


def test_every_second_in_its_place(now, monkeypatch):
    table, prompts = table_model(VOCAB), [[1, 2], [5, 4]]
    truth = [said_plainly(table, row, 9) for row in prompts]
    wrong = [next(token for token in range(VOCAB) if token != row[4]) for row in truth]
    drafter = Fixed(
        [(truth[0][1:3], [0, 1]), (truth[1][1:3], [0, 1])],  # both accept two drafts, and end at four tokens
        [([wrong[0], truth[0][4]], [0, 0]), ([wrong[1]], [0])],  # the first row accepts its second sibling
    )
    target, sampler, policy = TableTarget(table), Sampler(), Observed()
    take_time(now, target, "prefill", "verify", "commit")
    take_time(now, drafter, "begin", "propose", "observe")
    choose = BatchSampler.choose

    def chosen(*arguments):
        now[0] += SECONDS["choose"]
        return choose(*arguments)

    monkeypatch.setattr(BatchSampler, "choose", chosen)
    take_time(now, policy, "plan")

    *_, rows = decode(target, drafter, prompt_of(prompts), sampler, Stopper(9), policy)
    assert [row.token_ids for row in rows] == truth
    s = SECONDS
    drafted, verified = s["plan"] + s["propose"], s["verify"] + s["choose"]
    assert policy.calls[:3] == [
        (3, [[0, 1, 2], [0, 1, 2]], drafted, verified),
        (3, [[0, 2], [0]], drafted, verified),
        (1, [[0], [0]], 0.0, verified),
    ]
    # Beyond the last tree, the drafter proposes roots; the last step cannot accept drafts.
    assert policy.calls[3:] == [(1, [[0], [0]], drafted, verified)] * 2 + [(1, [[0]], 0.0, verified)]
    for row, steps in zip(rows, (5, 6), strict=True):
        stats = row.stats
        assert stats.num_spec_steps == steps
        assert stats.prefill_seconds == s["prefill"]
        assert stats.time_to_first_token == s["prefill"] + s["choose"]
        assert stats.draft_seconds == s["begin"] + steps * s["plan"] + 4 * s["propose"]
        assert stats.verify_seconds == steps * verified
        assert stats.commit_seconds == steps * (s["commit"] + s["observe"])
        parts = (stats.time_to_first_token, stats.draft_seconds, stats.verify_seconds, stats.commit_seconds)
        assert stats.wall_seconds == sum(parts)
    assert rows[1].stats.wall_seconds == now[0]
