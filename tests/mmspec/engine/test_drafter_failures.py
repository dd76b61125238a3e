"""A drafter that fails in a call of its protocol rests; running requests get the target's tokens without it."""

import copy
import logging
import sys
import warnings
from io import StringIO

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import mmspec
from mmspec import TokenTree, plugins
from mmspec.cli import session
from mmspec.core.drafter import Guard, Wrapper
from mmspec.core.plan import StepPlan
from mmspec.core.tree import build_tree
from mmspec.core.verify import accept_path
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.registry import make_drafter
from mmspec.drafters.small import Small
from mmspec.drafters.union import PerSequence, Union
from mmspec.engine.distributed import RankError
from mmspec.engine.stats import Stats
from mmspec.engine.stopping import Stopper
from mmspec.errors import SlowWarning
from mmspec.ops import kernels
from mmspec.pipeline import Generation, Piece
from mmspec.sampling.sampler import Sampler
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests import matrix
from tests.decoding import SteppedEngine
from tests.device import waiting
from tests.mmspec.engine.test_engine import VOCAB, TableTarget, prompt_of, said_plainly
from tests.ranks import alone
from tests.tiny import byte_model, byte_tokenizer, shared_model, table_model
from tests.tiny.drafters import VARIANTS, tiny_drafter
from tests.tiny.models import text_inputs

pytestmark = pytest.mark.drafter_fails
METHODS = ("begin", "propose", "observe", "select")
ROWS = [[1, 2, 1, 2, 1], [4, 5, 4, 5, 4], [6, 6, 6, 6, 6]]


class Failing(Wrapper):
    """Raises in the n-th call of a method, counted from 1, after the drafter has done its part."""

    def __init__(self, drafter, method, call=1, error=RuntimeError):
        self.drafter, self.method, self.left, self.error = drafter, method, call, error

    def _called(self, method, result=None):
        if method == self.method:
            self.left -= 1
            if self.left == 0:
                raise self.error("the drafter's own\nmore lines")
        return result

    def begin(self, prompt, output, history):
        return self._called("begin", super().begin(prompt, output, history))

    def propose(self, token, plan):
        return self._called("propose", super().propose(token, plan))

    def observe(self, tree, verdict, output):
        return self._called("observe", super().observe(tree, verdict, output))

    def select(self, rows):
        return self._called("select", super().select(rows)) if rows or self.method != "select" else super().select(rows)

    def continuations(self, row, path):
        return self._called("continuations", super().continuations(row, path))


def decoded(engine, prompts, lengths):
    """Sequences of prompts of which the last joins two steps after the others."""
    rows = []
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if number and number == len(prompts) - 1:
            for _ in range(2):
                engine._has_work()
                engine._turn()
        rows += engine.add(prompt, Sampler(), Stopper(length))
    engine.wait(lambda: all(row.done for row in rows))
    engine._has_work()  # the drafter is free
    return rows


def on_table(drafter, rows, lengths, seed=0):
    engine = SteppedEngine(TableTarget(table_model(VOCAB, seed)), drafter, StepPlan(6, 4))
    return engine, decoded(engine, [prompt_of([row]) for row in rows], lengths)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_output_goes_on_without_a_failed_drafter(method, call, batch, caplog):
    """Rows that end one after another, so that ``select`` is called, and one that joins."""
    rows, lengths = ROWS[:batch], (20, 6, 25)[:batch]
    drafter = Failing(Recycle(top_k=3), method, call)
    with caplog.at_level(logging.WARNING, "mmspec.drafting"):
        engine, ended = on_table(drafter, rows, lengths)
    for row, prompt, length in zip(ended, rows, lengths, strict=True):
        assert (row.error, row.finish_reason) == (None, "length")
        assert row.token_ids == said_plainly(engine.target.table, prompt, length)
    failed = drafter.left <= 0
    assert failed or batch == 1  # of one row, others are not selected, and no second row begins
    (record,) = caplog.records if failed else [None]
    assert record is None or record.getMessage().endswith("Recycle: RuntimeError: the drafter's own")
    longest = max(ended, key=lambda row: len(row.token_ids))
    assert longest.stats.drafter_error == ("Recycle: RuntimeError: the drafter's own" if failed else "")
    if failed:  # and is tried again
        (row,) = decoded(engine, [prompt_of(rows[:1])], [12])
        assert row.stats.drafter_error == ""
        assert row.stats.num_draft_tokens > 0


