"""Acceptance studies: counts derived by hand, comparison with plain decoding, and the command."""

import json
import random

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import mmspec
from mmspec.core.tree import build_tree
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.engine.engine import Engine
from mmspec.eval import acceptance
from mmspec.eval.decoding.acceptance_study import AcceptanceStudy, Condition, paired_differences, with_totals
from mmspec.eval.harness.acceptance import AcceptanceStats
from mmspec.eval.harness.prompts import Conversation
from mmspec.sampling.params import SamplingParams
from mmspec.vision.drafters.msd import MSD
from tests.standin import save_llava
from tests.tiny.models import msd_network

PICTURES = [Image.new("RGB", (9, 9), (90 * k, 9, 9)) for k in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("standin")))


@pytest.fixture(scope="module")
def pipe(folder):
    return mmspec.load(folder, drafter=None)


def conversations(questions=("What is it?",), counted=0):
    return [Conversation(tuple(questions), (picture,), counted=counted) for picture in PICTURES]


class ChainOracle:
    """Drafts the next ``length`` tokens of the known answers, given in the order of the requests, as a chain."""

    def __init__(self, answers, length):
        self.answers, self.length, self.number = answers, length, -1

    def attach(self, target):
        pass

    def begin(self, prompt, step, history):
        self.history, self.start = history[0], len(prompt.histories()[0])
        self.number += 1

    def select(self, rows):
        pass

    def propose(self, token, budget):
        chain = self.answers[self.number][len(self.history) - self.start :][
            : min(self.length, budget.max_depth, budget.nodes)
        ]
        return build_tree(token, [(chain, list(range(len(chain))))])

    def observe(self, tree, verdict, step):
        pass


def test_a_perfect_chain_of_three_has_an_acceptance_length_of_four(pipe):
    asked, answers = [], []
    for conversation in [c for question in ("What is it?", "Why?", "Describe it.") for c in conversations([question])]:
        tokens = pipe.generate(**conversation.request([]), max_new_tokens=21).token_ids
        if len(tokens) == 21 and len(asked) < 3:
            asked.append(conversation)
            answers.append(tokens)
    study = AcceptanceStudy(pipe, {"oracle": ChainOracle(answers, 3)}, "16,2", temperatures=[0.0], max_new_tokens=21)
    study.run("images", asked)
    by_size = {condition.nodes: stats for condition, stats in study.results.items()}
    # 20 tokens after the prefill's: five steps of 3 draft tokens and a bonus token; with 2 draft tokens, seven steps,
    # the last of 2 tokens.
    assert by_size[16].to_dict()["mean_acceptance_length"] == 4
    assert by_size[16].to_dict()["acceptance_by_position"] == [1, 1, 1]
    assert by_size[2].to_dict()["mean_acceptance_length"] == pytest.approx(20 / 7)
    assert all(stats.to_dict()["equal"] == stats.to_dict()["requests"] == 3 for stats in by_size.values())
    assert study.unequal == []


def test_sampled_answers_equal_plain_decoding_with_the_same_seed(pipe, monkeypatch):
    seeds, sampler = [], SamplingParams.sampler

    def follow(self, *rest):
        seeds.extend([] if self.seed is None else [self.seed])  # greedy requests have none
        return sampler(self, *rest)

    monkeypatch.setattr(SamplingParams, "sampler", follow)
    asked = conversations(["What is it?", "Which colour?", "Why?"], counted=1)
    study = AcceptanceStudy(pipe, {"msd": MSD(msd_network(pipe.model)), "recycle": Recycle()}, "6", [1.0], 2, 15)
    study.run("turns", asked)
    # Per round, six requests plainly and with each drafter, each with its seed.
    assert seeds == [*range(6)] * 3 + [*range(1_000_000, 1_000_006)] * 3
    assert len({tuple(pipe.generate("A", max_new_tokens=15, temperature=1.0, seed=k).token_ids) for k in range(3)}) == 3
    for stats in study.results.values():
        assert stats.to_dict()["equal"] == stats.to_dict()["requests"] == 12
        assert stats.groups == [("turns", number) for number in (0, 0, 1, 1, 2, 2)] * 2


def test_a_wrong_output_is_counted_and_recorded(pipe, monkeypatch):
    decode = Engine._decode

    def corrupted(self):
        decode(self)
        if self._drafter is not None:
            self.running[0].history[-1] = 7

    monkeypatch.setattr(Engine, "_decode", corrupted)
    study = AcceptanceStudy(pipe, {"ngram": Ngram()}, temperatures=[0.0], max_new_tokens=6)
    study.run("images", conversations())
    (stats,) = study.results.values()
    assert stats.equal == 0
    assert [case["request"] for case in study.unequal] == [0, 1, 2]
    assert study.unequal[0]["speculative"] == 7 != study.unequal[0]["plain"]
    assert study.unequal[0]["drafter"] == "ngram"
    json.dumps(study.unequal)


def test_history_is_the_targets_answer_and_not_counted(pipe):
    asked = conversations(["What is it?", "Which colour?", "Describe it."], counted=1)
    study = AcceptanceStudy(pipe, {}, max_new_tokens=6)
    requests, groups, tokens = study._greedy_answers(asked)
    assert groups == [0, 0, 1, 1, 2, 2]
    answer = pipe.generate(**asked[1].request([]), max_new_tokens=6).text
    assert requests[2]["prompt"][1] == {"role": "assistant", "content": answer.strip()}
    assert [len(request["prompt"]) for request in requests] == [3, 5] * 3
    assert tokens[3] == pipe.generate(**requests[3], max_new_tokens=6).token_ids


