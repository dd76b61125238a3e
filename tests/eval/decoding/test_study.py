"""Acceptance on held-out requests: counts that can be derived by hand, outputs compared, one JSON line."""

import json
import random

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import mmspec
from eval import acceptance
from eval.acceptance import pairs, with_totals
from eval.decoding.study import Key, Study
from eval.decoding.tiny_models import msd_network
from eval.harness.acceptance import Tally
from eval.harness.prompts import Conversation
from mmspec.drafter import build_tree
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.engine import decode, generator_for
from tests.standin import save_llava
from vision.drafters.msd import MSD

PICTURES = [Image.new("RGB", (9, 9), (90 * k, 9, 9)) for k in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("standin")))


@pytest.fixture(scope="module")
def pipe(folder):
    return mmspec.load(folder, drafter=None)


def conversations(questions=("What is it?",), counted=0):
    return [Conversation(tuple(questions), (picture,), counted=counted) for picture in PICTURES]


class Seer:
    """Drafts the next ``sees`` tokens of the answers that it was told, in their order, as a chain."""

    def __init__(self, answers, sees):
        self.answers, self.sees, self.number = answers, sees, -1

    def attach(self, target):
        pass

    def begin(self, prompt, step, history):
        self.history, self.start = history[0], len(prompt.histories()[0])
        self.number += 1

    def propose(self, token, budget):
        chain = self.answers[self.number][len(self.history) - self.start :][
            : min(self.sees, budget.max_depth, budget.nodes)
        ]
        return build_tree(token, [(chain, list(range(len(chain))))])

    def observe(self, tree, verdict, step):
        pass


def test_a_drafter_that_sees_three_ahead_is_accepted_four_at_a_time(pipe):
    asked, answers = [], []
    for conversation in [c for question in ("What is it?", "Why?", "Describe it.") for c in conversations([question])]:
        tokens = pipe.generate(**conversation.request([]), max_new_tokens=21).token_ids
        if len(tokens) == 21 and len(asked) < 3:
            asked.append(conversation)
            answers.append(tokens)
    tests = Study(pipe, {"seer": Seer(answers, 3)}, "16,2", temperatures=[0.0], max_new_tokens=21)
    tests.run("images", asked)
    by_size = {key.nodes: tally for key, tally in tests.tallies.items()}
    # 20 tokens behind the prefill's: five steps of 3 drafts and a bonus; with room for 2 drafts, seven steps, the last
    # of 2 tokens.
    assert by_size[16].row()["mean_acceptance_length"] == 4
    assert by_size[16].row()["acceptance_by_position"] == [1, 1, 1]
    assert by_size[2].row()["mean_acceptance_length"] == pytest.approx(20 / 7)
    assert all(tally.row()["equal"] == tally.row()["requests"] == 3 for tally in by_size.values())
    assert tests.unequal == []


def test_sampled_answers_equal_plain_ones_of_the_same_seed(pipe, monkeypatch):
    seeds = []
    monkeypatch.setattr(
        "mmspec.pipeline.generator_for", lambda seed, device: seeds.append(seed) or generator_for(seed, device)
    )
    asked = conversations(["What is it?", "Which colour?", "Why?"], counted=1)
    tests = Study(pipe, {"msd": MSD(msd_network(pipe.model)), "recycle": Recycle()}, "6", [1.0], 2, 15)
    tests.run("turns", asked)
    # Behind the nine turns of the history: per round, six requests plainly and by either drafter, each with its seed.
    assert seeds[9:] == [*range(6)] * 3 + [*range(1_000_000, 1_000_006)] * 3
    assert len({tuple(pipe.generate("A", max_new_tokens=15, temperature=1.0, seed=k).token_ids) for k in range(3)}) == 3
    for tally in tests.tallies.values():
        assert tally.row()["equal"] == tally.row()["requests"] == 12
        assert tally.groups == [("turns", number) for number in (0, 0, 1, 1, 2, 2)] * 2


def test_a_wrong_output_is_counted_and_shown(pipe, monkeypatch):
    def spoilt(target, drafter, *rest):
        for rows in decode(target, drafter, *rest):
            if drafter is not None:
                rows[0].history[-1] = 7
            yield rows

    monkeypatch.setattr("mmspec.pipeline.decode", spoilt)
    tests = Study(pipe, {"ngram": Ngram()}, temperatures=[0.0], max_new_tokens=6)
    tests.run("images", conversations())
    (tally,) = tests.tallies.values()
    assert tally.equal == 0
    assert [case["request"] for case in tests.unequal] == [0, 1, 2]
    assert tests.unequal[0]["speculative"] == 7 != tests.unequal[0]["plain"]
    assert tests.unequal[0]["drafter"] == "ngram"
    json.dumps(tests.unequal)