SOME_LONG = [pytest.param(kind, marks=pytest.mark.long if kind in VARIANTS else ()) for kind in matrix.DRAFTERS[1:]]


@pytest.mark.parametrize("kind", SOME_LONG)
def test_every_drafter_may_fail_at_every_point(kind):
    requests = [matrix.asked("llava", "greedy", number) for number in (3, 4, 5)]
    prompts, lengths = [one.prompt for one in requests], (12, 5, 15)
    plain = [one.tokens[:length] for one, length in zip(requests, lengths, strict=True)]
    target = matrix.new_target("llava")
    drafter = matrix.drafter_of(kind, target.model)
    for method in METHODS:
        failing = Failing(drafter, method, 1 if method == "select" else 2)
        engine = _engine(target, failing)
        assert [row.token_ids for row in decoded(engine, prompts, lengths)] == plain, method
        assert failing.left <= 0, method
        # The next request is drafted for again.
        (row,) = decoded(engine, prompts[:1], [12])
        assert (row.token_ids[:12], row.stats.drafter_error) == (plain[0], "")
        assert row.stats.num_draft_tokens > 0 or kind in ("ngram", "suffix", "datastore"), method


def _engine(target, drafter):
    return SteppedEngine(target, drafter, StepPlan(6, 3))


def _tree(tokens, parents, rows=1, **more):
    return TokenTree(torch.tensor([tokens] * rows), torch.tensor([parents] * rows), check=False, **more)


TREES = {
    "nothing": (lambda token: None, "expected a TokenTree, received NoneType"),
    "another type": (lambda token: [1, 2], "expected a TokenTree, received list"),
    "a row too many": (
        lambda token: build_tree(token.repeat(2), [([1], [0])] * (2 * len(token))),
        "of torch.int64 on cpu",
    ),
    "floats": (lambda token: _tree([1.0, 2.0], [-1, 0], len(token)), "of torch.float32 on cpu"),
    "parents of another shape": (lambda token: _tree([1, 2], [-1, 0, 1], len(token)), ""),
    "a parent after its child": (lambda token: _tree([1, 2, 3], [-1, 2, 0], len(token)), ""),
    "a parent far away": (lambda token: _tree([1, 2, 3], [-1, 0, 99], len(token)), ""),
    **{
        f"log probabilities {values}": (
            lambda token, values=values: _tree(
                [1, 2], [-1, 0], len(token), log_probs=torch.tensor([values] * len(token))
            ),
            "",
        )
        for values in ([0.0] * 5, [0.0, torch.inf], [0.0, torch.nan])
    },
    "a distribution of another shape": (
        lambda token: _tree([1, 2], [-1, 0], len(token), draft_probs=torch.ones(len(token), VOCAB)),
        "",
    ),
}


@pytest.mark.parametrize(("make", "received"), TREES.values(), ids=TREES)
def test_malformed_trees_are_not_verified(make, received):
    class Wrong(Ngram):
        def propose(self, token, plan):
            return make(token)

    engine, ended = on_table(Wrong(), ROWS, (9, 9, 9))
    for row, prompt in zip(ended, ROWS, strict=True):
        assert row.token_ids == said_plainly(engine.target.table, prompt, 9)
        assert row.stats.drafter_error.startswith("Wrong: ")
        assert row.stats.drafter_error.endswith(received)


@pytest.mark.parametrize(("static", "nodes", "read"), [(False, 2, True), (False, 1, False), (True, 2, False)])
def test_values_of_trees_are_not_read_on_a_device(static, nodes, read, monkeypatch):
    """With static shapes, this would be a host sync; the values of a root alone are not needed."""
    monkeypatch.setattr(kernels, "static_shapes", lambda device: static)
    token, tree = torch.tensor([1]), _tree([1, 2][:nodes], [-1, 0][:nodes])

    class Ready(Ngram):
        def propose(self, token, plan):
            return tree

    with waiting() as waits:
        assert Guard(Ready()).propose(token, StepPlan(6, 4)) is tree
    assert bool(waits) == read


