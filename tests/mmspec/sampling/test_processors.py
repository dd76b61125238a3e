"""Logits processors from outside: tree processors, those that run path by path, and plug-ins for them.

The reference is transformers' ``generate``; for seeds, which it draws otherwise, a plain loop over the whole history.
"""

import warnings
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

import mmspec
from mmspec import SamplingParams, TokenTree, TreeProcessor, UserError, plugins
from mmspec.checking.oracle import Oracle
from mmspec.core.plan import StepPlan
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.small import Small
from mmspec.drafters.union import Union
from mmspec.engine.stopping import Stopper
from mmspec.sampling import defaults
from mmspec.sampling import sampler as sampler_module
from mmspec.sampling.batch_sampler import BatchSampler
from mmspec.sampling.processors import tree_form
from mmspec.sampling.sampler import Sampler, SamplingState
from mmspec.targets.transformers_target import TransformersTarget
from tests.decoding import SteppedEngine
from tests.mmspec.sampling.plain import decode_plainly
from tests.targets import prompt_of
from tests.tiny import byte_model, byte_tokenizer, random_tree, shared_model, valid_nodes
from tests.tiny.models import text_inputs

VOCAB, NEW, ONE = 101, 24, text_inputs(1, 9)
OPEN, CLOSE = range(3, 30), range(30, 60)


