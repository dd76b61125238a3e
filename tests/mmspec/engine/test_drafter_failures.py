"""A drafter that fails in a call of its protocol rests; running requests get the target's tokens without it."""

import copy
import sys
import warnings
from io import StringIO

import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

import mmspec
from mmspec import TokenTree
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
from mmspec.pipeline import Piece
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
SOME_LONG = [pytest.param(kind, marks=pytest.mark.long if kind in VARIANTS else ()) for kind in matrix.DRAFTERS[1:]]


class Failing(Wrapper):
    """Raises in the n-th call of a method, counted from 1, after the drafter has done its part."""

    def __init__(self, drafter, method, call=1, error=RuntimeError):
        self.drafter, self.method, self.left, self.error = drafter, method, call, error


def _failing(name):
    def call(self, *arguments):
        result = getattr(self.drafter, name)(*arguments)
        if name == self.method and (name != "select" or arguments[0]):
            self.left -= 1
            if self.left == 0:
                raise self.error("the drafter's own\nmore lines")
        return result

    return call


for method in (*METHODS, "continuations"):
    setattr(Failing, method, _failing(method))


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


def on_table(drafter, rows=ROWS[:1], lengths=(9,)):
    engine = SteppedEngine(TableTarget(table_model(VOCAB)), drafter, StepPlan(6, 4))
    ended = decoded(engine, [prompt_of([row]) for row in rows], lengths)
    if not any(row.error for row in ended):
        expected = [said_plainly(engine.target.table, *asked) for asked in zip(rows, lengths, strict=True)]
        assert [row.token_ids for row in ended] == expected
    return engine, ended


@pytest.mark.parametrize("kind", SOME_LONG)
def test_every_drafter_may_fail_at_every_point(kind):
    requests = [matrix.asked("llava", "greedy", number) for number in (3, 4, 5)]
    prompts, lengths = [one.prompt for one in requests], (12, 5, 15)
    plain = [one.tokens[:length] for one, length in zip(requests, lengths, strict=True)]
    target = matrix.new_target("llava")
    drafter = matrix.drafter_of(kind, target.model)
    for method in METHODS:
        failing = Failing(drafter, method, 1 if method == "select" else 2)
        engine = SteppedEngine(target, failing, StepPlan(6, 3))
        assert [row.token_ids for row in decoded(engine, prompts, lengths)] == plain, method
        assert failing.left <= 0, method
        # The next request is drafted for again.
        (row,) = decoded(engine, prompts[:1], [12])
        assert (row.token_ids[:12], row.stats.drafter_error) == (plain[0], "")
        assert row.stats.num_draft_tokens > 0 or kind in ("ngram", "suffix", "datastore"), method


def _tree(tokens, parents, rows=1, **more):
    return TokenTree(torch.tensor([tokens] * rows), torch.tensor([parents] * rows), check=False, **more)


LOG_PROBS = ([0.0] * 5, [0.0, torch.inf], [0.0, torch.nan])
TREES = {
    "nothing": (lambda rows: None, "expected a TokenTree, received NoneType"),
    "another type": (lambda rows: [1, 2], "expected a TokenTree, received list"),
    "rows too many": (lambda rows: _tree([1, 2], [-1, 0], 2 * rows), "of torch.int64 on cpu"),
    "floats": (lambda rows: _tree([1.0, 2.0], [-1, 0], rows), "of torch.float32 on cpu"),
    "parents of another shape": (lambda rows: _tree([1, 2], [-1, 0, 1], rows), ""),
    "a parent after its child": (lambda rows: _tree([1, 2, 3], [-1, 2, 0], rows), ""),
    "a parent far away": (lambda rows: _tree([1, 2, 3], [-1, 0, 99], rows), ""),
    "a distribution of another shape": (lambda rows: _tree([1, 2], [-1, 0], rows, draft_probs=torch.ones(rows, 7)), ""),
    **{
        f"log probabilities {one}": (
            lambda rows, one=one: _tree([1, 2], [-1, 0], rows, log_probs=torch.tensor([one] * rows)),
            "",
        )
        for one in LOG_PROBS
    },
}


