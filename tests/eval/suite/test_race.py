"""``mmspec tune``: slow methods drop out, the fastest one is named with the options that use it."""

from __future__ import annotations

import json
import re
from time import sleep
from types import SimpleNamespace

import pytest

import mmspec
from mmspec.cli.session import open_pipeline
from mmspec.engine.stats import Stats
from mmspec.errors import UserError
from mmspec.eval.harness.timing import DecodingOptions, Method, TimedBatch
from mmspec.eval.suite import race as racing
from mmspec.eval.suite.methods import PLAIN
from mmspec.eval.suite.race import options_of, read_requests
from mmspec.vision.drafters.msd import MSD
from tests.commandline import assert_user_error, runner
from tests.model_folders import save_llava, save_text_model
from tests.tiny.models import msd_network

OPTIONS = DecodingOptions(128)


class Clock:
    """Every prompt takes plain decoding a second, others by their speed, which varies by prompt."""

    def __init__(self, monkeypatch, speeds, length=4):
        self.now, self.runs, self.speeds, self.length = 0.0, [], speeds, length
        monkeypatch.setattr(racing, "clock", lambda: self.now)
        monkeypatch.setattr(racing, "decode", self.decode)

    def decode(self, pipe, method, requests, options):
        (request,) = requests
        if not self.runs or self.runs[-1][1] != request:
            self.runs.append(([], request, options.max_new_tokens))
        self.runs[-1][0].append(method.name)
        speed = 1.0 if method.name == PLAIN else self.speeds[method.name](request)
        self.now += 1 / speed
        stats = Stats(num_spec_steps=1, accept_lengths=[1 if method.name == PLAIN else self.length])
        return TimedBatch([[1] * 10], [stats], {"total": 1 / speed})


def race(clock, prompts, seconds=1e9):
    return racing.race(None, range(prompts), [Method(name) for name in clock.speeds], OPTIONS, seconds)


def test_the_fastest_is_first_and_slow_ones_drop_out(monkeypatch):
    """Small differences need more prompts."""
    steady = {"slow": 0.5, "close": 1.45, "best": 1.5, "third": 1.3}
    clock = Clock(monkeypatch, {name: lambda _, speed=speed: speed for name, speed in steady.items()})
    found = race(clock, 40)
    assert [contender.method.name for contender in found] == ["best", "close", "third", "slow"]
    assert [len(contender.ratios) for contender in found] == [16, 4, 2, 2]
    speeds = {name: pytest.approx(1.5) for name in ("median", "low", "high")}
    counts = {"prompts": 16, "equal": 16, "noisy": 0, "mean_acceptance_length": 4.0}
    assert found[0].to_dict() == {"method": "best", **speeds, **counts}
    names, first, tokens = clock.runs[0]
    assert (set(names), first, tokens) == ({PLAIN, *clock.speeds}, 0, 32)  # the warm-up
    assert [request for _, request, _ in clock.runs] == list(range(len(clock.runs)))  # no prompt twice


def test_methods_that_differ_by_chance_stay(monkeypatch):
    clock = Clock(monkeypatch, {"a": lambda request: 1 + request % 3, "b": lambda request: 1 + (request + 1) % 3})
    assert [len(contender.ratios) for contender in race(clock, 21)] == [20, 20]
    assert {names[0] for names, _, _ in clock.runs[1:]} == {PLAIN, "a", "b"}  # the order rotates


def test_the_time_limit_ends_it(monkeypatch):
    clock = Clock(monkeypatch, {"a": lambda request: 1 + request % 3, "b": lambda request: 1 + (request + 1) % 3})
    found = race(clock, 100, seconds=20)
    assert 20 <= clock.now <= 20 + 1  # the method at hand ends
    assert len(clock.runs[-1][0]) < 3
    assert len(found[0].ratios) == len(clock.runs) - 2  # neither the warm-up nor the last prompt counts
    with pytest.raises(UserError, match="the time was too short for a prompt with 2 methods"):
        race(Clock(monkeypatch, clock.speeds), 5, seconds=1e-9)
    clock = Clock(monkeypatch, {"a": lambda _: 2.0})
    assert race(clock, 1)[0].speed == pytest.approx(2.0)
    assert len(clock.runs) == 1  # a single prompt is measured without a warm-up