def test_drafters_start_each_suite_as_loaded(pipe, monkeypatch):
    started = []
    begin = Recycle.begin
    monkeypatch.setattr(Recycle, "begin", lambda self, *rest: started.append(self.entries) or begin(self, *rest))
    drafter = Recycle()
    study = AcceptanceStudy(pipe, {"recycle": drafter}, "5", [0.0, 1.0], seeds=2, max_new_tokens=6)
    study.run("images", conversations())
    study.run("turns", conversations())
    assert drafter.entries == 0
    assert [entries == 0 for entries in started] == [True, False, False] * 6


def test_num_answers_counts_progress(pipe):
    done = []
    study = AcceptanceStudy(pipe, {"a": Ngram(), "b": Ngram()}, "3,4", [1.0], 2, 3, lambda: done.append(1))
    study.run("images", conversations())
    # The history takes one more answer per conversation.
    assert len(done) == study.num_answers({"images": 3}) + 3 == 3 * (2 * 5 + 1)


def condition(suite, drafter, temperature=0.0, size="default", nodes=9):
    return Condition(suite, temperature, drafter, size, nodes)


def random_acceptance(suite, seed):
    rng = random.Random(seed)
    acceptance = AcceptanceStats()
    for number in range(20):
        stats = mmspec.engine.stats.Stats()
        for _ in range(5):
            accepted = rng.randrange(4)
            stats.record_step(6, 4, accepted, accepted + 1)
        acceptance.add((suite, number), stats, True)
    return acceptance


def test_totals_follow_the_suites_of_each_temperature():
    conditions = [
        condition(suite, drafter, t) for suite in ("videos", "images") for t in (1.0, 0.0) for drafter in ("b", "a")
    ]
    results = {key: random_acceptance(key.suite, seed) for seed, key in enumerate(conditions)}
    found = with_totals(results)
    assert [(k.temperature, k.suite, k.drafter) for k in found] == [
        (t, suite, drafter) for t in (0.0, 1.0) for suite in ("videos", "images", "all") for drafter in ("b", "a")
    ]
    parts = [results[condition(suite, "a")] for suite in ("videos", "images")]
    total = found[condition("all", "a")]
    assert sum(total.tokens) == sum(sum(part.tokens) for part in parts)
    assert "all" not in {key.suite for key in with_totals({conditions[0]: results[conditions[0]]})}


def test_pairs_differ_in_nothing_but_the_drafter():
    results = {
        condition("images", "a"): random_acceptance("images", 1),
        condition("images", "b", nodes=5): random_acceptance("images", 2),
        condition("images", "a", size="4", nodes=4): random_acceptance("images", 3),
        condition("images", "b", 1.0): random_acceptance("images", 4),
    }
    (found,) = paired_differences(results, [("a", "b")])
    first, second = list(results.values())[:2]
    assert found["difference"] == first.mean_acceptance_length - second.mean_acceptance_length
    assert found["low"] < found["difference"] < found["high"]
    (back,) = paired_differences(results, [("b", "a")])
    assert back["difference"] == -found["difference"]


def run(*options):
    return CliRunner().invoke(acceptance.main, [str(option) for option in options])


@pytest.fixture
def few_scenes(monkeypatch):
    monkeypatch.setattr(
        acceptance, "suite_conversations", lambda name, count, frames: conversations(["What is it?"])[:count]
    )


def test_the_command_prints_tables_and_one_json_line(folder, pipe, tmp_path, few_scenes):
    drafter = tmp_path / "drafter"
    MSD(msd_network(pipe.model), torch.arange(100), depth=3, total_tokens=9).save(drafter, pipe.target)
    counts = ("--images", 2, "--videos", 1, "--turns", 0, "--several", 0, "--text", 0)
    out = tmp_path / "results" / "out.json"
    options = ("--drafters", f"msd={drafter},recycle", "--paired", "msd,recycle", "--max-new-tokens", 8, "--out", out)
    result = run("--model", folder, *counts, *options)
    assert result.exception is None, result.output
    content = json.loads(result.stdout.splitlines()[-1])
    assert content == json.loads(out.read_text())
    assert not out.with_name("out.json.part").exists()
    assert [(row["temperature"], row["suite"], row["drafter"], row["nodes"]) for row in content["rows"]] == [
        (t, suite, *drafter) for t in (0, 1) for suite in ("images", "videos", "all") for drafter in NODES
    ]
    assert all(row["equal"] == row["requests"] for row in content["rows"])
    assert [row["requests"] for row in content["rows"][::2]] == [2, 1, 3] * 2
    assert {row["drafter"] for row in content["rows"] if row["forwards_per_tree"]} == {"msd"}
    assert len(content["paired"]) == 6
    assert content["learners"] == ["recycle"]
    assert "recycle: learning from earlier requests" in " ".join(result.stdout.split())


NODES = (("msd", 9), ("recycle", 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--paired", "auto,eagle"), "takes labels of --drafters (auto, ngram): got 'eagle'"),
        (("--paired", "auto"), "two labels, separated by a comma"),
        (("--temperatures", "0,warm"), "warm"),
        (("--temperatures", "0.00001"), "temperature must be 0 or >= 0.0001"),
        (("--nodes", "few"), "nodes must be 'default' or a whole number above 0: got 'few'"),
        (("--drafters", "ngram,ngram"), "'ngram' is given twice"),
        (("--model", "nowhere/at/all"), "nowhere/at/all"),
    ],
)
def test_usage_errors_are_one_line(options, message, few_scenes):
    result = run("--images", 1, "--videos", 0, "--turns", 0, "--several", 0, "--text", 0, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split()).replace("│", "")
    assert "Traceback" not in result.output


def test_every_suite_has_an_option():
    assert list(acceptance._COUNTS) == list(acceptance.SUITES)
