"""Trees against chains on a hybrid: all methods give the model's tokens, and the fastest ones are compared."""

import itertools
import json

import pytest
import torch
from click.testing import CliRunner
from transformers import BambaForCausalLM, GenerationConfig

import mmspec
from mmspec import TokenTree, UserError
from mmspec.core.budget import Budget
from mmspec.core.drafter import fork
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.eval import hybrid
from mmspec.eval.decoding.oracle import Oracle
from mmspec.eval.decoding.unrolled import UnrolledTarget
from mmspec.eval.harness.drafters import ProfiledDrafter
from mmspec.eval.harness.prompts import held_out_texts, warm_up_requests
from mmspec.eval.harness.timing import PLAIN, TRANSFORMERS, Method, compare_methods
from mmspec.eval.hybrid import as_chain, compare_trees_with_chains, fastest, methods_by_kind
from mmspec.pipeline import Pipeline
from mmspec.ssm.drafters.mamba import Mamba
from mmspec.vision.drafters.msd import MSD
from tests.model_folders import tokenizer
from tests.tiny.configs import HYBRID_CONFIGS
from tests.tiny.models import mamba_network, msd_network


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    config = HYBRID_CONFIGS["bamba"](vocab_size=320, num_hidden_layers=3, attn_layer_indices=[1])
    model = BambaForCausalLM(config)
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


class RecordingDrafter(ProfiledDrafter):
    """Keeps all drafted trees."""

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
    for kind, drafter in (("tree", drafters(pipe)[name]), ("chain", as_chain(drafters(pipe)[name], 5, pipe.target))):
        recorder = RecordingDrafter(drafter)
        Pipeline(pipe.target, pipe.io, recorder).generate("Picture", max_new_tokens=40, nodes=5)
        seen[kind] = recorder.trees
    assert any((tree.parents[:, 1:] == 0).sum() > 1 for tree in seen["tree"])
    for tree in seen["chain"]:
        assert tree.parents.tolist() == [list(range(-1, tree.nodes - 1))]
    # Recycle's chains end at tokens without a known successor.
    longest = max(tree.nodes for tree in seen["chain"])
    assert longest == 6 or (name == "recycle" and longest > 2)


def test_a_recycle_chain_drafts_the_likeliest_successor_and_learns_all(folder):
    drafter = Recycle()
    drafter._vocab = 320
    drafter._table = {(4, 5): {7: 0.2, 8: 0.7}, (5, 8): {9: 0.3, 6: 0.1}}
    chained = as_chain(drafter, 3, mmspec.load(folder, drafter=None).target)
    chained.rows = [(4, 5)]
    tree = chained.propose(torch.tensor([5]), Budget(3))
    assert tree.tokens.tolist() == [[5, 8, 9]]
    assert chained.top_k == drafter.top_k
    assert drafter.width is None


def test_drafters_without_a_width_cannot_draft_chains(folder):
    target = mmspec.load(folder, drafter=None).target
    assert as_chain(Ngram(), 3, target).width == 1
    assert as_chain(ProfiledDrafter(Ngram()), 3, target).drafter.width == 1
    with pytest.raises(UserError, match="chains need a drafter that can draft them: Oracle cannot"):
        as_chain(Oracle([], vocab=9), 3, target)


def test_all_methods_give_the_same_tokens(folder):
    pipe = mmspec.load(folder, drafter=None)
    found = {
        name: methods_by_kind(name, drafter, pipe.target, [2, 3], [4, 8], [8])
        for name, drafter in drafters(pipe).items()
    }
    methods = [
        Method(TRANSFORMERS),
        Method(PLAIN),
        *itertools.chain(*(methods for kinds in found.values() for methods in kinds.values())),
    ]
    assert len(methods) == 2 + 3 * (3 + 3 + 1)
    compare_methods(pipe, requests(1), methods, rounds=1, max_new_tokens=12)
    assert [method.equal for method in methods] == [1] * len(methods)
    assert all(isinstance(method.target, UnrolledTarget) == method.name.endswith("unrolled") for method in methods)
    for kinds in found.values():
        (unrolled,) = kinds["unrolled"]
        same = next(method for method in kinds["tree"] if method.nodes == 8)
        assert unrolled.lengths == same.lengths


def test_forking_does_not_copy_the_model(folder, monkeypatch):
    pipe = mmspec.load(folder, drafter=None)
    unrolled = UnrolledTarget(pipe.target)
    drafter = MSD(msd_network(pipe.model))
    drafter.attach(unrolled)
    monkeypatch.setattr(type(pipe.model), "__deepcopy__", lambda self, memo: pytest.fail("copied"), raising=False)
    assert fork(drafter, unrolled).target is unrolled


def timed(name, *seconds):
    method = Method(name, tokens=[11] * len(seconds))
    method.seconds = [{"decoding": s} for s in seconds]
    return method


def test_trees_are_compared_with_the_fastest_chain():
    plain = timed("plain", 4.0, 4.0, 4.0)
    slow, good = timed("chain of 2", 3.0, 3.0, 3.0), timed("chain of 4", 2.0, 2.0, 8.0)
    tree, unrolled = timed("tree", 1.0, 1.6, 1.0), timed("unrolled", 3.0, 3.2, 3.0)
    tree.nodes = unrolled.nodes = 8
    kinds = {"chain": [slow, good], "tree": [tree], "unrolled": [unrolled]}
    assert fastest([slow, good], plain) is good
    first, everything = compare_trees_with_chains({"mamba": kinds}, plain)
    assert first["chain"] == everything["chain"] == "chain of 4"
    assert first["tree_over_chain"] == 2.0
    assert first["tree_ratio_plain"] == 4.0
    assert first["tree_tokens_per_second"] == 10.0
    assert first["tree_over_unrolled"] == {"8": 3.0}


def test_texts_differ():
    prompts = [request["prompt"] for request in held_out_texts(3) + warm_up_requests(3, visual=False)]
    assert len(set(prompts)) == 6


def test_the_command_ends_with_one_json_line(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(hybrid, "held_out_texts", requests)
    options = ["--model", folder, "--drafters", "mamba", "--chains", "2", "--nodes", "4", "--unrolled", "4"]
    options += ["--prompts", "1", "--warm-up", "1", "--rounds", "1", "--max-new-tokens", "8"]
    result = CliRunner().invoke(hybrid.main, [*options, "--out", str(tmp_path / "out.json")])
    assert result.exception is None, result.output
    figures = json.loads(result.output.splitlines()[-1])
    assert figures == json.loads((tmp_path / "out.json").read_text())
    names = [method["method"] for method in figures["methods"]]
    kinds = ["chain of 2", "chain, adaptive", "4 nodes unrolled", "4 nodes", "adaptive"]
    assert names[2:] == [f"mamba, {kind}" for kind in kinds]
    assert all(method["equal"] == 1 for method in figures["methods"])
    assert {row["drafter"] for row in figures["trees_and_chains"]} == {"mamba", "all"}


@pytest.mark.parametrize("option", ["--chains", "--nodes", "--unrolled"])
def test_invalid_sizes_are_refused(option):
    result = CliRunner().invoke(hybrid.main, [option, "0,x"])
    assert result.exit_code == 2
    assert (
        f"Invalid value for '{option}': must be values separated by commas, each a whole number >= 1: got '0,x'"
        in result.output
    )
