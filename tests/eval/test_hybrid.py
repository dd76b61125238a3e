"""Trees against chains on a hybrid: all methods give the model's tokens, and the fastest ones are compared."""

import itertools
import json

import pytest
import torch
from click.testing import CliRunner
from transformers import BambaForCausalLM, GenerationConfig

import mmspec
from mmspec import UserError, accept_path
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.eval import hybrid
from mmspec.eval.decoding.oracle import Oracle
from mmspec.eval.harness.drafters import ProfiledDrafter
from mmspec.eval.harness.timing import PLAIN, TRANSFORMERS, Method, compare_methods
from mmspec.eval.hybrid import UnrolledTarget, as_chain, compare_trees_with_chains, methods_by_kind, unroll
from mmspec.ssm.drafters.mamba import Mamba
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.vision.drafters.msd import MSD
from tests.model_folders import tokenizer
from tests.targets import prefilled
from tests.tiny import random_tree, root_path, shared_model
from tests.tiny.configs import HYBRID_CONFIGS
from tests.tiny.models import mamba_network, msd_network, text_inputs

CLOSE = dict(atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    config = HYBRID_CONFIGS["bamba"](vocab_size=320, num_hidden_layers=3, attn_layer_indices=[1])
    model = BambaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.25) if parameter.ndim > 1 else None
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    pipe = mmspec.load(str(path), drafter=None)
    Mamba(mamba_network(320), total_tokens=9).save(path / "drafter", pipe.target)
    return pipe


def requests(count):
    return [{"prompt": f"Picture {k}"} for k in range(count)]


def drafters(pipe):
    return {"mamba": Mamba(mamba_network(320)), "msd": MSD(msd_network(pipe.model)), "recycle": Recycle()}


@pytest.mark.parametrize("shape", ["random", "chain", "star"])
@pytest.mark.parametrize("nodes", [1, 2, 9])
def test_every_leaf_has_its_own_chain(shape, nodes):
    tree = random_tree(torch.Generator().manual_seed(nodes), 3, nodes, 90, shape=shape)
    chains, copy = unroll(tree)
    for row in range(3):
        parents = tree.parents[row].tolist()
        paths = [root_path(tree, row, leaf) for leaf in range(1, nodes) if leaf not in parents]
        used = 1 + sum(len(path) - 1 for path in paths)
        unrolled = chains.parents[row, :used].tolist()
        # After the root, every entry follows the previous one or starts a chain.
        assert all(above in (0, place - 1) for place, above in enumerate(unrolled[1:], start=1))
        ends = [place for place in range(1, used) if place not in unrolled]
        found = [chains.tokens[row, root_path(chains, row, end)].tolist() for end in ends]
        assert found == [tree.tokens[row, path].tolist() for path in paths]
        for node in range(nodes):
            path = chains.tokens[row, root_path(chains, row, int(copy[row, node]))]
            assert torch.equal(path, tree.tokens[row, root_path(tree, row, node)])


@pytest.mark.parametrize(("name", "batch"), [("bamba", 1), ("bamba", 3), ("mamba2", 3), ("llama", 3)])
def test_logits_and_commits_of_unrolled_trees_equal_those_of_trees(name, batch):
    targets = [TransformersTarget(shared_model(name)) for _ in range(2)]
    targets[1] = UnrolledTarget(targets[1])
    inputs, g = text_inputs(batch, 7), torch.Generator().manual_seed(1)
    for target in targets:
        prefilled(target, Prompt(inputs["input_ids"], inputs["attention_mask"] if batch > 1 else None), 64)
    accepted = 0
    for _ in range(3):
        tree = random_tree(g, batch, 9, 90)
        steps = [target.verify(tree, ("last",)) for target in targets]
        torch.testing.assert_close(steps[1].logits, steps[0].logits, **CLOSE)
        torch.testing.assert_close(steps[1].features, steps[0].features, **CLOSE)
        # Choices that accept the deepest node of each row.
        choices = torch.full_like(tree.tokens, 95)
        for row in range(batch):
            path = root_path(tree, row, int(torch.where(tree.valid[row], tree.depth[row], -1).argmax()))
            accepted += len(path) - 1
            choices[row, path[:-1]] = tree.tokens[row, path[1:]]
        verdict = accept_path(tree, choices)
        for target in targets:
            target.commit(verdict)
    assert accepted > 3