@pytest.mark.parametrize(("length", "noisy"), [(3, 0), (1.45, 0), (1.2, 8)])
def test_no_speed_above_the_tokens_per_step_is_reported(length, noisy, monkeypatch):
    """A little above is timing's noise; a prompt with more of it is counted."""
    clock = Clock(monkeypatch, {"a": lambda _: 1.5, "b": lambda request: 1.1 + request % 2 * 0.2}, length)
    found = [contender.to_dict() for contender in race(clock, 9)]
    assert (found[0]["median"], found[0]["noisy"]) == (pytest.approx(min(1.5, length)), noisy)
    assert all(one["high"] <= one["mean_acceptance_length"] == length for one in found)


CHOSEN = "m0 --num-draft-tokens 3"


NOISE = "times are noise: in 2 of 6 prompts, the speed was above the tokens per step"
FEW = "5 measured prompts are too few for a 95 % interval, which takes 6"
PLAIN_TOO = "m0, 3; plain decoding: they differ by no more than chance"
CLOSE = "m0, 3; m1, 3: they differ by no more than chance"


@pytest.mark.parametrize(
    ("ratios", "noisy", "why", "drafter"),
    [
        (([1.5] * 6, [1.2] * 6), 1, "", CHOSEN),
        (([1.5] * 8, [1.2] * 8), 2, "", CHOSEN),
        (([1.5] * 6, [1.2] * 6), 2, NOISE, "auto"),
        (([1.5] * 5, [1.2] * 5), 0, FEW, "auto"),
        (([0.9, 1.0, 1.3, 1.3, 1.3, 1.3], [0.9] * 6), 0, PLAIN_TOO, "none"),
        (([1.4, 1.5] * 3, [1.3, 1.45] * 3, [1.2] * 6), 0, CLOSE, CHOSEN),
        (([1.4, 1.5] * 3, [1.6] * 2, [1.2] * 6), 0, "", CHOSEN),  # it dropped out: slower on the same prompts
        (([0.8] * 6, [0.8] * 6), 0, "", "none"),  # plain decoding is the fastest
    ],
)
def test_there_is_no_winner_where_intervals_overlap(ratios, noisy, why, drafter):
    methods = [Method(f"m{number}, 3", nodes=3) for number in range(len(ratios))]
    contenders = [racing.Contender(*own, noisy=noisy) for own in zip(methods, map(list, ratios), strict=True)]
    assert racing.tied(contenders) == why
    assert options_of("M", contenders[0]) == f"--model M --drafter {drafter}"


# ------------------------------------------------------------------ prompts


def test_prompts_of_a_file(tmp_path):
    text, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_bytes("\ufeffone\r\n\ntwo\u2028words\n".encode())
    assert read_requests(text) == [{"prompt": "one"}, {"prompt": "two\u2028words"}]
    (tmp_path / "cat.png").touch()
    content = [{"prompt": "one", "images": "cat"}, {"turns": ["two\u2028", "three"]}]
    rows.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content))
    one, two = read_requests(rows)
    assert one == {"prompt": "one", "images": [str(tmp_path / "cat.png")], "videos": []}
    assert two == {"prompt": "two\u2028", "images": [], "videos": []}


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("a.jsonl", b"\n", "expected at least one prompt, received none"),
        ("a.jsonl", b'{"question": 1}', "line 1: expected a field 'prompt', received question"),
        ("a.jsonl", b'{"prompt": "a", "images": "dog"}', "line 1: expected the file dog in .*, there is none"),
        ("a.txt", b"one\n\ntwo\xff\n", r"a\.txt, line 3: expected UTF-8"),
    ],
)
def test_files_without_prompts(tmp_path, name, content, rule):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rule):
        read_requests(tmp_path / name)


# ------------------------------------------------------------------ the command