def test_another_root_does_not_change_the_output():
    class Rooted(Ngram):
        def propose(self, token, plan):
            return build_tree((token + 1) % VOCAB, [([1, 2], [0, 0])] * len(token))

    engine, ended = on_table(Rooted(), ROWS, (9, 9, 9))
    assert [row.token_ids for row in ended] == [said_plainly(engine.target.table, row, 9) for row in ROWS]


def test_of_a_union_only_the_member_that_fails_rests():
    steady = Recycle(top_k=3)
    engine, (row,) = on_table(Union([Failing(Ngram(), "propose", 2), steady]), ROWS[:1], [40])
    assert row.token_ids == said_plainly(engine.target.table, ROWS[0], 40)
    assert row.stats.drafter_error == "Ngram: RuntimeError: the drafter's own"
    assert row.stats.num_accepted_draft_tokens > 5


def test_of_copies_per_sequence_only_the_one_that_fails_rests():
    table = table_model(VOCAB, 0)
    said = [said_plainly(table, row, 16) for row in ROWS]
    # A token that is early in some rows, and not in another.
    token = next(t for t in range(VOCAB) if any(t in row[1:3] for row in said) and any(t not in row for row in said))

    class Fails(Recycle):
        def observe(self, tree, verdict, output):
            super().observe(tree, verdict, output)
            if any(token in tokens for _, tokens in verdict.host):
                raise ValueError(token)

    _, ended = on_table(PerSequence(Fails(top_k=3)), ROWS, (16, 16, 16))
    assert [row.token_ids for row in ended] == said
    for row, tokens in zip(ended, said, strict=True):
        assert bool(row.stats.drafter_error) == (token in tokens) or token not in tokens[1:3]


@pytest.mark.parametrize("debug", ["", "1"])
def test_the_same_error_is_logged_once(debug, caplog, monkeypatch):
    class Broken(Ngram):
        def begin(self, prompt, output, history):
            raise RuntimeError("always")

    monkeypatch.setenv("MMSPEC_DEBUG", debug)
    engine, _ = on_table(Broken(), ROWS, (9, 9, 9))
    for _ in range(3):
        (row,) = decoded(engine, [prompt_of([[1, 2]])], [5])
        assert row.stats.drafter_error == "Broken: RuntimeError: always"
    assert len(caplog.records) == 1
    assert ("in begin\n    raise RuntimeError" in caplog.text) == bool(debug)


def test_a_drafter_that_cannot_drop_its_rows_rests_for_good():
    class Stuck(Ngram):
        begun = 0

        def begin(self, prompt, output, history):
            self.begun += 1
            raise RuntimeError("in begin")

        def select(self, rows):
            if self.begun:
                raise RuntimeError("in select")

    drafter = Stuck()
    engine, _ = on_table(drafter, ROWS[:1], [5])
    (row,) = decoded(engine, [prompt_of([[1, 2]])], [5])
    assert row.token_ids == said_plainly(engine.target.table, [1, 2], 5)
    assert drafter.begun == 1
    assert row.stats.drafter_error == "Stuck: RuntimeError: in begin"


@pytest.mark.parametrize("strict", ["", "0", "1"])
@pytest.mark.parametrize("make", [lambda drafter: drafter, lambda drafter: Union([drafter, Recycle()])])
def test_errors_of_the_device_end_requests_and_all_do_in_strict_mode(strict, make, monkeypatch):
    """After an error of the device, the target cannot compute either."""
    monkeypatch.setenv("MMSPEC_STRICT", strict)
    for error, said, ends in (
        (torch.AcceleratorError, "an illegal memory access", True),
        (RuntimeError, "CUDA error: launch failed", True),
        (RuntimeError, "the drafter's own", strict == "1"),
    ):
        kind = type("Own", (error,), {"__str__": lambda self, said=said: said})
        _, (row,) = on_table(make(Failing(Ngram(), "propose", 1, kind)), ROWS[:1], [9])
        assert isinstance(row.error, error) if ends else row.error is None


def test_warnings_follow_the_streamed_text(monkeypatch):
    terminal = StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)

    def pieces(error=None):
        yield Piece("one ", [1])
        print("rests", file=sys.stderr)
        if error is not None:
            raise error
        yield Piece("two", [2], "stop", Stats())

    session._collect(pieces(), show=True)
    with pytest.raises(KeyError):
        session._collect(pieces(KeyError()), show=True)
    assert terminal.getvalue() == "one two\nrests\none \nrests\n"