def test_a_recycle_chain_drafts_the_likeliest_successor_and_learns_all(pipe):
    drafter = Recycle()
    drafter._vocab = 320
    drafter._table = {(4, 5): {7: 0.2, 8: 0.7}, (5, 8): {9: 0.3, 6: 0.1}}
    chained = as_chain(drafter, 3, pipe.target)
    chained.rows = [(4, 5)]
    tree = chained.propose(torch.tensor([5]), StepPlan(3))
    assert tree.tokens.tolist() == [[5, 8, 9]]
    assert chained.top_k == drafter.top_k
    assert drafter.width is None


def test_drafters_without_a_width_cannot_draft_chains(pipe):
    assert as_chain(ProfiledDrafter(Ngram()), 3, pipe.target).drafter.width == 1
    with pytest.raises(UserError, match="chains need a drafter that can draft them: Oracle cannot"):
        as_chain(Oracle([], vocab=9), 3, pipe.target)


def test_all_methods_give_the_same_tokens(pipe, monkeypatch):
    monkeypatch.setattr(type(pipe.model), "__deepcopy__", lambda self, memo: pytest.fail("copied"), raising=False)
    found = {
        name: methods_by_kind(name, drafter, pipe.target, [2, 3], [4, 8], [8])
        for name, drafter in drafters(pipe).items()
    }
    every = itertools.chain(*(methods for kinds in found.values() for methods in kinds.values()))
    methods = [Method(TRANSFORMERS), Method(PLAIN), *every]
    assert len(methods) == 2 + 3 * (3 + 3 + 1)
    compare_methods(pipe, requests(1), methods, rounds=1, max_new_tokens=12)
    assert [method.equal for method in methods] == [1] * len(methods)
    assert all(isinstance(method.target, UnrolledTarget) == method.name.endswith("unrolled") for method in methods)
    for kinds in found.values():
        (unrolled,) = kinds["unrolled"]
        same = next(method for method in kinds["tree"] if method.nodes == 8)
        assert unrolled.lengths == same.lengths


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
    first, everything = compare_trees_with_chains({"mamba": kinds}, plain)
    assert first["chain"] == everything["chain"] == "chain of 4"
    assert first["tree_over_chain"] == 2.0
    assert first["tree_ratio_plain"] == 4.0
    assert first["tree_tokens_per_second"] == 10.0
    assert first["tree_over_unrolled"] == {"8": 3.0}


def test_the_command_ends_with_one_json_line(pipe, monkeypatch, tmp_path):
    monkeypatch.setattr(hybrid, "held_out_texts", requests)
    options = ["--model", pipe.model.config.name_or_path, "--drafters", "mamba", "--chains", "2", "--nodes", "4"]
    options += ["--unrolled", "4", "--prompts", "1", "--warm-up", "1", "--rounds", "1", "--max-new-tokens", "8"]
    result = CliRunner().invoke(hybrid.main, [*options, "--out", str(tmp_path / "out.json")])
    assert result.exception is None, result.output
    figures = json.loads(result.output.splitlines()[-1])
    assert figures == json.loads((tmp_path / "out.json").read_text())
    names = [method["method"] for method in figures["methods"]]
    kinds = ["chain of 2", "chain, adaptive", "4 nodes unrolled", "4 nodes", "adaptive"]
    assert names[2:] == [f"mamba, {kind}" for kind in kinds]
    assert all(method["equal"] == 1 for method in figures["methods"])
    assert {row["drafter"] for row in figures["trees_and_chains"]} == {"mamba", "all"}
    result = CliRunner().invoke(hybrid.main, ["--unrolled", "0,x"])
    assert result.exit_code == 2
    assert "must be values separated by commas, each a whole number >= 1: got '0,x'" in result.output