@pytest.fixture
def run(capfd, monkeypatch, tmp_path):
    """Runs ``mmspec tune`` on a file with these prompts, or another command."""
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    call = runner(capfd)

    def tune(model, content, *options, name="prompts.txt"):
        (tmp_path / name).write_text(content)
        return call("tune", str(model), "--prompts", str(tmp_path / name), *options)

    return SimpleNamespace(tune=tune, call=call)


def test_the_options_it_prints_decode(run, tmp_path):
    size = "--max-new-tokens", "8"
    options = "--drafters", "ngram,recycle", "--sizes", "3", *size
    status, out, err = run.tune(save_text_model(tmp_path / "text"), "abc abc abc\nDescribe\n", *options)
    assert status == 0
    few, err = err.split("\n", 1)
    assert few == "note: a 95 % interval takes 7 prompts, the first is the warm-up: got 2"
    assert re.fullmatch(r"measuring: 0 %, 4 methods, [\d:]+\nmeasuring: 100 %, [\d:]+\n", err)
    *table, fastest, command = out.splitlines()
    assert fastest.startswith(f"no winner: {FEW.replace('5 measured', '1 measured')}; ")
    for method in ("ngram, 3 nodes", "ngram, adaptive", "recycle, 3 nodes", "recycle, adaptive"):
        (line,) = (line for line in table if method in line)
        assert " to " not in line  # a prompt has no interval
    program, *words = command.split()
    assert (program, words[:2]) == ("mmspec", ["generate", "PROMPT"])
    assert run.call(*words, *size)[0] == 0


def test_drafters_that_do_not_fit_are_said_or_refused(tmp_path):
    """Those of the model's folder are left out, unless they were named."""
    pipe = mmspec.load(str(save_llava(tmp_path / "llava")), drafter=None)
    MSD(msd_network(pipe.model)).save(tmp_path / "text" / "drafter-msd", pipe.target)
    pipe = mmspec.load(str(save_text_model(tmp_path / "text", 300)), drafter=None)
    fit, unfit = racing.fitting_methods(pipe, " ngram, auto,none", (2, 5))
    assert [(one.name, one.nodes) for one in fit[:3]] == [
        ("ngram, 2 nodes", 2), ("ngram, 5 nodes", 5), ("ngram, adaptive", None)
    ]  # fmt: skip
    assert len({id(one.drafter) for one in fit}) == len(fit) == len({one.name for one in fit})
    assert [line.partition(":")[0] for line in unfit] == ["msd does not fit"]
    with pytest.raises(UserError):
        racing.fitting_methods(pipe, "msd,ngram", (2,))


def test_loading_takes_of_the_time(run, tmp_path, monkeypatch):
    def load(*arguments, **options):
        sleep(0.7)
        return open_pipeline(*arguments, **options)

    monkeypatch.setattr("mmspec.cli.session.open_pipeline", load)
    options = "--drafters", "ngram", "--sizes", "1", "--minutes", "0.01", "--max-new-tokens", "2"
    status, _, err = run.tune(save_text_model(tmp_path / "text"), "one\n", *options)
    assert (status, "error: the time was too short" in err) == (2, True)


def test_its_json(run, tmp_path):
    row = json.dumps({"prompt": "Describe", "images": []}) + "\n"
    options = "--sizes", "2", "--max-new-tokens", "4", "--json"
    status, out, _ = run.tune(save_llava(tmp_path / "llava"), row, *options, name="prompts.jsonl")
    result = json.loads(out)
    assert (status, result["best"]) == (0, None)
    assert result["no_winner"].startswith("1 measured prompts are too few")
    assert all(row["equal"] == row["prompts"] == 1 for row in result["methods"])
    assert {"ngram, 2 nodes", "recycle, adaptive"} <= {row["method"] for row in result["methods"]}


def test_mistakes(run, tmp_path):
    model = save_text_model(tmp_path / "text")
    for options, message in (
        (("--drafters", "none"), "expected a drafter, received 'none'"),
        (("--drafters", "parrot"), "unknown drafter"),
        (("--sizes", "0"), "0 is not in the range x>=1"),
    ):
        assert_user_error(run.tune(model, "one\n", *options), message)
