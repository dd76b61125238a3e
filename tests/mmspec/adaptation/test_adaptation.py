"""Drafters that learn in idle time: answers stay those of plain decoding, weights change between sequences only."""

import copy
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mmspec import Pipeline, SamplingParams, UserError
from mmspec.adaptation import AdaptOptions, adaptation
from mmspec.adaptation.adaptation import Adaptation, RecordedDrafter, Recording, Store
from mmspec.core.tree import build_tree
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.union import Union
from mmspec.engine import engine as engines
from mmspec.engine.stopping import Stopper
from mmspec.plugins import target_class
from mmspec.sampling import defaults
from mmspec.training import tasks
from mmspec.training.features import ConversationFeatures, collate
from mmspec.training.objectives import LossInput
from tests.decoding import answered
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.drafters import tiny_drafter
from tests.tiny.models import text_inputs, vision_inputs

REQUESTS = 3


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Idle work begins at once, and weights are replaced after few requests."""
    monkeypatch.setattr(engines, "IDLE_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(engines, "IDLE_TIME_SHARE", 1.0)
    monkeypatch.setattr(adaptation, "REQUESTS", REQUESTS)


def pipeline(name, drafter, adapt=None):
    model = shared_model(name)
    return Pipeline(target_class(model.config)(model), None, drafter, adapt=adapt)


def adapting(name="llama", kind="medusa", folder=None):
    return pipeline(name, tiny_drafter(kind, shared_model(name)), AdaptOptions(folder))


def inputs_of(name, seed, **more):
    if name == "llava":
        return vision_inputs(name, images=1 + seed % 2, seed=seed)
    return text_inputs(length=3 + seed % 5, seed=seed, **more)


def tokens(pipe, inputs, params=None, length=10):
    sampler = defaults.sampler(params or SamplingParams())
    rows = answered(pipe, prompt_of(inputs), sampler, Stopper(length, eos_token_ids=[3]), 8)
    return [row.token_ids for row in rows]


def finish(pipe):
    pipe.engine.drain()
    with pipe.engine.paused():
        pipe.adaptation.finish()


@pytest.mark.parametrize(("name", "kind"), [("llama", "medusa"), ("llava", "flash"), ("bamba", "hydra")])
def test_states_are_those_of_a_forward_pass_over_the_sequence(name, kind):
    model, inputs = shared_model(name), vision_inputs(name) if name == "llava" else text_inputs(batch=3)
    pipe = adapting(name, kind)
    recorder = pipe.adaptation.heads[0].drafter
    pipe.engine.idle.clear()  # nothing is taken in
    rows = answered(pipe, prompt_of(inputs), defaults.sampler(SamplingParams()), Stopper(9, eos_token_ids=[]), 8)
    pipe.engine.drain()
    assert len(recorder.ended) == len(rows)
    for ended in recorder.ended:
        found = ended.answer
        tokens = found.tokens.tolist()
        (number,) = (number for number, row in enumerate(rows) if row.history[: len(tokens)] == tokens)
        row = rows[number]
        assert len(row.history) - len(found.tokens) <= 1 + (ended.steps > 0)
        extra = {key: value[number : number + 1] for key, value in inputs.items() if key == "pixel_values"}
        with torch.no_grad():
            expected = model(input_ids=found.tokens[None], output_hidden_states=True, **extra).hidden_states[-1][0]
        torch.testing.assert_close(found.features["last"], expected, rtol=1e-4, atol=1e-4)
        assert len(found.shown) == int(found.visual.sum())
        assert bool(found.visual.any()) == (name == "llava")


@pytest.mark.parametrize(("name", "kind"), [("llama", "medusa"), ("llava", "flash"), ("bamba", "hydra")])
def test_answers_are_equal_while_weights_are_replaced_under_concurrent_requests(name, kind, monkeypatch):
    swaps, most = [], []
    begin = RecordedDrafter.begin

    def checked(self, *arguments):
        before, running = self.drafter, len(self._rows)
        if self.fresh is None:  # there is always another one, as if another engine had made it
            self.fresh = before.renewed(copy.deepcopy(pipe.adaptation.heads[0]._current))
        begin(self, *arguments)
        most.append(running)
        if self.drafter is not before:
            swaps.append(running)

    monkeypatch.setattr(RecordedDrafter, "begin", checked)
    requests = [
        (inputs_of(name, seed, batch=1) if name != "llava" else inputs_of(name, seed), params)
        for seed in range(5)
        for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=seed))
    ]
    plain = pipeline(name, None)
    expected = [tokens(plain, *request) for request in requests]
    pipe, rng = adapting(name, kind), random.Random(0)
    order = [rng.randrange(len(requests)) for _ in range(24)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda number: tokens(pipe, *requests[number]), order))
    assert found == [expected[number] for number in order]
    for _ in range(2):
        for number in range(REQUESTS):
            assert tokens(pipe, *requests[number]) == expected[number]
        finish(pipe)
    tokens(pipe, *requests[0])
    pipe.engine.drain()
    head = pipe.adaptation.heads[0]
    assert head.replacements >= 2
    assert max(most) > 0  # some began beside others
    assert set(swaps) == {0}


def recorded(pipe, count):
    """Answers to random prompts."""
    head, ended = pipe.adaptation.heads[0], []
    head._take_in = lambda: ended.extend(head.drafter.ended) or head.drafter.ended.clear()
    for seed in range(count):
        tokens(pipe, text_inputs(length=6, seed=seed))
    finish(pipe)
    return [one.answer for one in ended]


@pytest.mark.parametrize("kind", ["medusa", "hydra", "msd", "flash"])
def test_a_batch_of_answers_takes_the_step_of_their_mean_loss(kind):
    pipe = adapting(kind=kind)
    answers, learner = recorded(pipe, 5), pipe.adaptation.heads[0]._learner
    network, before = copy.deepcopy(learner._network), [one.clone() for one in learner._network.parameters()]
    for answer in answers:
        learner.learn(answer)  # the fifth begins another batch
    assert all(parameter.grad is None for parameter in pipe.model.parameters())
    optimisers = tasks.Optimisers(network, "muon", tasks._ONLINE_RATE)
    generator, losses = torch.Generator().manual_seed(0), []
    for answer in answers[:4]:
        generated = torch.arange(len(answer.tokens)) >= answer.prompt
        states, shown = answer.features["last"].clone(), answer.shown
        batch = collate([ConversationFeatures(answer.tokens, states, shown, answer.visual, generated)], pipe.target)
        losses.append(learner._objective(network, LossInput(pipe.target, batch, learner._draft_ids, generator)).total)
    parameters = list(network.parameters())
    gradients = torch.autograd.grad(torch.stack(losses).mean(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimisers.step(1.0)
    moved = 0.0
    for expected, found, old in zip(parameters, learner._network.parameters(), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # Muon computes in bfloat16
        moved = max(moved, float((found - old).detach().abs().max()))
    assert moved > 5e-4


def ended(pipe, length, count=REQUESTS):
    """Learn other weights, and let requests of an acceptance length end."""
    head = pipe.adaptation.heads[0]
    with torch.no_grad():
        for parameter in head._learner._network.parameters():
            parameter += 0.01
    tokens = round(100 * length)
    head.drafter.ended += [Recording([], 0, None, tokens=tokens + 3 * number, steps=100) for number in range(count)]
    pipe.adaptation.finish()


def weights(pipe):
    return [one.clone() for one in pipe.adaptation.heads[0]._current.parameters()]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def learned(pipe):
    return [one.detach().clone() for one in pipe.adaptation.heads[0]._learner._network.parameters()]


def test_weights_return_when_acceptance_falls_and_only_proven_ones_are_kept(tmp_path):
    """Learning goes on from those that have returned; later weights are compared with the weights in force."""
    pipe = adapting(folder=tmp_path)
    head, first = pipe.adaptation.heads[0], weights(pipe)
    ended(pipe, 2.0)
    assert not same(first, weights(pipe))
    assert not list(tmp_path.glob("*/*"))  # not proven yet
    ended(pipe, 1.5)
    assert (head.replacements, head.rollbacks) == (1, 1)
    assert same(weights(pipe), first)
    assert same(learned(pipe), first)
    assert same(list(head.drafter.fresh.network.parameters()), first)
    ended(pipe, 2.0)
    assert head.replacements == 2
    for found, old in zip(weights(pipe), first, strict=True):
        torch.testing.assert_close(found, old + 0.01)
    ended(pipe, 1.5)  # the second fall: back to the weights in force before, which are the first ones again
    assert head.rollbacks == 2
    assert same(weights(pipe), first)
    assert same(learned(pipe), first)
    assert not list(tmp_path.glob("*/*"))
    ended(pipe, 1.8)  # still lower than before the fall
    assert head.rollbacks == 3
    assert same(weights(pipe), first)
    for length in (2.0, 2.1, 2.09):  # lower by less than the standard error
        before = weights(pipe)
        ended(pipe, length)
    (kept,) = tmp_path.glob("medusa/*")
    assert kept.name == "00000001"
    assert same(weights(adapting(folder=tmp_path)), before)
    ended(pipe, 2.06)  # lower by more: back by one replacement
    assert head.rollbacks == 4
    assert same(weights(pipe), before)
    ended(pipe, 2.1, 9)  # up to 2.34 in the last requests, with which the next ones are compared
    ended(pipe, 2.2)
    assert head.rollbacks == 5


@pytest.mark.parametrize("place", [1, 2, 3, 5])
def test_an_answer_that_stops_inside_a_path_is_recorded_up_to_the_stop(place):
    """Tokens, states and acceptance: what was accepted after the stop was never said."""
    model, inputs = shared_model("llama"), text_inputs(length=9)
    plain = pipeline("llama", None)
    said = tokens(plain, inputs, length=12)[0]
    end = next(token for token in said[place:] if token not in said[:place])
    length = said.index(end) + 1

    class Right(type(tiny_drafter("medusa", model))):
        """Drafts the answer."""

        def propose(self, token, plan):
            at = 1 + max(n for n in range(len(said)) if said[n] == int(token[0]) and n <= self.said)
            chain = said[at : at + 4]
            self.said = at + len(chain)
            return build_tree(token, [(chain, list(range(len(chain))))])

    drafter = tiny_drafter("medusa", model)
    drafter.__class__, drafter.said = Right, 0
    pipe = pipeline("llama", drafter, AdaptOptions(None))
    found = pipe.adaptation.heads[0].drafter
    pipe.engine.idle.clear()
    (row,) = answered(pipe, prompt_of(inputs), defaults.sampler(SamplingParams()), Stopper(12, eos_token_ids=[end]), 8)
    pipe.engine.drain()
    (one,) = found.ended
    assert row.token_ids == said[:length]
    text = inputs["input_ids"][0].tolist() + said[:length]
    assert one.answer.tokens.tolist() == text[: len(one.answer.tokens)]
    assert len(one.answer.tokens) == len(one.answer.features["last"]) >= len(text) - 1
    assert (one.tokens, one.steps) == (sum(row.stats.accept_lengths), row.stats.num_spec_steps)


def test_a_table_is_kept_on_disk_and_learns_on(tmp_path):
    options = AdaptOptions(tmp_path)
    pipe = pipeline("llama", Union([Recycle(), Ngram()]), options)
    tokens(pipe, text_inputs(length=6, seed=2))
    pipe.engine.drain()
    pipe.adaptation.close()
    pipe.adaptation.close()
    (folder,) = tmp_path.glob("recycle/*")
    drafter = Recycle()
    again = pipeline("llama", drafter, options)
    before = pipe.drafter.members[0]._table
    assert drafter._table.keys() == before.keys() != set()
    tokens(again, text_inputs(length=6, seed=3))
    again.engine.drain()
    again.adaptation.close()
    (newer,) = tmp_path.glob("recycle/*")
    assert newer.name > folder.name
    assert len(Recycle.from_checkpoint(newer)._table) > len(before)


def test_a_table_beside_a_head_is_written_once_its_time_has_passed(tmp_path, monkeypatch):
    monkeypatch.setattr(adaptation, "_SECONDS", 0.0)
    drafters = [Recycle(), tiny_drafter("medusa", shared_model("llama"))]
    pipe = pipeline("llama", Union(drafters), AdaptOptions(tmp_path))
    pipe.engine.idle.clear()
    tokens(pipe, text_inputs(length=6, seed=2))
    pipe.engine.drain()
    for _ in range(9):
        pipe.adaptation.turn()
    assert not pipe.adaptation.pending
    assert pipe.adaptation.heads[0].answers == 1
    assert len(list(tmp_path.glob("recycle/*"))) == 1


def test_a_copy_of_a_pipeline_drafts_alike_and_does_not_adapt():
    pipe = adapting()
    copied = copy.deepcopy(pipe)
    assert copied.adaptation is None
    assert type(copied.drafter).__name__ == "Medusa"
    inputs = text_inputs(length=5, seed=1)
    assert tokens(copied, inputs) == tokens(pipe, inputs)
    pipe.engine.drain()


def test_what_cannot_adapt_is_refused(tmp_path, monkeypatch):
    model = shared_model("llama")
    target, used = target_class(model.config)(model), tiny_drafter("medusa", model)
    pipeline("llama", used)
    other = tiny_drafter("medusa", model, heads=2)
    other.attach(target)
    other.save(tmp_path / "shape" / "medusa" / "00000000", target)
    (tmp_path / "name" / "medusa" / "00000000").mkdir(parents=True)
    (tmp_path / "name" / "medusa" / "00000000" / "config.json").write_text("{}")
    for drafter, options, message in (
        (None, AdaptOptions(), "adapt needs recycle, .* got none$"),
        (Ngram(), AdaptOptions(), "adapt needs recycle, .* got ngram$"),
        (used, AdaptOptions(), "adapt needs a drafter that no pipeline has used: got medusa"),
        (Recycle(), AdaptOptions(tmp_path, 31), "space must be at least 32 MiB for these drafters: got 31"),
        (tiny_drafter("medusa", model), AdaptOptions(tmp_path / "shape"), "weights of the drafter's shape, received"),
        (tiny_drafter("medusa", model), AdaptOptions(tmp_path / "name"), "expected weights of medusa, received None"),
    ):
        with pytest.raises(UserError, match=message):
            Adaptation(drafter, target, options)
    monkeypatch.setattr(model, "_tp_size", 2)
    with pytest.raises(UserError, match="adapt learns in one process: got a target that is sharded over ranks"):
        Adaptation(Recycle(), target, AdaptOptions())


def test_options_from_the_argument_of_load(tmp_path):
    assert (AdaptOptions.of(False), AdaptOptions.of(True)) == (None, AdaptOptions())
    assert AdaptOptions.of(str(tmp_path)) == AdaptOptions(tmp_path)
    with pytest.raises(UserError, match="adapt must be True, False, a folder or AdaptOptions: got int"):
        AdaptOptions.of(3)


def test_states_to_learn_from_are_bounded(monkeypatch):
    pipe = adapting()
    head = pipe.adaptation.heads[0]
    for seed in range(4):
        tokens(pipe, text_inputs(length=6, seed=seed))
    finish(pipe)
    assert len(head._buffer) >= 4
    monkeypatch.setattr(adaptation, "_BUFFER", 1)
    tokens(pipe, text_inputs(length=6, seed=5))
    finish(pipe)
    assert len(head._buffer) == 1


def test_weights_are_replaced_after_all_answers_are_learned():
    pipe = adapting()
    head = pipe.adaptation.heads[0]
    pipe.engine.idle.clear()
    for seed in range(REQUESTS):
        tokens(pipe, text_inputs(length=6, seed=seed))
    pipe.engine.drain()
    while head.pending:
        assert head.replacements == 0
        head.turn()
    assert head.replacements == 1


def test_a_generation_replaces_the_one_before_or_leaves_it(tmp_path):
    store = Store(tmp_path / "a" / "store")
    assert store.newest() is None
    store.write(lambda folder: (folder / "x").write_text("first") and None)
    first = store.newest()

    def fail(folder):
        (folder / "x").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(fail)
    assert (store.newest(), (first / "x").read_text()) == (first, "first")
    store.write(lambda folder: (folder / "x").write_text("second") and None)
    (newest,) = store.folder.iterdir()
    assert newest == store.newest() != first
    assert (newest / "x").read_text() == "second"