class Alternating(LogitsProcessor):
    """Allows another third of the vocabulary at each of its calls; the number of calls is all it looks at."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        tokens = torch.arange(scores.shape[-1])
        return scores.masked_fill((tokens + self.calls) % 3 == 0, -torch.inf)


class Drifting(LogitsProcessor):
    """Adds noise of its own generator, and a moving average of earlier scores."""

    def __init__(self):
        self.random, self.seen = torch.Generator().manual_seed(3), 0.0

    def __call__(self, input_ids, scores):
        self.seen = 0.5 * self.seen + scores.roll(1, -1)
        return self.seen + torch.randn(scores.shape[-1], generator=self.random)


class Grammar:
    """Balanced brackets as a tree processor: its state, a list, changes in place, and its masks are one tensor."""

    def __init__(self):
        self.buffer, self.started, self.advanced, self.undone = torch.empty(VOCAB, dtype=torch.bool), 0, 0, 0

    def start(self, history):
        self.started += 1
        return []

    def advance(self, state, token):
        assert self.mask(state)[token]
        state.append(token)
        self.advanced += 1

    def undo(self, state, n):
        assert 0 < n <= len(state)
        del state[len(state) - n :]
        self.undone += n

    def mask(self, state):
        return self.buffer.copy_(allowed_after(state))


class Plainly(LogitsProcessor):
    """``Grammar`` for ``generate``: recomputes the state from the whole output."""

    def __init__(self, prompt_length):
        self.prompt_length = prompt_length

    def __call__(self, input_ids, scores):
        masks = [allowed_after(row[self.prompt_length :], scores.shape[-1]) for row in input_ids.tolist()]
        return scores.masked_fill(~torch.stack(masks), -torch.inf)


def allowed_after(tokens, vocab=VOCAB):
    depth = sum(token in OPEN for token in tokens) - sum(token in CLOSE for token in tokens)
    mask = torch.ones(vocab, dtype=torch.bool)
    mask[2] = depth == 0  # the end
    if depth == 0:
        mask[CLOSE.start : CLOSE.stop] = False
    if depth == 3:
        mask[OPEN.start : OPEN.stop] = False
    return mask


STATEFUL = {
    "alternating": Alternating,
    "drifting": Drifting,
    "synthid": lambda: hf.SynthIDTextWatermarkLogitsProcessor(3, [5, 7, 11, 13], 2**10, 0, 16, torch.device("cpu")),
    "self-hashed": lambda: hf.WatermarkLogitsProcessor(VOCAB, "cpu", bias=4.0, seeding_scheme="selfhash"),
    "grammar": Grammar,
}
DRAFTERS = {
    "plain": lambda references: None,
    "oracle": lambda references: Oracle(references, vocab=90, spoil=0.2),
    "recycle": lambda references: Recycle(top_k=3),
    "union": lambda references: Union([Small(shared_model("llama"), top_k=2), Ngram()]),
}


def rows_alone(model, inputs, processors):
    """The new tokens of each row of ``generate``, called with that row only."""
    length, said = inputs["input_ids"].shape[1], []
    for row in range(len(inputs["input_ids"])):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        options = {"max_new_tokens": NEW, "do_sample": False, "logits_processor": processors()}
        said.append(model.generate(**alone, **options)[0, length:].tolist())
    return said


def plainly(inputs, processors, new=NEW, seed=None):
    """A plain loop over one row, whose processors are called once per token."""
    return decode_plainly(shared_model("llama"), inputs, processors, new, seed)


@cache
def alone():
    """The answer to ``ONE`` without processors."""
    return plainly(ONE, [])


def engine_of(drafter):
    target = TransformersTarget(shared_model("llama"))
    if drafter is not None:
        drafter.attach(target)
    return SteppedEngine(target, drafter, StepPlan(12 if drafter else 0, 6))


def answered(drafter, sampler, stopper=None, inputs=None):
    """The sequence of a request that was run alone to its end."""
    engine = engine_of(drafter)
    (row,) = engine.add(prompt_of(inputs or ONE), sampler, stopper or Stopper(NEW))
    engine.wait(lambda: row.done)
    return row


def chosen(row):
    """Choices of a sequence at a root, from logits of zeros."""
    return BatchSampler().choose([row], TokenTree.root(torch.tensor([5])), torch.zeros(1, 1, VOCAB))


# ---------------------------------------------------------------------- path by path


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", STATEFUL)
def test_a_processor_with_states_is_called_as_by_generate(name, drafter):
    """All rows of a prompt at once, against ``generate`` with each row alone."""
    model, inputs, made = shared_model("llama"), text_inputs(3, 9), STATEFUL[name]
    plain = rows_alone(model, inputs, list)
    reference = rows_alone(model, inputs, lambda: [Plainly(9) if made is Grammar else made()])
    assert reference != plain
    processor, drafts = made(), DRAFTERS[drafter](reference)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    out = mmspec.generate(model, drafter=drafts, nodes=12, logits_processor=[processor], **inputs, **options)
    answers = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    said = [answer[: one.num_generated_tokens] for answer, one in zip(answers, out.stats, strict=True)]
    assert said == reference
    if drafter == "oracle":
        assert max(one.mean_acceptance_length for one in out.stats) > 1.3
    if made is Grammar:
        assert processor.started == 3
        # Each was undone, but the tokens that were emitted and followed by a step.
        assert 0 < processor.advanced - processor.undone <= sum(map(len, said))
        assert drafter == "plain" or processor.undone > 0


@pytest.mark.parametrize("drafter", ["plain", "recycle", "union"])
def test_sequences_join_rows_with_and_without_processors(drafter):
    """One object serves several sequences that begin at different times; others have none, or a tree processor."""
    shared, grammar, penalty = Alternating(), Grammar(), hf.RepetitionPenaltyLogitsProcessor(1.5)
    engine, expected, rows = engine_of(DRAFTERS[drafter]([])), [], []
    cases = [
        ([shared], [Alternating()]),
        ([], []),
        ([grammar], [Plainly(7)]),
        ([shared], [Alternating()]),
        ([grammar, shared], [Plainly(9), Alternating()]),
        ([penalty, grammar], [penalty, Plainly(10)]),
    ]
    for number, (custom, own) in enumerate(cases):
        inputs = text_inputs(1, 5 + number, seed=number)
        params = SamplingParams(temperature=0.7, seed=number) if number % 2 else SamplingParams()
        expected.append(plainly(inputs, defaults.processors(params, own), NEW - number, params.seed))
        rows += engine.add(prompt_of(inputs), defaults.sampler(params, custom), Stopper(NEW - number))
        for _ in range(2):
            engine.core.step()
    engine.wait(lambda: all(row.done for row in rows))
    assert [row.error for row in rows] == [None] * len(rows)
    assert [row.token_ids for row in rows] == expected
    assert shared.calls == 0
    assert grammar.advanced > grammar.undone


class AtCall(LogitsProcessor):
    """Replaces the scores at its n-th call; writes down its calls."""

    calls: ClassVar[list[int]] = []

    def __init__(self, call, change):
        self.left, self.change = call, change

    def __call__(self, input_ids, scores):
        self.calls.append(len(input_ids))
        self.left -= 1
        return self.change(scores.clone()) if self.left == 0 else scores


def fails(*_):
    raise RuntimeError("no more")


def failing(call):
    return AtCall(call, fails)


def failing_grammar(call):
    """A tree processor whose mask raises for the n-th token."""
    return SimpleNamespace(
        start=lambda history: 1,
        advance=lambda state, token: state + 1,
        undo=lambda state, n: None,
        mask=lambda state: fails() if state == call else torch.ones(VOCAB, dtype=torch.bool),
    )


def test_a_failure_ends_its_own_sequences():
    engine = engine_of(Oracle([alone()] * 4, vocab=90, spoil=0.0))
    samplers = [Sampler(), Sampler([failing(6)]), Sampler([Grammar()]), Sampler([failing_grammar(6)])]
    rows = [engine.add(prompt_of(ONE), sampler, Stopper(NEW))[0] for sampler in samplers]
    engine.wait(lambda: all(row.done for row in rows))
    assert [str(row.error) for row in rows] == ["None", "no more", "None", "no more"]
    assert rows[0].token_ids == alone()
    assert rows[1].token_ids == rows[3].token_ids == alone()[:5]
    assert rows[2].token_ids == plainly(ONE, [Plainly(9)])


EMPTYING = {
    "nan": lambda scores: scores.fill_(torch.nan),
    "-inf": lambda scores: scores.fill_(-torch.inf),
    "one nan": lambda scores: scores.index_fill_(1, torch.tensor([3]), torch.nan),
}


@pytest.mark.parametrize("change", EMPTYING.values(), ids=EMPTYING)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", [None, "oracle"])
def test_a_processor_that_leaves_no_token_ends_its_sequence_by_name(change, temperature, drafter):
    params = SamplingParams(temperature=temperature, seed=1, top_p=0.9)
    said = plainly(ONE, defaults.processors(params, ()), seed=params.seed)
    AtCall.calls.clear()
    drafter = drafter and Oracle([said], vocab=90, spoil=0.0)
    row = answered(drafter, defaults.sampler(params, [AtCall(6, change)]), Stopper(400))
    assert isinstance(row.error, UserError)
    assert str(row.error).endswith("got others from AtCall")
    assert len(row.token_ids) == 5
    assert len(AtCall.calls) == 6  # none after it


def test_processors_that_leave_no_token_together_are_named():
    """transformers' own, which are called for all nodes at once."""
    everything = [hf.SuppressTokensLogitsProcessor(range(50)), hf.SuppressTokensLogitsProcessor(range(50, VOCAB))]
    for drafter in (None, Oracle([[5] * 9], vocab=90)):
        row = answered(drafter, Sampler([hf.MinLengthLogitsProcessor(3, 2), *everything]))
        assert "got others from MinLengthLogitsProcessor, SuppressTokens" in str(row.error)
        assert row.token_ids == []