@pytest.mark.parametrize(("make", "received"), TREES.values(), ids=TREES)
def test_malformed_trees_are_not_verified(make, received):
    class Wrong(Ngram):
        def propose(self, token, plan):
            return make(len(token))

    for row in on_table(Wrong(), ROWS, (9, 9, 9))[1]:
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
            return build_tree((token + 1) % VOCAB, [([1, 2], [0, 0]) if token[0] % 2 else ([], [])] * len(token))

    on_table(Rooted(), ROWS, (9, 9, 9))


def test_of_a_union_only_the_member_that_fails_rests():
    steady = Recycle(top_k=3)
    _, (row,) = on_table(Union([Failing(Ngram(), "propose", 2), steady]), lengths=[40])
    assert row.stats.drafter_error == "Ngram: RuntimeError: the drafter's own"
    assert row.stats.num_accepted_draft_tokens > 5


def test_of_copies_per_sequence_only_the_one_that_fails_rests():
    table = table_model(VOCAB)
    said = [said_plainly(table, row, 16) for row in ROWS]
    # A token that is early in some rows, and not in another.
    token = next(t for t in range(VOCAB) if any(t in row[1:3] for row in said) and any(t not in row for row in said))

    class Fails(Recycle):
        def observe(self, tree, verdict, output):
            super().observe(tree, verdict, output)
            if any(token in tokens for _, tokens in verdict.host):
                raise ValueError(token)

    _, ended = on_table(PerSequence(Fails(top_k=3)), ROWS, (16, 16, 16))
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
    engine, _ = on_table(drafter)
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
        _, (row,) = on_table(make(Failing(Ngram(), "propose", 1, kind)))
        assert isinstance(row.error, error) if ends else row.error is None


def test_warnings_follow_the_streamed_text(monkeypatch):
    terminal = StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)

    def pieces(error=None):
        yield Piece("one ", [1], parts=[("", "one ")])
        print("rests", file=sys.stderr)
        if error is not None:
            raise error
        yield Piece("two", [2], "stop", Stats(), parts=[("", "two")])

    session.Answer().read(Console(file=StringIO()), pieces())
    with pytest.raises(KeyError):
        session.Answer().read(Console(file=StringIO()), pieces(KeyError()))
    assert terminal.getvalue() == "one two\nrests\none \nrests\n"


def test_on_a_sharded_target_a_failure_ends_requests():
    """Other ranks, whose drafter has not failed, would verify other trees."""
    model = byte_model()
    with alone(model):
        pipe = mmspec.Pipeline(TransformersTarget(model), Processor(byte_tokenizer()), Failing(Ngram(), "propose"))
        pipe.follow()
        with pytest.raises(RankError, match="all ranks must draft the same: Ngram: RuntimeError: the drafter's own"):
            pipe.generate("abab", max_new_tokens=6, num_draft_tokens=4)
        pipe.engine.close()


def test_continuations_may_fail():
    class Shapeless(Ngram):
        def continuations(self, row, path):
            return [7, 8]

    options = {"regex": "(abcabc){2}[0-9x]{6}", "max_new_tokens": 30, "num_draft_tokens": 8}
    answers = [
        mmspec.load(byte_model(), drafter, processor=byte_tokenizer()).generate("abcabc", **options)
        for drafter in (None, Failing(Ngram(), "continuations"), Shapeless())
    ]
    assert [answer.token_ids for answer in answers] == [answers[0].token_ids] * 3
    assert [bool(answer.stats.drafter_error) for answer in answers] == [False, True, True]


def test_a_draft_model_with_a_shorter_context():
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    target, draft = (GPT2LMHeadModel(GPT2Config(n_positions=n, **sizes)).eval() for n in (128, 20))
    options = {**text_inputs(length=9), "max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    expected = target.generate(**options, pad_token_id=0)
    found = mmspec.generate(target, drafter=Small(draft), nodes=4, return_dict_in_generate=True, **options)
    assert torch.equal(found.sequences, expected)
    assert found.stats[0].drafter_error.startswith("Small: IndexError")


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
