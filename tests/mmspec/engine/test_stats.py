"""Statistics and times of decode steps; records of trees and log probabilities, against passes of the model."""

import json
from types import SimpleNamespace

import pytest
import torch

import mmspec
from mmspec import Stats
from mmspec.core.plan import StepPlan
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.engine import stats
from mmspec.engine.policy import DraftPolicy
from mmspec.engine.stats import token_logprobs
from mmspec.engine.stopping import Stopper
from mmspec.errors import UserError
from mmspec.sampling.batch_sampler import BatchSampler
from mmspec.sampling.params import MOST_LOGPROBS
from mmspec.sampling.sampler import Sampler
from mmspec.vision.embedded import samples
from tests.decoding import decode
from tests.mmspec.engine.test_engine import VOCAB, Fixed, TableTarget, prompt_of, said_plainly
from tests.tiny import byte_model, byte_tokenizer, table_model

PROMPT = "abcabcabcabd"
REQUEST = {"prompt": "Describe the image.", "images": str(samples() / "scene.png")}
SAMPLED = {"temperature": 1.5, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3}


def pipeline(drafter):
    return mmspec.load(byte_model(), drafter, processor=byte_tokenizer())


def test_steps_add_up():
    found = Stats(num_generated_tokens=1, time_to_first_token=0.5, wall_seconds=3.0)
    for drafted, depth, accepted, emitted in [(6, 3, 2, 3), (6, 4, 0, 1), (0, 0, 0, 1), (5, 2, 2, 3)]:
        found.record_step(drafted, depth, accepted, emitted)
    assert found.num_generated_tokens == 1 + 3 + 1 + 1 + 3 == 1 + sum(found.accept_lengths)
    assert found.accept_lengths == [3, 1, 1, 3]
    assert found.acceptance_histogram == [2, 0, 2]
    assert (found.num_spec_steps, found.num_draft_tokens, found.num_accepted_draft_tokens) == (4, 17, 4)
    assert found.num_spec_tokens == 4
    assert found.mean_acceptance_length == pytest.approx(8 / 4)
    assert found.draft_acceptance_rate == pytest.approx(4 / 17)
    assert found.tokens_per_second == pytest.approx(8 / 2.5)


def test_nothing_done_is_nothing_and_divides_by_nothing():
    found = Stats()
    assert {name for name, value in vars(found).items() if value} == {"lossless"}
    assert (found.mean_acceptance_length, found.draft_acceptance_rate, found.tokens_per_second) == (0.0, 0.0, 0.0)


def test_figures_are_plain_json():
    figures = json.loads(json.dumps(Stats().to_dict()))
    assert {"mean_acceptance_length", "draft_acceptance_rate", "tokens_per_second", *vars(Stats())} == set(figures)


def test_several_sequences_add_up():
    first = Stats(num_prompt_tokens=7, num_cached_tokens=3, num_generated_tokens=1, wall_seconds=2.0)
    first.record_step(6, 4, 2, 3)
    second = Stats(num_prompt_tokens=5, num_cached_tokens=2, num_generated_tokens=1, wall_seconds=3.0)
    for drafted, depth, accepted, emitted in [(5, 3, 0, 1), (4, 2, 1, 2)]:
        second.record_step(drafted, depth, accepted, emitted)
    whole = Stats.combined([first, second])
    assert (whole.num_prompt_tokens, whole.num_cached_tokens, whole.num_generated_tokens) == (12, 5, 8)
    assert (whole.num_spec_steps, whole.num_draft_tokens, whole.num_accepted_draft_tokens) == (3, 15, 3)
    assert whole.num_spec_tokens == 4  # of the deepest
    assert whole.acceptance_histogram == [1, 1, 1]
    assert whole.accept_lengths == [3, 1, 2]
    assert whole.wall_seconds == 0.0  # shared: no sum
    assert first.accept_lengths == [3]


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
    choose = SimpleNamespace(choose=BatchSampler.choose)
    take_time(now, choose, "choose")
    monkeypatch.setattr(BatchSampler, "choose", lambda *arguments: choose.choose(*arguments))
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
        found = row.stats
        assert found.num_spec_steps == steps
        assert found.prefill_seconds == s["prefill"]
        assert found.time_to_first_token == s["prefill"] + s["choose"]
        assert found.draft_seconds == s["begin"] + steps * s["plan"] + 4 * s["propose"]
        assert found.verify_seconds == steps * verified
        assert found.commit_seconds == steps * (s["commit"] + s["observe"])
        parts = (found.time_to_first_token, found.draft_seconds, found.verify_seconds, found.commit_seconds)
        assert found.wall_seconds == sum(parts)
    assert rows[1].stats.wall_seconds == now[0]


