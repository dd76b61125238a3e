"""Every registered drafter: copies, chains, checkpoints, declarations, and the drafts of a row of a batch.

That no draft changes the output is tested by ``tests/mmspec/engine/test_matrix.py``.
"""

import copy
import pickle
import random
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

import pytest
import torch

import mmspec
from mmspec import Pipeline, TokenTree, UserError, accept_path, plugins
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.drafters.growth import LookUps
from mmspec.drafters.ngram import Ngram, Trust
from mmspec.drafters.recycle import DeviceTable, Recycle
from mmspec.drafters.registry import drafter_specs, make_drafter, registered_name
from mmspec.drafters.union import PerSequence
from tests import matrix
from tests.mmspec.drafters.test_drafters import OPTIONS, target_of
from tests.targets import prefilled, prompt_of
from tests.tiny import root_path, shared_model, valid_nodes
from tests.tiny.drafters import VARIANTS, tiny_drafter
from tests.tiny.models import vision_inputs

VOCAB = 101

every_drafter = pytest.mark.parametrize("kind", matrix.DRAFTERS[1:])


def answer(model, drafter):
    """Tokens of three prompts, which must be those of plain decoding."""
    inputs = vision_inputs("llava", 3)
    assert torch.equal(mmspec.generate(model, drafter=drafter, nodes=12, **OPTIONS, **inputs), plain(model))


@cache
def plain(model):
    return model.generate(**vision_inputs("llava", 3), **OPTIONS)


@every_drafter
def test_copies_of_a_drafter_in_use_draft_the_same(kind):
    model = shared_model("llava")
    pipe = Pipeline(target_of(model), None, tiny_drafter(kind, model))
    target, drafter = pipe.target, pipe.drafter
    answer(model, drafter)
    for copied in (drafter.fork(target), drafter.fork(target).fork(target.fork())):
        assert copied is not drafter
        answer(model, copied)
    answer(model, pickle.loads(pickle.dumps(pipe)).drafter)


@pytest.mark.parametrize("by", ["drafter", "plan"])
@pytest.mark.parametrize("kind", [*[spec.name for spec in drafter_specs() if spec.chains], *VARIANTS])
def test_chains(kind, by):
    model = shared_model("llava")
    drafter = tiny_drafter(kind, model)
    trees, propose = [], drafter.propose
    if by == "drafter":
        drafter.draft_chains(3)

    def recorded(token, plan):
        trees.append(propose(token, replace(plan, chain=by == "plan")))
        return trees[-1]

    drafter.propose = recorded
    answer(model, drafter)
    assert any(tree.nodes > 1 for tree in trees)
    for tree in trees:
        for row in range(len(tree.tokens)):
            parents = [int(tree.parents[row, node]) for node in valid_nodes(tree, row)]
            assert parents == list(range(-1, len(parents) - 1))


