"""Trees against chains on a hybrid: every way gives the model's tokens, and the best are told apart."""

import itertools
import json

import pytest
import torch
from click.testing import CliRunner
from transformers import GenerationConfig

import mmspec
from eval import hybrid
from eval.decoding.tiny_models import mamba_network, msd_network
from eval.decoding.unrolled import Unrolled
from eval.harness.drafters import Watched
from eval.harness.prompts import held_out_texts
from eval.harness.timing import PLAIN, TRANSFORMERS, Way, measure
from eval.hybrid import against_chains, best, chain, ways_of
from mmspec import TokenTree, UserError
from mmspec.budget import Budget
from mmspec.drafter import fork
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.pipeline import Pipeline
from ssm.drafters.mamba import Mamba
from ssm.training.architecture import Architecture, new_model
from tests.standin import tokenizer
from vision.drafters.msd import MSD

SIZE = Architecture(
    width=48, layers=3, attention=(1,), heads=2, mamba_heads=2, state=8, mlp=48, context=512, vocabulary=320
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    model = new_model(SIZE)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.25) if parameter.ndim > 1 else None
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    Mamba(mamba_network(320), total_tokens=9).save(path / "drafter", mmspec.load(str(path), drafter=None).target)
    return str(path)


def requests(count, first=0):
    return [{"prompt": f"Picture {k} of {first}"} for k in range(count)]


def drafters(pipe):
    return {"mamba": Mamba(mamba_network(320)), "msd": MSD(msd_network(pipe.model)), "recycle": Recycle()}


class Noting(Watched):
    """Keeps what was proposed."""

    def __init__(self, drafter):
        super().__init__(drafter)
        self.trees = []

    def propose(self, token, budget):
        self.trees.append(super().propose(token, budget))
        return self.trees[-1]


@pytest.mark.parametrize("name", ["mamba", "msd", "recycle"])
def test_a_chain_has_one_child_per_node(folder, name):
    pipe = mmspec.load(folder, drafter=None)
    seen: dict[str, list[TokenTree]] = {}
    for kind, drafter in (("tree", drafters(pipe)[name]), ("chain", chain(drafters(pipe)[name], 5, pipe.target))):
        noting = Noting(drafter)
        Pipeline(pipe.target, noting).generate("Picture", max_new_tokens=40, nodes=5)
        seen[kind] = noting.trees
    assert any((tree.parents[:, 1:] == 0).sum() > 1 for tree in seen["tree"])
    for tree in seen["chain"]:
        assert tree.parents.tolist() == [list(range(-1, tree.nodes - 1))]
    # Successors that a table has not seen yet end a chain.
    longest = max(tree.nodes for tree in seen["chain"])
    assert longest == 6 or (name == "recycle" and longest > 2)


def test_a_chain_takes_the_likeliest_successor_and_learns_them_all(folder):
    drafter = Recycle()
    drafter._vocab, drafter._last = 320, [(4, 5)]
    drafter._table = {(4, 5): {7: 0.2, 8: 0.7}, (5, 8): {9: 0.3, 6: 0.1}}
    chained = chain(drafter, 3, mmspec.load(folder, drafter=None).target)
    tree = chained.propose(torch.tensor([5]), Budget(3))
    assert tree.tokens.tolist() == [[5, 8, 9]]
    assert chained.top_k == drafter.top_k
    assert drafter.width is None


def test_what_cannot_draft_chains_is_refused(folder):
    target = mmspec.load(folder, drafter=None).target
    assert chain(Ngram(), 3, target).width == 1
    with pytest.raises(UserError, match="chains need a drafter with a width or top_k: Watched has neither"):
        chain(Watched(Ngram()), 3, target)


def test_all_ways_give_the_same_tokens(folder):
    pipe = mmspec.load(folder, drafter=None)
    found = {name: ways_of(name, drafter, pipe.target, [2, 3], [4, 8], [8]) for name, drafter in drafters(pipe).items()}
    ways = [
        Way(TRANSFORMERS),
        Way(PLAIN),
        *itertools.chain(*(ways for kinds in found.values() for ways in kinds.values())),
    ]
    assert len(ways) == 2 + 3 * (3 + 3 + 1)
    measure(pipe, requests(1), ways, rounds=1, max_new_tokens=12)
    assert [way.equal for way in ways] == [1] * len(ways)
    assert all(isinstance(way.target, Unrolled) == way.name.endswith("unrolled") for way in ways)
    for kinds in found.values():
        (apart,) = kinds["unrolled"]
        same = next(way for way in kinds["tree"] if way.nodes == 8)
        assert apart.lengths == same.lengths


def test_an_unrolled_way_is_copied_without_its_model(folder, monkeypatch):
    pipe = mmspec.load(folder, drafter=None)
    apart = Unrolled(pipe.target)
    drafter = MSD(msd_network(pipe.model))
    drafter.attach(apart)
    monkeypatch.setattr(type(pipe.model), "__deepcopy__", lambda self, memo: pytest.fail("copied"), raising=False)
    assert fork(drafter, apart).target is apart


def timed(name, *seconds):
    way = Way(name, tokens=[11] * len(seconds))
    way.seconds = [{"decoding": s} for s in seconds]
    return way


def test_the_best_chain_is_what_trees_are_held_against():
    plain = timed("plain", 4.0, 4.0, 4.0)
    slow, good = timed("chain of 2", 3.0, 3.0, 3.0), timed("chain of 4", 2.0, 2.0, 8.0)
    tree, apart = timed("tree", 1.0, 1.6, 1.0), timed("unrolled", 3.0, 3.2, 3.0)
    tree.nodes = apart.nodes = 8
    kinds = {"chain": [slow, good], "tree": [tree], "unrolled": [apart]}
    assert best([slow, good], plain) is good
    first, everything = against_chains({"mamba": kinds}, plain)
    assert first["chain"] == everything["chain"] == "chain of 4"
    assert first["tree_over_chain"] == 2.0
    assert first["tree_ratio_plain"] == 4.0
    assert first["tree_tokens_per_second"] == 10.0
    assert first["tree_over_unrolled"] == {"8": 3.0}


def test_texts_are_held_out_and_differ():
    prompts = [request["prompt"] for request in held_out_texts(3) + held_out_texts(3, 4_000_000)]
    assert len(set(prompts)) == 6


def test_the_command_ends_with_one_json_line(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(hybrid, "held_out_texts", requests)
    options = ["--model", folder, "--drafters", "mamba", "--chains", "2", "--nodes", "4", "--unrolled", "4"]
    options += ["--prompts", "1", "--warm-up", "1", "--rounds", "1", "--max-new-tokens", "8"]
    result = CliRunner().invoke(hybrid.main, [*options, "--out", str(tmp_path / "out.json")])
    assert result.exception is None, result.output
    figures = json.loads(result.output.splitlines()[-1])
    assert figures == json.loads((tmp_path / "out.json").read_text())
    names = [way["way"] for way in figures["ways"]]
    kinds = ["chain of 2", "chain, adaptive", "4 nodes unrolled", "4 nodes", "adaptive"]
    assert names[2:] == [f"mamba, {kind}" for kind in kinds]
    assert all(way["equal"] == 1 for way in figures["ways"])
    assert {row["drafter"] for row in figures["trees_and_chains"]} == {"mamba", "all"}


@pytest.mark.parametrize("option", ["--chains", "--nodes", "--unrolled"])
def test_sizes_that_are_none_are_refused(option):
    result = CliRunner().invoke(hybrid.main, [option, "0,x"])
    assert result.exit_code == 2
    assert f"{option} must be whole numbers above 0" in result.output
