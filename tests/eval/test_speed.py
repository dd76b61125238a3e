"""Timing of methods, on a fake clock that only chosen calls advance; what methods learn; and the command."""

import json
from dataclasses import replace
from functools import partial, wraps

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import mmspec
from mmspec.core.tree import TokenTree
from mmspec.drafters.recycle import Recycle
from mmspec.engine.policy import AdaptivePolicy
from mmspec.eval import speed
from mmspec.eval.harness.timing import PLAIN, TRANSFORMERS, Method, compare_methods, interleaved, time_ratios
from mmspec.eval.speed import time_breakdown
from mmspec.targets.decoder import Decoder
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.vision.drafters.msd import MSD
from tests.model_folders import save_llava, save_text_model
from tests.tiny.models import msd_network

SECONDS = {"prefill": 100.0, "begin": 20.0, "propose": 5.0, "verify": 3.0, "commit": 1.0}
REQUESTS = [{"prompt": "Describe the image."}, {"prompt": "A red circle"}]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    return str(save_text_model(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LLaVA with an MSD drafter beside it."""
    path = tmp_path_factory.mktemp("tiny")
    pipe = mmspec.load(str(save_llava(path / "llava")), drafter=None)
    MSD(msd_network(pipe.model), torch.arange(40), total_tokens=9).save(path / "drafter", pipe.target)
    return path


def requests(count):
    return [{"prompt": f"Picture {k}", "images": [Image.new("RGB", (9, 9), (40 * k, 9, 9))]} for k in range(count)]


def test_every_second_is_attributed_to_a_phase(text_folder, monkeypatch):
    now = [0.0]
    for module in ("engine.core", "engine.request_state", "eval.harness.timing", "eval.harness.drafters"):
        monkeypatch.setattr(f"mmspec.{module}.clock", lambda: now[0])
    monkeypatch.setattr("mmspec.engine.stats.perf_counter", lambda: now[0])

    def timed(call, seconds):
        @wraps(call)
        def longer(*arguments, **keywords):
            now[0] += seconds
            return call(*arguments, **keywords)

        return longer

    for name, seconds in SECONDS.items():
        owner = next(kind for kind in (Recycle, Decoder, TransformersTarget) if hasattr(kind, name))
        monkeypatch.setattr(owner, name, timed(getattr(owner, name), seconds))
    methods = [Method(PLAIN), Method("recycle", Recycle(), 6), Method("never", Recycle(), 0)]
    compare_methods(mmspec.load(text_folder, drafter=None), REQUESTS, methods, rounds=3, max_new_tokens=9)
    plain, recycle, never = methods
    for method in methods:
        assert (method.tokens, method.equal) == ([9, 9], 2)
        for spent, length in zip(method.seconds, method.lengths, strict=True):
            steps = round(8 / length)
            # The drafter's prefill comes after the first token: it counts as drafting, and as decoding.
            drafting = spent["draft"] - (0.0 if method is plain else SECONDS["begin"])
            # No tree is drafted when one token is left.
            assert drafting in ((steps * 5.0, (steps - 1) * 5.0) if method is recycle else (0.0,))
            assert spent == {
                "total": 100.0 + spent["draft"] + steps * (3.0 + 1.0),
                "decoding": spent["draft"] + steps * (3.0 + 1.0),
                "prefill": 100.0,
                "draft": spent["draft"],
                "verify": steps * 3.0,
                "commit": steps * 1.0,
                "tree": 5.0 if method is recycle else 0.0,
                "pass": 3.0,
            }
    breakdown = time_breakdown(recycle, plain)
    assert sum(breakdown["shares"].values()) == pytest.approx(1)
    assert breakdown["shares"]["prefill"] == pytest.approx(sum(100 / s["total"] for s in recycle.seconds) / 2)
    assert breakdown.items() >= {"tree_seconds": 5.0, "tree_passes": 5 / 3, "pass_passes": 1.0}.items()
    assert time_breakdown(never, plain)["tree_passes"] == 0.0  # it has drafted none


def test_ratios_are_of_seconds_per_token():
    slow, fast = Method(PLAIN, tokens=[10, 5, 1, 4]), Method("fast", tokens=[20, 3, 6, 1])
    slow.seconds = [{"total": total, "decoding": total - 1} for total in (20.0, 10.0, 3.0, 4.0)]
    fast.seconds = [{"total": total, "decoding": total - 2} for total in (10.0, 12.0, 3.0, 4.0)]
    assert time_ratios(slow, fast, "total") == pytest.approx([2.0 / 0.5, 2.0 / 4.0, 3.0 / 0.5, 1.0 / 4.0])
    # The last two prompts are left out: one of their answers has one token.
    assert time_ratios(slow, fast, "decoding") == pytest.approx([(19 / 9) / (8 / 19), (9 / 4) / (10 / 2)])


def test_calls_are_interleaved_in_rotating_order_after_a_warm_up():
    order = []

    def call(name):
        order.append(name)
        return float(len(order))

    calls = {name: partial(call, name) for name in ("a", "b")}
    assert interleaved(calls, 2, 2) == {"a": [5.0, 8.0], "b": [6.0, 7.0]}
    assert order == ["a", "b", "b", "a"] * 2


class CountingDrafter(Recycle):
    """Drafts no tokens, so every step emits one token whatever the plan."""

    steps = 0

    def propose(self, token, plan):
        return TokenTree.root(token)

    def observe(self, tree, verdict, output):
        self.steps += 1


def test_drafter_and_policy_learn_each_prompt_once_and_share_their_model(text_folder, monkeypatch):
    """So that no prompt is drafted from its own answer."""
    pipe = mmspec.load(text_folder, drafter=None)
    monkeypatch.setattr(type(pipe.model), "__deepcopy__", lambda self, memo: pytest.fail("copied"), raising=False)
    learnt, observe = [], AdaptivePolicy.observe
    monkeypatch.setattr(AdaptivePolicy, "observe", lambda self, *step: learnt.append(self) or observe(self, *step))
    method = Method("adaptive", CountingDrafter(), None)
    compare_methods(pipe, REQUESTS, [method], rounds=4, max_new_tokens=20)
    assert method.drafter.steps == sum(policy is method.policy for policy in learnt) == 2 * 19
    method.clear()
    assert method.tokens == method.answers == method.seconds == []


def test_a_wrong_answer_is_counted(text_folder, monkeypatch):
    pipe = mmspec.load(text_folder, drafter=None)
    methods, verify = [Method(TRANSFORMERS), Method(PLAIN)], pipe.target.verify

    def negated(*asked):
        output = verify(*asked)
        return replace(output, logits=-output.logits)

    monkeypatch.setattr(pipe.target, "verify", negated)
    compare_methods(pipe, REQUESTS[:1], methods, rounds=1, max_new_tokens=5)
    assert [method.equal for method in methods] == [1, 0]
    assert methods[0].tokens == [len(methods[0].answers[0])] == [5]


def test_the_command_ends_with_one_json_line(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(speed, "held_out_requests", lambda images, videos, frames: requests(images + videos))
    monkeypatch.setattr(speed, "warm_up_requests", lambda count, visual: requests(count))
    options = ["--model", str(folder / "llava"), "--images", "1", "--videos", "1", "--rounds", "1", "--warm-up", "1"]
    options += ["--max-new-tokens", "8", "--drafters", f"ours={folder / 'drafter'},ngram"]
    result = CliRunner().invoke(speed.main, [*options, "--out", str(tmp_path / "out.json")])
    assert result.exception is None, result.output
    content = json.loads(result.stdout.splitlines()[-1])
    assert content == json.loads((tmp_path / "out.json").read_text())
    names = [TRANSFORMERS, PLAIN, "ours, 9 nodes", "ours, adaptive", "ngram, 16 nodes", "ngram, adaptive"]
    assert [method["method"] for method in content["methods"]] == names
    assert [method["equal"] for method in content["methods"]] == [2] * 6
    assert content["dtype"] == "float32"


def test_prompts_of_a_file_take_the_place_of_captions(text_folder, tmp_path):
    """The first one warms up."""
    (tmp_path / "prompts.txt").write_text("one two one two\nthree four\nfive\n")
    options = ["--model", text_folder, "--prompts", str(tmp_path / "prompts.txt"), "--warm-up", "1", "--rounds", "1"]
    result = CliRunner().invoke(speed.main, [*options, "--max-new-tokens", "8", "--drafters", "ngram"])
    assert result.exception is None, result.output
    methods = json.loads(result.stdout.splitlines()[-1])["methods"]
    assert [(method["prompts"], method["equal"]) for method in methods] == [(2, 2)] * 4
    assert all(method["ratio_plain_worst"] <= method["ratio_plain"] for method in methods)