def test_scores_that_a_later_processor_replaces_are_no_error():
    row = answered(None, Sampler([AtCall(2, EMPTYING["nan"]), hf.InfNanRemoveLogitsProcessor()]), Stopper(5))
    assert row.error is None
    assert len(row.token_ids) == 5


def eager_oracle(references):
    """Drafts as much of the references as it may."""
    oracle = Oracle(references, vocab=90, spoil=0.0)
    oracle._random.randint = lambda low, high: high
    return oracle


@pytest.mark.parametrize("made", [failing, failing_grammar])
@pytest.mark.parametrize("limit", range(4, 8))
def test_a_failure_that_plain_decoding_would_not_come_to_is_none(made, limit):
    """Trees reach beyond the end of an answer, whether by its length or by a token that ends it."""
    last = alone()[limit - 1]
    for stopper, end in ((Stopper(limit), limit), (Stopper(NEW, eos_token_ids=[last]), 1 + alone().index(last))):
        row = answered(eager_oracle([alone(), alone()]), Sampler([made(limit + 1)]), stopper)
        assert (row.error, row.token_ids) == (None, alone()[:end])


def test_a_warning_names_the_processor_once():
    class Unknown(Alternating): ...

    sampler_module._warn_once.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match=r"Unknown runs path by path, which is slow, in a copy per .*: make it a mmspec.TreeProc"
        ) as all_:
            Sampler([Unknown(), hf.TopKLogitsWarper(3), Unknown()])
        assert len(all_) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Sampler([Unknown(), Grammar()])
    finally:
        sampler_module._warn_once.cache_clear()


