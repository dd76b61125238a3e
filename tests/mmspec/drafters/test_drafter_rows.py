"""Drafters of a batch that sequences join and leave: each one's trees are those of the sequence drafted alone."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from mmspec import TokenTree, plugins, verify_greedy
from mmspec.core.budget import Budget
from mmspec.core.drafter import features
from mmspec.core.target import Prompt
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.per_sequence import PerSequence
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.recycled import Recycled
from mmspec.drafters.small import Small
from mmspec.drafters.union import Union
from mmspec.engine.stopping import Stopper
from mmspec.ops import graphs, kernels
from mmspec.sampling.sampler import Sampler
from mmspec.ssm.drafters.mamba import Mamba
from mmspec.vision.drafters.msd import MSD, Flash
from tests.decoding import SteppedEngine
from tests.device import Replayed, as_launches
from tests.drafting import network_for
from tests.targets import prompt_of
from tests.tiny import root_path, shared_model, valid_nodes
from tests.tiny.models import mamba_network, text_inputs, vision_inputs

VOCAB = 101


@pytest.fixture(params=["varying", "static", "captured"])
def shapes(request, monkeypatch):
    if request.param == "captured":
        monkeypatch.setattr(graphs, "captures", lambda device: True)
        monkeypatch.setattr(graphs, "_captured", Replayed)
        as_launches(monkeypatch)
    return request.param


def run_at(shapes, monkeypatch):
    monkeypatch.setattr(kernels, "fixed_shapes", lambda device: shapes != "varying")


# ---------------------------------------------------------------------- trees


@dataclass
class Drafted:
    """A sequence, and what was drafted for it."""

    number: int
    prompt: Prompt
    history: list[int] = field(default_factory=list)
    trees: list[dict[tuple[int, ...], float] | None] = field(default_factory=list)  # None: a step without drafts


class Batch:
    """The sequences of a target and a drafter."""

    def __init__(self, model, make):
        self.target = plugins.target_class(model.config)(model)
        self.drafter = make(model)
        self.drafter.attach(self.target)
        self.target.features = features(self.drafter)
        self.rows: list[Drafted] = []

    def join(self, new):
        prompt = new[0].prompt if len(new) == 1 else Prompt.stack([one.prompt for one in new])
        step = self.target.prefill(prompt, 200)
        for one, history in zip(new, prompt.histories(), strict=True):
            one.history += [*history, one.number]
        self.drafter.begin(prompt, step, [one.history for one in new])
        self.rows += new

    def leave(self, kept):
        """Keep these rows, in this order."""
        self.target.select(kept)
        self.drafter.select(kept)
        self.rows = [self.rows[row] for row in kept]

    def step(self, draft):
        """Any node may be accepted, and any token follow it: as the sequence and its step say."""
        token = torch.tensor([row.history[-1] for row in self.rows])
        tree = self.drafter.propose(token, budget()) if draft else TokenTree.root(token)
        step = self.target.forward_tree(tree)
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
        verdict = verify_greedy(tree, choices)
        self.target.commit(verdict)
        for row, (_, tokens) in zip(self.rows, verdict.host, strict=True):
            row.history += tokens
        self.drafter.observe(tree, verdict, step)


def budget():
    ample = Budget(12, 4)
    ample.remaining = 99
    return ample


def path_of(tree, row, node):
    return tuple(tree.tokens[row, root_path(tree, row, node)[1:]].tolist())


def prompts(name):
    """Of different lengths; with no, one or two images."""
    for number in range(6):
        if "llava" in name:
            inputs = vision_inputs(name, 1, images=number % 3, seed=number)
            inputs = {key: value for key, value in inputs.items() if value.numel()}
        else:
            inputs = text_inputs(1, 3 + 5 * number % 13, seed=number)
        yield Drafted(3 + number, prompt_of(inputs))


def frozen_recycle(model):
    """With a table that stays as it is: see ``_frozen``."""
    drafter = Recycle(top_k=3)
    drafter._table = {(-1, t): {(7 * t + k * k) % 90: 0.6**k * (1 - t / 101) for k in range(1, 4)} for t in range(90)}
    drafter._table |= {(t, u): {(t + u) % 90: 0.7, (t * u) % 89: 0.2} for t in range(90) for u in range(0, 90, 3)}
    drafter._vocab = VOCAB
    return drafter


DRAFTERS = {
    "ngram": lambda model: Ngram(),
    "msd": lambda model: MSD(network_for(model, input_norm=True), top_k=3, depth=4, total_tokens=12),
    "flash": lambda model: Flash(
        network_for(model, latents=3, span=16, slots=2), torch.arange(70), top_k=3, depth=4, total_tokens=12
    ),
    "small": lambda model: Small(shared_model("llama"), top_k=3),
    "mamba": lambda model: Mamba(mamba_network(), torch.arange(70), top_k=3, depth=4, total_tokens=12),
    "recycle": frozen_recycle,
    "recycle per sequence": lambda model: PerSequence(frozen_recycle(model)),
    "msd+ngram": lambda model: Union([DRAFTERS["msd"](model), Ngram()]),
}


@pytest.fixture
def _frozen(monkeypatch):
    for table in (Recycle, Recycled):
        monkeypatch.setattr(table, "_learn", lambda *_: None)


@pytest.mark.long
@pytest.mark.usefixtures("_frozen")
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_sequence_is_drafted_as_if_it_were_alone(kind, seed, shapes, monkeypatch):
    """Rows join singly or together, leave in any order and change places; some steps are not drafted."""
    model, rnd = copy.deepcopy(shared_model("llava")).double(), random.Random(seed)  # so that rounding decides nothing
    run_at(shapes, monkeypatch)
    batch, waiting, seen = Batch(model, DRAFTERS[kind]), list(prompts("llava")), []
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
    if "recycle" not in kind:  # which drafts from a table of other limits where shapes are static
        run_at("varying", monkeypatch)
    alone, compared = Batch(model, DRAFTERS[kind]), 0
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


# ---------------------------------------------------------------------- answers


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ngram", "recycle", "recycle+mamba"])
@pytest.mark.parametrize("seed", [0, 1])
def test_answers_are_those_of_generate_whoever_comes_and_goes(kind, seed, shapes, monkeypatch):
    """Drafters that learn: requests are added at any time, and some are given up half-way."""
    model, rnd = shared_model("llama"), random.Random(seed)
    run_at(shapes, monkeypatch)
    drafter = {
        "ngram": lambda: Ngram(memory=50),
        "recycle": lambda: Recycle(top_k=4),
        "recycle+mamba": lambda: Union([Recycle(), DRAFTERS["mamba"](model)]),
    }[kind]()
    target = plugins.target_class(model.config)(model)
    engine = SteppedEngine(target, drafter, lambda batch, nodes: Budget(10, 4), slots=5, chunk=8)
    asked = []
    while len(asked) < 8 or not all(row.done for row, *_ in asked):
        if len(asked) < 8 and rnd.random() < 0.4:
            inputs, new = text_inputs(1, 2 + 5 * len(asked) % 17, seed=len(asked)), rnd.randint(1, 24)
            (row,) = engine.add(prompt_of(inputs), Sampler(), Stopper(new))
            asked.append((row, inputs, new))
        alive = [row for row, *_ in asked if not row.done]
        if alive and rnd.random() < 0.05:
            engine.remove([rnd.choice(alive)])
        elif alive:
            turns = iter((False, True))
            engine.wait(lambda turns=turns: next(turns))  # one step
    for row, inputs, new in asked:
        assert row.error is None
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected = ids[0, inputs["input_ids"].shape[1] :].tolist()
        assert row.token_ids == expected[: len(row.token_ids)]
        assert row.cancelled or len(row.token_ids) == new
    assert sum(row.cancelled for row, *_ in asked) < 4