def test_on_a_sharded_target_a_failure_ends_requests():
    """Other ranks, whose drafter has not failed, would verify other trees."""
    model = byte_model()
    with alone(model):
        target = plugins.target_class(model.config)(model)
        pipe = mmspec.Pipeline(target, Processor(byte_tokenizer()), Failing(Ngram(), "propose"))
        pipe.follow()
        with pytest.raises(RankError, match="all ranks must draft the same: Ngram: RuntimeError: the drafter's own"):
            pipe.generate("abab", max_new_tokens=6, num_draft_tokens=4)
        pipe.engine.close()


def test_continuations_may_fail():
    pipe = mmspec.load(byte_model(), drafter=None, processor=byte_tokenizer())
    expected = pipe.generate("abcabc", regex="(abcabc){2}[0-9x]{6}", max_new_tokens=30).token_ids
    for error in (Failing(Ngram(), "continuations"), Shapeless()):
        own = mmspec.load(byte_model(), drafter=error, processor=byte_tokenizer())
        found = own.generate("abcabc", regex="(abcabc){2}[0-9x]{6}", max_new_tokens=30, num_draft_tokens=8)
        assert found.token_ids == expected
        assert found.stats.drafter_error


class Shapeless(Ngram):
    def continuations(self, row, path):
        return [7, 8]


def test_a_draft_model_with_a_shorter_context():
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    target, draft = (GPT2LMHeadModel(GPT2Config(n_positions=n, **sizes)).eval() for n in (128, 20))
    inputs = text_inputs(length=9)
    expected = target.generate(**inputs, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = mmspec.generate(
        target,
        drafter=Small(draft),
        nodes=4,
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        **inputs,
    )
    assert torch.equal(found.sequences, expected)
    assert found.stats[0].drafter_error.startswith("Small: IndexError")


def test_the_line_of_figures_says_that_drafting_stopped():
    _, (row,) = on_table(Failing(Ngram(), "propose"), ROWS[:1], [9])
    line = session._stats_line(Generation("", row.token_ids, "length", row.stats), "ngram", None)
    assert "| drafter ngram (nothing drafted) | drafting stopped (Ngram: RuntimeError: the drafter's own) |" in line
    assert row.stats.to_dict()["drafter_error"] == row.stats.drafter_error


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash", "hydra", "kangaroo", "mamba", "small"])
def test_a_drafter_that_is_almost_never_right_is_reported_once(kind, tmp_path):
    model, options = shared_model("llama"), dict(do_sample=False, eos_token_id=None, max_new_tokens=150, nodes=2)
    if kind == "small":
        made = Small(copy.deepcopy(model))
        made.model.get_output_embeddings().weight.data.normal_(generator=torch.Generator().manual_seed(0))
    else:
        tiny_drafter(kind, model, 20).save(tmp_path, TransformersTarget(model))
        made = make_drafter(str(tmp_path))
    fresh = copy.deepcopy(made)
    match = r"of little use: below 1\.05 tokens per step\. Check .*(tokenizer and|steps \(too few\?\),) chat"
    with pytest.warns(SlowWarning, match=match):
        mmspec.generate(model, drafter=made, **text_inputs(1), **options)
    mmspec.generate(model, drafter=made, **text_inputs(1), **options)  # another warning would be an error
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for length in range(1, 7):  # answers in which other shares of the drafts are right
            mmspec.generate(model, drafter=copy.deepcopy(fresh), **text_inputs(length), **options)
    assert len(found) == 1


def test_rows_without_drafts_do_not_count_against_a_drafter():
    valid = torch.tensor([[True, True], [True, False]])
    tree = TokenTree(torch.tensor([[3, 7], [3, 7]]), torch.tensor([[-1, 0]] * 2), valid=valid)
    guard = Guard(Ngram())
    guard.watch(tree, accept_path(tree, torch.tensor([[7, 9]] * 2)))
    assert guard.drafter.watched == (1, 2.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("drafter", [lambda: Small(shared_model("llama")), Ngram, Recycle])
def test_drafters_that_are_right_or_look_up_are_not_reported(drafter):
    """A warning would be an error."""
    options = dict(do_sample=False, eos_token_id=None, max_new_tokens=150, nodes=1)
    mmspec.generate(shared_model("llama"), drafter=drafter(), **text_inputs(1), **options)