def test_what_cannot_be_copied():
    processor = Alternating()
    processor.lines = (line for line in ())
    failures = chosen(SamplingState([5], Sampler([processor]))).failures
    assert "must be copyable, once per sequence: Alternating is not (cannot pickle 'generator'" in str(failures[0][0])
    assert isinstance(failures[0][0], UserError)


@pytest.mark.parametrize("first", [True, False])
def test_failures_outlast_another_grammars_success(first, monkeypatch):
    broken, error = Grammar(), ValueError("no mask")
    monkeypatch.setattr(broken, "mask", mock.Mock(side_effect=error))
    row = SamplingState([5], Sampler([broken, Grammar()] if first else [Grammar(), broken]))
    assert chosen(row).failures == [{0: error}]


def test_copies_share_models_and_tokenizers():
    processor = Alternating()
    processor.model, processor.tokenizer = byte_model(), byte_tokenizer()
    copied = mmspec.sampling.processors.copy_for_row(processor, 0)
    assert copied is not processor
    assert copied.model is processor.model
    assert copied.tokenizer is processor.tokenizer


class Warmer(hf.TemperatureLogitsWarper):
    """As its base, which the table knows."""


@pytest.mark.parametrize("seed", range(6))
def test_drawn_trees_path_by_path(seed):
    """The same numbers decide the same path, whether all nodes are processed or only those on it."""
    g = torch.Generator().manual_seed(seed)
    tree = random_tree(g, 3, 14, 4)
    logits = torch.randn(3, 14, VOCAB, generator=g)
    logits[..., :4] += 4.0
    q = logits.roll(1, 0).softmax(-1)
    tree = TokenTree(tree.tokens, tree.parents, tree.valid, q)
    found = []
    for made in (Warmer, hf.TemperatureLogitsWarper):
        sampler = Sampler([made(0.7)], do_sample=True, generator=torch.Generator().manual_seed(seed))
        assert sampler.by_path == (made is Warmer)
        rows = [SamplingState([5, 6], sampler) for _ in range(3)]
        found.append(mmspec.accept_path(tree, BatchSampler().choose(rows, tree, logits).tokens).host)
    assert found[0] == found[1]
    assert max(len(path) for path, _ in found[0]) > 1


# ---------------------------------------------------------------------- tree processors


