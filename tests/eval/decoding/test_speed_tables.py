"""The speed benchmark: timing, equality counts, learning state of drafters, and the command."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import mmspec
from mmspec.core.drafter import Drafter
from mmspec.core.tree import TokenTree
from mmspec.drafters.recycle import Recycle
from mmspec.engine.budget import AdaptiveBudget
from mmspec.eval import speed
from mmspec.eval.decoding.speed_tables import time_breakdown
from mmspec.eval.harness.prompts import held_out_requests, warm_up_requests
from mmspec.eval.harness.timing import PHASES, PLAIN, TRANSFORMERS, Method, compare_methods
from mmspec.vision.drafters.msd import MSD
from tests.model_folders import save_llava
from tests.tiny.models import msd_network


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("tiny")))


def requests(count):
    return [{"prompt": f"Picture {k}", "images": [Image.new("RGB", (9, 9), (40 * k, 9, 9))]} for k in range(count)]


def test_every_method_is_timed_and_compared(folder):
    pipe = mmspec.load(folder, drafter=None)
    methods = [
        Method(TRANSFORMERS),
        Method(PLAIN),
        Method("recycle", Recycle(), 6),
        Method("msd", MSD(msd_network(pipe.model)), 6),
    ]
    compare_methods(pipe, requests(2), methods, rounds=3, max_new_tokens=10)
    for method in methods:
        assert len(method.seconds) == len(method.lengths) == method.equal == 2
        assert all(0 < seconds["decoding"] < seconds["total"] for seconds in method.seconds)


def test_the_phases_of_a_request_add_up(folder):
    pipe = mmspec.load(folder, drafter=None)
    methods = [Method(PLAIN), Method("msd", MSD(msd_network(pipe.model)), 6), Method("never", Recycle(), 0)]
    compare_methods(pipe, requests(1), methods, rounds=1, max_new_tokens=30)
    plain, msd, never = (time_breakdown(method, methods[0]) for method in methods)
    for method, figures in zip(methods, (plain, msd, never), strict=True):
        assert sum(figures["shares"].values()) == pytest.approx(1)
        assert all(share > 0 for part, share in figures["shares"].items() if part != "draft")
        spent = method.seconds[0]
        assert spent["prefill"] < spent["total"] - spent["decoding"]
        # The drafter's prefill comes after the first token, so it belongs to decoding.
        assert 0 < sum(spent[part] for part in PHASES[1:]) <= spent["decoding"] * (1 + 1e-6)
    assert plain["pass_passes"] == 1
    assert plain["pass_seconds"] == pytest.approx(methods[0].seconds[0]["verify"] / 29)
    assert plain["tree_seconds"] == never["tree_seconds"] == 0
    steps = 29 / methods[1].lengths[0]
    assert 0 < msd["tree_seconds"] * (steps - 1) < methods[1].seconds[0]["draft"]
    assert msd["tree_passes"] == msd["tree_seconds"] / plain["pass_seconds"]


def test_drafters_are_copied_without_their_target(folder, monkeypatch):
    pipe = mmspec.load(folder, drafter=None)
    method = Method("msd", MSD(msd_network(pipe.model), torch.arange(40)), 6)
    monkeypatch.setattr(type(pipe.model), "__deepcopy__", lambda self, memo: pytest.fail("copied"), raising=False)
    compare_methods(pipe, requests(2), [method], rounds=2, max_new_tokens=5)
    assert method.equal == 2


def negated(output):
    return replace(output, logits=-output.logits)


def test_a_wrong_answer_is_counted(folder, monkeypatch):
    pipe = mmspec.load(folder, drafter=None)
    methods = [Method(TRANSFORMERS), Method(PLAIN)]
    forward_tree = pipe.target.forward_tree
    monkeypatch.setattr(pipe.target, "forward_tree", lambda tree: negated(forward_tree(tree)))
    compare_methods(pipe, requests(1), methods, rounds=1, max_new_tokens=5)
    assert [method.equal for method in methods] == [1, 0]


def test_no_prompt_is_drafted_from_its_own_answer(folder):
    pipe = mmspec.load(folder, drafter=None)
    once, often = Method("once", Recycle(), 6), Method("often", Recycle(), 6)
    compare_methods(pipe, requests(2), [once], rounds=1, max_new_tokens=20)
    compare_methods(pipe, requests(2), [often], rounds=4, max_new_tokens=20)
    assert often.drafter._table == once.drafter._table


class RootDrafter(Drafter):
    """Drafts no tokens, so every step emits one token whatever the budget."""

    def begin(self, prompt, output, history): ...

    def select(self, rows): ...

    def propose(self, token, budget):
        return TokenTree.root(token)

    def observe(self, tree, verdict, output): ...


def test_a_budget_learns_from_one_round_per_prompt(folder, monkeypatch):
    learnt, observe = [], AdaptiveBudget.observe
    monkeypatch.setattr(AdaptiveBudget, "observe", lambda self, *step: learnt.append(self) or observe(self, *step))
    pipe = mmspec.load(folder, drafter=None)
    method = Method("adaptive", RootDrafter(), None)
    compare_methods(pipe, requests(2), [method], rounds=3, max_new_tokens=11)
    assert sum(budget is method.budget for budget in learnt) == 2 * 10


def test_warm_up_and_measured_prompts_differ():
    images = [request["images"][0].tobytes() for request in held_out_requests(3, 0)]
    others = [request["images"][0].tobytes() for request in warm_up_requests(3, visual=True)]
    assert len(set(images + others)) == 6
    (clip,) = held_out_requests(0, 1, frames=4)[0]["videos"]
    assert len(clip.frames) == 4


def test_the_command_ends_with_one_json_line(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(speed, "held_out_requests", lambda images, videos, frames: requests(images + videos))
    monkeypatch.setattr(speed, "warm_up_requests", lambda count, visual: requests(count))
    drafter = tmp_path / "drafter"
    MSD(msd_network(mmspec.load(folder, drafter=None).model), total_tokens=9).save(
        drafter, mmspec.load(folder, drafter=None).target
    )
    options = ["--model", folder, "--images", "1", "--videos", "1", "--rounds", "1", "--warm-up", "1"]
    options += ["--max-new-tokens", "8", "--drafters", f"ours={drafter},ngram", "--out", str(tmp_path / "out.json")]
    result = CliRunner().invoke(speed.main, options)
    assert result.exception is None, result.output
    content = json.loads(result.stdout.splitlines()[-1])
    assert content == json.loads((tmp_path / "out.json").read_text())
    names = [TRANSFORMERS, PLAIN, "ours, 9 nodes", "ours, adaptive", "ngram, 16 nodes", "ngram, adaptive"]
    assert [method["method"] for method in content["methods"]] == names
    assert [method["equal"] for method in content["methods"]] == [2] * 6
    assert content["dtype"] == "float32"
    assert content["calibrated_pass_seconds"] > 0


def test_prompts_of_a_file_take_the_place_of_captions(folder, tmp_path):
    """The first one warms up."""
    (tmp_path / "prompts.txt").write_text("one two one two\nthree four\nfive\n")
    options = ["--model", folder, "--prompts", str(tmp_path / "prompts.txt"), "--warm-up", "1", "--rounds", "1"]
    result = CliRunner().invoke(speed.main, [*options, "--max-new-tokens", "8", "--drafters", "ngram"])
    assert result.exception is None, result.output
    methods = json.loads(result.stdout.splitlines()[-1])["methods"]
    assert [(method["prompts"], method["equal"]) for method in methods] == [(2, 2)] * 4
    assert all(method["ratio_plain_worst"] <= method["ratio_plain"] for method in methods)