class Event:
    """A CUDA event of a device on which every call takes 40 ms, however early the host returns."""

    milliseconds = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        Event.milliseconds += 40.0
        self.at = Event.milliseconds

    def elapsed_time(self, end):
        return end.at - self.at


def test_drafting_and_verification_are_timed_on_the_device(monkeypatch):
    """By the host's clock, launches would be nothing and the first copy to the host the whole step."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("mmspec.engine.core.StepTimer", lambda device: stats.StepTimer(torch.device("cuda")))
    pipe = pipeline(Ngram())
    found = pipe.generate("Say: ", max_new_tokens=6, nodes=3).stats
    assert found.num_spec_steps > 0
    assert found.draft_seconds == pytest.approx(0.08 * found.num_spec_steps)  # sequences that join, drafting
    assert found.verify_seconds == pytest.approx(0.04 * found.num_spec_steps)


def told(answer):
    """The tokens that the steps of an answer spell, possibly with some after its end."""
    tokens = answer.token_ids[:1]
    for step in answer.trees:
        assert step.tokens[0] == tokens[-1]
        assert step.texts == [byte_tokenizer().decode([token]) for token in step.tokens]
        assert step.bonus_text == byte_tokenizer().decode([step.bonus])
        tokens += [*(step.tokens[node] for node in step.path[1:]), step.bonus]
    return tokens


@pytest.mark.parametrize("make", [Ngram, Recycle])
def test_the_steps_spell_the_answer(make):
    requests = [{"prompt": PROMPT}, {"prompt": "The second one"}]
    traced, untraced = (
        pipeline(make()).generate_batch(requests, max_new_tokens=30, nodes=6, trace=trace) for trace in (True, False)
    )
    for answer, plain in zip(traced, untraced, strict=True):
        assert answer.token_ids == plain.token_ids == told(answer)[: len(answer.token_ids)]
        assert answer.stats.accept_lengths == plain.stats.accept_lengths
        assert plain.trees == []
        assert len(answer.trees) == answer.stats.num_spec_steps
        assert sum(len(step.tokens) - 1 for step in answer.trees) == answer.stats.num_draft_tokens > 0


def test_probabilities_are_the_models_own():
    answer = pipeline(Recycle()).generate(PROMPT, max_new_tokens=30, nodes=6, trace=True)
    prefix = byte_tokenizer()(PROMPT)["input_ids"] + answer.token_ids[:1]

    def expected(ids, token):
        with torch.no_grad():
            return pytest.approx(float(byte_model()(torch.tensor([ids])).logits[0, -1].softmax(-1)[token]), abs=1e-5)

    for step in answer.trees:
        for node, parent in enumerate(step.parents[1:], start=1):
            above = [parent]
            while step.parents[above[0]] >= 0:
                above.insert(0, step.parents[above[0]])
            ids = prefix + [step.tokens[n] for n in above[1:]]
            assert step.probs[node] == expected(ids, step.tokens[node])
        prefix += [*(step.tokens[node] for node in step.path[1:]), step.bonus]
        assert step.bonus_prob == expected(prefix[:-1], step.bonus)
    assert answer.stats.num_draft_tokens > 5


def test_guesses_are_shares_of_their_parents():
    answer = pipeline(Ngram()).generate(PROMPT, max_new_tokens=30, nodes=6, trace=True)
    drafted = [step for step in answer.trees if len(step.tokens) > 1]
    assert drafted
    for step in drafted:
        assert step.guesses is not None
        assert all(0 < guess <= 1 for guess in step.guesses)
        for parent in set(step.parents) - {-1}:
            shares = [g for g, p in zip(step.guesses, step.parents, strict=True) if p == parent]
            assert sum(shares) <= 1 + 1e-6


@pytest.fixture(scope="module")
def pipe(one_thread):
    return mmspec.load("tiny-llava", device="cpu", dtype="float32")


def raw_logprobs(pipe, answer):
    """(tokens, vocab): transformers' log_softmax at the position before each token of an answer."""
    prompt = pipe.encode([REQUEST])
    ids = torch.cat([prompt.input_ids, torch.tensor([answer.token_ids])], dim=1)
    with torch.no_grad():
        logits = pipe.model(input_ids=ids, pixel_values=prompt.inputs["pixel_values"]).logits[0].float()
    return logits[prompt.input_ids.shape[1] - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("sampling", [{}, {**SAMPLED, "seed": 3}], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_the_model_before_sampling_parameters(pipe, sampling):
    answer = pipe.generate(**REQUEST, max_new_tokens=30, logprobs=5, **sampling)
    assert answer.token_ids == pipe.generate(**REQUEST, max_new_tokens=30, **sampling).token_ids
    expected = raw_logprobs(pipe, answer)
    assert [one.token_id for one in answer.logprobs] == answer.token_ids
    own = torch.tensor([one.logprob for one in answer.logprobs])
    torch.testing.assert_close(own, expected[torch.arange(len(own)), answer.token_ids], atol=1e-4, rtol=1e-4)
    best = expected.topk(5, dim=-1)
    assert [[token for token, _ in one.top] for one in answer.logprobs] == best.indices.tolist()
    found = torch.tensor([[value for _, value in one.top] for one in answer.logprobs])
    torch.testing.assert_close(found, best.values, atol=1e-4, rtol=1e-4)


def test_half_precision_logits_are_normalised_in_float32():
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = logits.double().log_softmax(-1)
    found = token_logprobs(logits, [4, 400, 7], 5)
    assert [one.logprob for one in found] == pytest.approx(expected[range(3), [4, 400, 7]].tolist(), abs=1e-5)
    best = [value for one in found for _, value in one.top]
    assert best == pytest.approx(expected.topk(5, dim=-1).values.flatten().tolist(), abs=1e-5)


@pytest.mark.parametrize("vocab", [1, 7, MOST_LOGPROBS - 1, MOST_LOGPROBS, MOST_LOGPROBS + 1])
def test_there_are_no_more_alternatives_than_tokens(vocab):
    (found,) = token_logprobs(torch.arange(float(vocab))[None], [0], MOST_LOGPROBS)
    assert [token for token, _ in found.top] == list(range(vocab))[::-1][:MOST_LOGPROBS]


def test_a_stream_has_the_logprobs_of_its_tokens(pipe):
    whole = pipe.generate(**REQUEST, max_new_tokens=20, logprobs=1)
    for stop in (None, *whole.text.split()):  # most are inside the tokens of a step
        pieces = list(pipe.stream(**REQUEST, max_new_tokens=20, logprobs=1, stop=stop))
        assert all([one.token_id for one in piece.logprobs] == piece.token_ids for piece in pieces)
        found = [one.logprob for piece in pieces for one in piece.logprobs]
        assert found == pytest.approx([one.logprob for one in whole.logprobs[: len(found)]], abs=1e-4)
        assert stop or len(found) == 20


def test_requests_of_a_batch_record_their_own(pipe):
    alone = [pipe.generate(prompt, max_new_tokens=12, logprobs=2) for prompt in ("Hello.", "What is this?")]
    together = pipe.generate_batch([{"prompt": "Hello."}, {"prompt": "What is this?"}], max_new_tokens=12, logprobs=2)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert [x.logprob for x in one.logprobs] == pytest.approx([x.logprob for x in other.logprobs], abs=1e-4)


def test_they_are_recorded_on_request_only(pipe, monkeypatch):
    monkeypatch.setattr("mmspec.engine.sequence.token_logprobs", lambda *_: pytest.fail("recorded"))
    assert pipe.generate("Hello.", max_new_tokens=4).logprobs == []
    with pytest.raises(UserError, match=r"logprobs must be <= 20: got 21"):
        pipe.generate("Hello.", logprobs=21)