@pytest.mark.parametrize("drafter", ["plain", "oracle"])
@pytest.mark.parametrize("seed", range(2))
def test_masks_apply_at_their_place_in_the_chain(drafter, seed):
    """Before top-k and behind it, a mask leaves other tokens."""
    prompt, said = text_inputs(1, 9, seed=seed), set()
    for place in range(3):
        around = [hf.TemperatureLogitsWarper(4.0), hf.TopKLogitsWarper(40)]
        reference = plainly(prompt, [*around[:place], Plainly(9), *around[place:]], seed=seed)
        chain = [*around[:place], Grammar(), *around[place:]]
        sampler = Sampler(chain, do_sample=True, generator=torch.Generator().manual_seed(seed))
        row = answered(DRAFTERS[drafter]([reference]), sampler, inputs=prompt)
        assert (row.error, row.token_ids) == (None, reference)
        said.add(tuple(reference))
    assert len(said) > 1


class Visited:
    """Allows tokens by their path; writes down where it has been asked. ``in_place`` tells whether a token changes the
    state itself."""

    def __init__(self, in_place):
        self.in_place, self.asked = in_place, []

    def start(self, history):
        return list(history)

    def advance(self, state, token):
        if not self.in_place(token):
            return [*state, token]
        state.append(token)
        return None

    def undo(self, state, n):
        assert all(map(self.in_place, state[-n:]))
        del state[-n:]

    def mask(self, state):
        self.asked.append(tuple(state))
        return (torch.arange(VOCAB) + sum(state)) % 3 > 0


@pytest.mark.usefixtures("at_every_node")
@pytest.mark.parametrize(
    "in_place",
    [lambda token: False, lambda token: True, lambda token: token % 2 == 0],
    ids=["new states", "in place", "by turns"],
)
@pytest.mark.parametrize("seed", range(8))
def test_every_node_whose_path_is_allowed_is_asked_once(in_place, seed):
    g = torch.Generator().manual_seed(seed)
    tree, histories, processor = random_tree(g, 3, 20, 7), [[3, 4, 5], [9], [11, 2]], Visited(in_place)
    rows = [SamplingState(history, Sampler([processor])) for history in histories]
    batch, expected = BatchSampler(), []
    for step in range(3):
        logits = torch.randn(3, 20, VOCAB, generator=g)
        choices = batch.choose(rows, tree, logits).tokens
        expected = []
        for b, row in enumerate(rows):
            paths = {0: tuple(row.history)}
            for i in valid_nodes(tree, b):
                parent, token = int(tree.parents[b, i]), int(tree.tokens[b, i])
                if i and parent in paths and (token + sum(paths[parent])) % 3 > 0:
                    paths[i] = (*paths[parent], token)
            for i, path in paths.items():
                allowed = (torch.arange(VOCAB) + sum(path)) % 3 > 0
                assert int(choices[b, i]) == int(logits[b, i].masked_fill(~allowed, -torch.inf).argmax())
            expected += paths.values()
        assert sorted(processor.asked) == sorted(expected)
        processor.asked.clear()
        for row, (_, tokens) in zip(rows, mmspec.accept_path(tree, choices).host, strict=True):
            row.history += tokens
        if step == 0:
            tree = random_tree(g, 3, 20, 7)


class Only:
    """Allows some tokens, whatever came before."""

    def __init__(self, mask):
        self.allowed = mask

    def start(self, history):
        return None

    def advance(self, state, token):
        return None

    def undo(self, state, n): ...

    def mask(self, state):
        return self.allowed


def only(*tokens, size=VOCAB):
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(tokens)] = True
    return mask


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(VOCAB), r"^Only.mask must return a bool tensor of at most \(101,\): got torch.float32 \(101,\)$"),
        (torch.ones(1, VOCAB, dtype=torch.bool), r"got torch.bool \(1, 101\)$"),
        (torch.ones(VOCAB + 1, dtype=torch.bool), r"got torch.bool \(102,\)$"),
        ([True] * VOCAB, "got list$"),
        (only(), "^Only.mask must allow at least one token: got none$"),
    ],
)
def test_masks_that_are_none(mask, message):
    with pytest.raises(UserError, match=message):
        raise chosen(SamplingState([5], Sampler([Only(mask)]))).failures[0][0]


