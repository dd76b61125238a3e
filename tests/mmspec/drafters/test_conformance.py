"""Every registered drafter on a dense, a vision-language and a hybrid model: no draft changes the output.

Requests that join and leave are in ``tests/mmspec/engine/test_schedules.py``, static shapes and captured steps in
``tests/mmspec/engine/test_static_shapes.py`` and ``tests/mmspec/ops/test_graphs.py``; they run every drafter, too.
"""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

import mmspec
from mmspec import Pipeline, TokenTree, UserError, accept_path, plugins
from mmspec.core.budget import Budget
from mmspec.core.drafter import features, fork
from mmspec.core.target import Prompt
from mmspec.drafters.per_sequence import PerSequence
from mmspec.drafters.recycle import DeviceTable, Recycle
from mmspec.drafters.registry import drafter_specs, make_drafter, registered_name
from mmspec.ops import kernels
from tests.device import record_captures
from tests.targets import prompt_of, row_of
from tests.tiny import root_path, shared_model, valid_nodes
from tests.tiny.drafters import tiny_drafter, tiny_drafters
from tests.tiny.models import text_inputs, vision_inputs

VOCAB = 101
DRAFTERS = [*tiny_drafters(), "recycle+ngram"]

on_every_target = pytest.mark.parametrize("name", ["llama", "llava", "bamba"])
every_drafter = pytest.mark.parametrize("kind", DRAFTERS)


def inputs_for(name, batch):
    return vision_inputs(name, batch) if name == "llava" else text_inputs(batch)


def answer(model, drafter, inputs, **options):
    torch.manual_seed(1)
    options = {"max_new_tokens": 12, "eos_token_id": None, **options}
    found = mmspec.generate(model, drafter=drafter, nodes=12, **options, **inputs)
    return found[:, inputs["input_ids"].shape[1] :].tolist()


def expected(model, inputs, **options):
    """Tokens of plain decoding: transformers' own if greedy."""
    if options:
        return answer(model, None, inputs, **options)
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    return ids[:, inputs["input_ids"].shape[1] :].tolist()


# ---------------------------------------------------------------------- output


@on_every_target
@every_drafter
def test_the_output_is_that_of_generate_in_a_batch_and_alone(name, kind):
    model, inputs = shared_model(name), inputs_for(name, 3)
    drafter, tokens = tiny_drafter(kind, model), expected(shared_model(name), inputs)
    assert answer(model, drafter, inputs, do_sample=False) == tokens
    alone = row_of(inputs, 1)
    alone["attention_mask"] = torch.ones_like(alone["input_ids"])
    assert answer(model, drafter, alone, do_sample=False) == tokens[1:2]


@on_every_target
@every_drafter
def test_a_seed_samples_the_tokens_of_plain_decoding(name, kind):
    model, inputs = shared_model(name), inputs_for(name, 2)
    options = {"do_sample": True, "temperature": 1.2, "top_k": 30, "repetition_penalty": 1.3}
    assert answer(model, tiny_drafter(kind, model), inputs, **options) == expected(model, inputs, **options)


@on_every_target
@every_drafter
def test_trees_that_would_pass_the_context_limit(name, kind, monkeypatch):
    model, inputs = shared_model(name), inputs_for(name, 1)
    monkeypatch.setattr(model.config.get_text_config(), "max_position_embeddings", inputs["input_ids"].shape[1] + 12)
    assert answer(model, tiny_drafter(kind, model), inputs, do_sample=False) == expected(model, inputs)


@every_drafter
def test_copies_of_a_drafter_in_use_draft_the_same(kind):
    model, inputs = shared_model("llava"), inputs_for("llava", 1)
    pipe = Pipeline(plugins.target_class(model.config)(model), None, tiny_drafter(kind, model))
    target, drafter, tokens = pipe.target, pipe.drafter, expected(model, inputs)
    assert answer(model, drafter, inputs, do_sample=False) == tokens
    for copied in (fork(drafter, target), fork(fork(drafter, target), target.fork())):
        assert copied is not drafter
        assert answer(model, copied, inputs, do_sample=False) == tokens
    sent = pickle.loads(pickle.dumps(pipe)).drafter
    assert answer(model, sent, inputs, do_sample=False) == tokens