def test_history_is_the_targets_own_answer_and_not_counted(pipe):
    asked = conversations(["What is it?", "Which colour?", "Describe it."], counted=1)
    tests = Study(pipe, {}, max_new_tokens=6)
    requests, groups, tokens = tests._ask(asked)
    assert groups == [0, 0, 1, 1, 2, 2]
    answer = pipe.generate(**asked[1].request([]), max_new_tokens=6).text
    assert requests[2]["prompt"][1] == {"role": "assistant", "content": answer.strip()}
    assert [len(request["prompt"]) for request in requests] == [3, 5] * 3
    assert tokens[3] == pipe.generate(**requests[3], max_new_tokens=6).token_ids


def test_what_is_learnt_ends_with_the_suite(pipe, monkeypatch):
    started = []
    begin = Recycle.begin
    monkeypatch.setattr(Recycle, "begin", lambda self, *rest: started.append(self.entries) or begin(self, *rest))
    drafter = Recycle()
    tests = Study(pipe, {"recycle": drafter}, "5", [0.0, 1.0], seeds=2, max_new_tokens=6)
    tests.run("images", conversations())
    tests.run("turns", conversations())
    assert drafter.entries == 0
    assert [entries == 0 for entries in started] == [True, False, False] * 6


def test_the_number_of_decodings_is_known_before(pipe):
    done = []
    tests = Study(pipe, {"a": Ngram(), "b": Ngram()}, "3,4", [1.0], 2, 3, lambda: done.append(1))
    tests.run("images", conversations())
    # _ask decodes each once more, for its history.
    assert len(done) == tests.decodings({"images": 3}) + 3 == 3 * (2 * 5 + 1)


def key_of(suite, drafter, temperature=0.0, size="default", nodes=9):
    return Key(suite, temperature, drafter, size, nodes)


def some_tally(suite, seed):
    rng = random.Random(seed)
    tally = Tally()
    for number in range(20):
        stats = mmspec.stats.Stats()
        for _ in range(5):
            accepted = rng.randrange(4)
            stats.record_step(6, 4, accepted, accepted + 1)
        tally.add((suite, number), stats, True)
    return tally


def test_totals_stand_behind_the_suites_of_a_temperature():
    keys = [key_of(suite, drafter, t) for suite in ("videos", "images") for t in (1.0, 0.0) for drafter in ("b", "a")]
    tallies = {key: some_tally(key.suite, place) for place, key in enumerate(keys)}
    found = with_totals(tallies)
    assert [(k.temperature, k.suite, k.drafter) for k in found] == [
        (t, suite, drafter) for t in (0.0, 1.0) for suite in ("videos", "images", "all") for drafter in ("b", "a")
    ]
    parts = [tallies[key_of(suite, "a")] for suite in ("videos", "images")]
    total = found[key_of("all", "a")]
    assert sum(total.tokens) == sum(sum(part.tokens) for part in parts)
    assert "all" not in {key.suite for key in with_totals({keys[0]: tallies[keys[0]]})}


def test_pairs_compare_what_was_measured_alike():
    tallies = {
        key_of("images", "a"): some_tally("images", 1),
        key_of("images", "b", nodes=5): some_tally("images", 2),
        key_of("images", "a", size="4", nodes=4): some_tally("images", 3),
        key_of("images", "b", 1.0): some_tally("images", 4),
    }
    (found,) = pairs(tallies, [("a", "b")])
    first, second = list(tallies.values())[:2]
    assert found["difference"] == first.mean_acceptance_length - second.mean_acceptance_length
    assert found["low"] < found["difference"] < found["high"]
    (back,) = pairs(tallies, [("b", "a")])
    assert back["difference"] == -found["difference"]


def run(*options):
    return CliRunner().invoke(acceptance.main, [str(option) for option in options])


@pytest.fixture
def few_scenes(monkeypatch):
    monkeypatch.setattr(acceptance, "suite", lambda name, count, frames: conversations(["What is it?"])[:count])


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
        (("--drafters", "ngram,ngram"), "'ngram' stands twice"),
        (("--model", "nowhere/at/all"), "nowhere/at/all"),
    ],
)
def test_mistakes_are_one_line(options, message, few_scenes):
    result = run("--images", 1, "--videos", 0, "--turns", 0, "--several", 0, "--text", 0, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split()).replace("│", "")
    assert "Traceback" not in result.output


def test_every_suite_has_an_option():
    assert list(acceptance._COUNTS) == list(acceptance.SUITES)