def test_tokens_beyond_a_mask_are_forbidden():
    row = answered(Recycle(), Sampler([Only(torch.ones(20, dtype=torch.bool))]))
    assert row.token_ids == plainly(ONE, [hf.SuppressTokensLogitsProcessor(range(20, VOCAB))])
    assert len(set(row.token_ids)) > 3


class EndAt(hf.ForcedEOSTokenLogitsProcessor):
    """As its base, but path by path."""


@pytest.mark.parametrize("drafter", [None, "oracle"])
@pytest.mark.parametrize("forced", [hf.ForcedEOSTokenLogitsProcessor, EndAt])
def test_a_forbidden_token_that_is_forced_is_an_error(forced, drafter):
    """A token forced at the last position ends the answer; an earlier one is a contradiction between processors."""
    contradiction = "Only forbids token 8, the only one allowed by other logits processors"
    for length, error, said in ((13, "None", [7, 7, 7, 8]), (12, contradiction, [7, 7, 8])):
        drafts = drafter and eager_oracle([[7, 7, 8, 8] + [7] * NEW])
        row = answered(drafts, Sampler([Only(only(7)), forced(length, 8)]), Stopper(4))
        assert (str(row.error), row.token_ids) == (error, said)


@pytest.mark.parametrize("where", ["start", "advance", "undo", "mask"])
def test_a_tree_processor_that_fails(where):
    broken = type("Broken", (Grammar,), {where: fails})
    reference = plainly(ONE, [Plainly(9)])
    engine = engine_of(Oracle([reference] * 2, vocab=90, spoil=0.0))
    rows = [engine.add(prompt_of(ONE), Sampler([made()]), Stopper(NEW))[0] for made in (broken, Grammar)]
    engine.wait(lambda: all(row.done for row in rows))
    assert str(rows[0].error) == "no more"
    assert rows[1].token_ids == reference


# ---------------------------------------------------------------------- plug-ins


class Halved(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores if input_ids.shape[1] % 2 == 0 else scores / 2


def grammar_of(processor):
    """A plug-in: brackets as a tree processor."""
    return Grammar() if type(processor) is Plainly else None


def halved(processor):
    """A plug-in that serves all nodes at once."""
    serves = lambda history, scores: scores.where(history.lengths[:, :, None] % 2 == 0, scores / 2)  # noqa: E731
    return serves if type(processor) is Halved else None


def test_plug_ins_serve_processors_that_the_table_does_not_know(monkeypatch):
    found = [EntryPoint(name, f"{__name__}:{name}", "mmspec.processors") for name in ("halved", "grammar_of")]
    registered = plugins.registered
    monkeypatch.setattr(plugins, "registered", lambda group: found if group == "processors" else registered(group))
    monkeypatch.setattr(sampler_module, "_warn_once", lambda name: pytest.fail(f"{name} runs path by path"))
    assert isinstance(tree_form(Plainly(9)), TreeProcessor)
    assert tree_form(Alternating()) is None
    assert not isinstance(tree_form(hf.TopKLogitsWarper(3)), TreeProcessor)
    for made in (lambda: Plainly(9), Halved):
        reference = plainly(ONE, [made()], seed=4)
        sampler = Sampler([made()], do_sample=True, generator=torch.Generator().manual_seed(4))
        assert answered(Oracle([reference], vocab=90), sampler).token_ids == reference


# ---------------------------------------------------------------------- documentation


def test_the_example_of_the_documentation():
    text = (Path(__file__).parents[3] / "docs" / "usage.md").read_text()
    section = text.split("## Custom logits processors\n")[1].split("\n## ")[0]
    code = section.split("```python\n")[1].split("```")[0]
    names = {"pipe": mmspec.load(byte_model(), drafter="recycle", processor=byte_tokenizer())}
    exec(compile(code, "usage.md", "exec"), names)
    assert names["r"].text in ("yes", "no", "not sure")
    assert names["r"].finish_reason == "stop"
    assert isinstance(names["Choice"](()), TreeProcessor)