@pytest.mark.parametrize("kind", [spec.name for spec in drafter_specs() if spec.weights in ("optional", "required")])
def test_a_checkpoint_drafts_the_same_and_refuses_other_targets(kind, tmp_path):
    model = shared_model("llava")
    target, drafter = target_of(model), tiny_drafter(kind, model, 40)
    answer(model, drafter)
    folder = tmp_path / f"drafter-{kind}"
    drafter.save(folder, target)
    for spec in (str(folder), f"{kind}:{folder}", kind):
        again = make_drafter(spec, str(tmp_path))
        assert registered_name(again) == kind
        again.save(tmp_path / "again", target)
        for file in ("config.json", "model.safetensors"):
            assert kind == "recycle" or (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()
    answer(model, again)
    with pytest.raises(UserError, match="the drafter was trained for") as caught:
        make_drafter(str(folder)).attach(target_of("qwen3"))
    assert len(str(caught.value).splitlines()) == 1


def test_declarations_and_classes_agree():
    for spec in drafter_specs():
        assert plugins.find("drafters", spec.name) is spec, "the plug-in has the name of the declaration"
        assert spec.summary == spec.summary.strip(". ")
        assert registered_name(tiny_drafter(spec.name, shared_model("llama"))) == spec.name
        assert hasattr(spec.load(), "from_checkpoint") == (spec.weights != "none")
        if spec.weights in ("required", "published", "target"):
            with pytest.raises(UserError, match=f"^{spec.name} needs a checkpoint: expected {spec.name}:FOLDER"):
                make_drafter(spec.name)
        assert not spec.train or spec.train.split()[0] in plugins.names("train")


@dataclass
class Drafted:
    """A sequence, and what was drafted for it."""

    number: int
    prompt: Prompt
    history: list[int] = field(default_factory=list)
    trees: list[dict[tuple[int, ...], float] | None] = field(default_factory=list)  # None: a step without drafts


class Batch:
    def __init__(self, model, kind):
        self.target = target_of(model)
        self.drafter = make(kind, model)
        self.drafter.attach(self.target)
        self.reads = tuple(self.drafter.features) if self.drafter else ()
        self.rows: list[Drafted] = []

    def join(self, new):
        prompt = new[0].prompt if len(new) == 1 else Prompt.stack([one.prompt for one in new])
        output = prefilled(self.target, prompt, 200, self.reads)
        for one, history in zip(new, prompt.unpadded(), strict=True):
            one.history += [*history, one.number]
        self.drafter.begin(prompt, output, [one.history for one in new])
        self.rows += new

    def leave(self, kept):
        self.target.keep(kept)
        self.drafter.select(kept)
        self.rows = [self.rows[row] for row in kept]

    def step(self, draft):
        """Any node may be accepted, and any token follow it: as the sequence and its step say."""
        token = torch.tensor([row.history[-1] for row in self.rows])
        tree = self.drafter.propose(token, StepPlan(12, 4)) if draft else TokenTree.root(token)
        output = self.target.verify(tree, self.reads)
        choices = torch.full_like(tree.tokens, -1)
        for number, row in enumerate(self.rows):
            rnd = random.Random(f"{row.number}, {len(row.trees)}")
            nodes = [0, *(n for n in valid_nodes(tree, number)[1:] if float(tree.log_probs[number, n]) > -torch.inf)]
            path = root_path(tree, number, rnd.choice(nodes))
            for parent, child in pairwise(path):
                choices[number, parent] = tree.tokens[number, child]
            children = tree.tokens[number, tree.parents[number] == path[-1]].tolist()
            choices[number, path[-1]] = rnd.choice([t for t in range(3, 19) if t not in children])
            probs = {path_of(tree, number, node): float(tree.log_probs[number, node]) for node in nodes[1:]}
            row.trees.append(probs if draft else None)
        verdict = accept_path(tree, choices)
        self.target.commit(verdict)
        for row, (_, tokens) in zip(self.rows, verdict.host, strict=True):
            row.history += tokens
        self.drafter.observe(tree, verdict, output)


def path_of(tree, row, node):
    return tuple(tree.tokens[row, root_path(tree, row, node)[1:]].tolist())


def prompts():
    """Of different lengths; with no, one or two images."""
    for number in range(6):
        inputs = vision_inputs("llava", 1, images=number % 3, seed=number)
        yield Drafted(3 + number, prompt_of({key: value for key, value in inputs.items() if value.numel()}))


def make(kind, model):
    """A drafter whose proposals depend on the row alone, not on earlier requests; see ``_frozen``."""
    # Without the norm, states grow with the layer, and rounding with them.
    changes = {"input_norm": True} if kind in ("eagle", "msd") else {}
    drafter = tiny_drafter(kind.removesuffix(", per sequence"), model, **changes)
    for member in drafter.members:
        if isinstance(member, Recycle):
            member._table = {
                **{(-1, t): {(7 * t + k * k) % 90: 0.6**k * (1 - t / 101) for k in range(1, 4)} for t in range(90)},
                **{(t, u): {(t + u) % 90: 0.7, (t * u) % 89: 0.2} for t in range(90) for u in range(0, 90, 3)},
            }
            member._vocab = VOCAB
        if isinstance(member, Ngram):
            member.memory = 0
    return PerSequence(drafter) if kind.endswith("per sequence") else drafter


@pytest.fixture
def _frozen(monkeypatch):
    for table in (Recycle, DeviceTable):
        monkeypatch.setattr(table, "_learn", lambda *_: None)
    monkeypatch.setattr(Trust, "add", lambda *_: None)
    monkeypatch.setattr(LookUps, "observe", lambda self, *step: [part.observe(*step) for part in self.parts])


def in_some_mode():
    """Some drafters in one mode; all in all modes in the long tests."""
    some = ("recycle", "eagle3", "small", "dflash", "msd", "medusa", "suffix", "mtp", "recycle, per sequence")
    for kind in [*matrix.DRAFTERS[1:], "recycle, per sequence"]:
        for number, mode in enumerate(matrix.MODES):
            marks = () if kind in some and number == some.index(kind) % 3 else pytest.mark.long
            yield pytest.param(kind, mode, id=f"{kind}-{mode}", marks=marks)


@pytest.mark.usefixtures("_frozen")
@pytest.mark.parametrize(("kind", "mode"), list(in_some_mode()))
def test_a_sequence_is_drafted_as_if_it_were_alone(kind, mode, monkeypatch):
    """Rows join singly or together, leave in any order and change places; some steps are not drafted. Alone, they are
    drafted with varying shapes and without captures."""
    model, rnd = copy.deepcopy(shared_model("llava")).double(), random.Random(0)  # so that rounding decides nothing
    batch, waiting, seen = Batch(model, kind), list(prompts()), []
    with monkeypatch.context() as patch:
        matrix.enter(mode, patch)
        while waiting or batch.rows:
            action = rnd.choice(["join", "leave", "step", "step", "step", "plain"])
            if action == "join" and waiting:
                alike = [one for one in waiting if one.prompt.inputs.keys() == waiting[0].prompt.inputs.keys()]
                together = alike[: rnd.randint(1, 3)]
                waiting = [one for one in waiting if one not in together]
                batch.join(together)
                seen += together
            elif action == "leave" and batch.rows and (len(batch.rows) > 2 or not waiting):
                rows = len(batch.rows)
                batch.leave(rnd.sample(range(rows), max(0, rows - rnd.randint(0, 2))))
            elif batch.rows:
                batch.step(action != "plain")
    if "recycle" in kind:  # which drafts from a table of other limits where shapes are static
        matrix.enter(mode, monkeypatch)
    alone, compared = Batch(model, kind), 0
    for row in seen:
        again = Drafted(row.number, row.prompt)
        alone.join([again])
        for tree in row.trees:
            alone.step(tree is not None)
        alone.leave([])
        assert again.history == row.history
        for mine, expected in zip(row.trees, again.trees, strict=True):
            if expected is not None:
                assert mine == pytest.approx(expected, abs=1e-3)
                compared += len(expected)
    assert compared > 50