@pytest.mark.parametrize("kind", [spec.name for spec in drafter_specs() if spec.chains])
def test_chains(kind):
    model, inputs = shared_model("llava"), inputs_for("llava", 2)
    drafter = tiny_drafter(kind, model)
    drafter.draft_chains(3)
    trees, propose = [], drafter.propose
    drafter.propose = lambda token, budget: trees.append(propose(token, budget)) or trees[-1]
    assert answer(model, drafter, inputs, do_sample=False) == expected(model, inputs)
    for tree in trees:
        for row in range(len(tree.tokens)):
            parents = [int(tree.parents[row, node]) for node in valid_nodes(tree, row)]
            assert parents == list(range(-1, len(parents) - 1))


# ---------------------------------------------------------------------- checkpoints


@on_every_target
@pytest.mark.parametrize("kind", [spec.name for spec in drafter_specs() if spec.weights in ("optional", "required")])
def test_a_checkpoint_drafts_the_same_and_refuses_other_targets(name, kind, tmp_path):
    model, inputs = shared_model(name), inputs_for(name, 1)
    target, drafter = plugins.target_class(model.config)(model), tiny_drafter(kind, model, 40)
    assert answer(model, drafter, inputs, do_sample=False) == expected(model, inputs)
    folder = tmp_path / f"drafter-{kind}"
    drafter.save(folder, target)
    for spec in (str(folder), f"{kind}:{folder}", kind):
        again = make_drafter(spec, str(tmp_path))
        assert registered_name(again) == kind
        again.save(tmp_path / "again", target)
        for file in ("config.json", "model.safetensors"):
            assert kind == "recycle" or (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()
    assert answer(model, again, inputs, do_sample=False) == expected(model, inputs)
    other = shared_model("qwen3")
    with pytest.raises(UserError, match="the drafter was trained for") as caught:
        make_drafter(str(folder)).attach(plugins.target_class(other.config)(other))
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


@pytest.fixture(params=["varying", "static", "captured"])
def shapes(request, monkeypatch):
    if request.param == "captured":
        record_captures(monkeypatch)
    return request.param


def run_at(shapes, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: shapes != "varying")


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

    def __init__(self, model, kind):
        self.target = plugins.target_class(model.config)(model)
        self.drafter = make(kind, model)
        self.drafter.attach(self.target)
        self.target.features = features(self.drafter)
        self.rows: list[Drafted] = []

    def join(self, new):
        prompt = new[0].prompt if len(new) == 1 else Prompt.stack([one.prompt for one in new])
        output = self.target.prefill(prompt, 200)
        for one, history in zip(new, prompt.histories(), strict=True):
            one.history += [*history, one.number]
        self.drafter.begin(prompt, output, [one.history for one in new])
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
        output = self.target.forward_tree(tree)
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
    return PerSequence(drafter) if kind.endswith("per sequence") else drafter


@pytest.fixture
def _frozen(monkeypatch):
    for table in (Recycle, DeviceTable):
        monkeypatch.setattr(table, "_learn", lambda *_: None)


@pytest.mark.long
@pytest.mark.usefixtures("_frozen")
@pytest.mark.parametrize("kind", [*DRAFTERS, "recycle, per sequence"])
def test_a_sequence_is_drafted_as_if_it_were_alone(kind, shapes, monkeypatch):
    """Rows join singly or together, leave in any order and change places; some steps are not drafted."""
    model, rnd = copy.deepcopy(shared_model("llava")).double(), random.Random(0)  # so that rounding decides nothing
    run_at(shapes, monkeypatch)
    batch, waiting, seen = Batch(model, kind), list(prompts("llava")), []
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
