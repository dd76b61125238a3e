"""``mmspec tune``: slow methods drop out, the fastest one is named with the options that use it."""

from __future__ import annotations

import json
import re

import pytest

from mmspec.errors import UserError
from mmspec.eval.harness.timing import PLAIN, DecodingOptions, Method, TimedBatch
from mmspec.eval.suite import race as racing
from mmspec.eval.suite.race import read_requests
from tests.commandline import assert_user_error, runner
from tests.model_folders import save_llava, save_text_model

OPTIONS = DecodingOptions(128)


class Clock:
    """Every prompt takes plain decoding a second, others by their speed, which varies by prompt."""

    def __init__(self, monkeypatch, speeds):
        self.now, self.runs, self.speeds = 0.0, [], speeds
        monkeypatch.setattr(racing, "clock", lambda: self.now)
        monkeypatch.setattr(racing, "run_interleaved", self.run)

    def run(self, pipe, requests, methods, rounds, options):
        assert rounds == 1
        (request,) = requests
        self.runs.append(([method.name for method in methods], request, options.max_new_tokens))
        batches = {}
        for method in methods:
            speed = 1.0 if method.name == PLAIN else self.speeds[method.name](request)
            self.now += 1 / speed
            batches[method.name] = [TimedBatch([[1] * 10], [], {"total": 1 / speed})]
        return batches


def race(clock, prompts, seconds=1e9):
    return racing.race(None, range(prompts), [Method(name) for name in clock.speeds], OPTIONS, seconds)


def test_the_fastest_is_first_and_slow_ones_drop_out(monkeypatch):
    """Small differences need more prompts."""
    steady = {"slow": 0.5, "close": 1.45, "best": 1.5, "third": 1.3}
    clock = Clock(monkeypatch, {name: lambda _, speed=speed: speed for name, speed in steady.items()})
    found = race(clock, 40)
    assert [contender.method.name for contender in found] == ["best", "close", "third", "slow"]
    assert [len(contender.ratios) for contender in found] == [16, 4, 2, 2]
    assert found[0].to_dict() == {
        "method": "best",
        "prompts": len(found[0].ratios),
        "mean_acceptance_length": 1.0,
        "median": pytest.approx(1.5),
        "low": pytest.approx(1.5),
        "high": pytest.approx(1.5),
        "equal": len(found[0].ratios),
    }
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
    assert 20 <= clock.now < 20 + 3
    assert len(found[0].ratios) == len(clock.runs) - 1
    assert len(race(Clock(monkeypatch, clock.speeds), 5, seconds=1e-9)[0].ratios) == 1
    clock = Clock(monkeypatch, {"a": lambda _: 2.0})
    assert race(clock, 1)[0].speed == pytest.approx(2.0)
    assert len(clock.runs) == 1  # a single prompt is measured without a warm-up


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
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    return runner(capfd)


def test_the_options_it_prints_decode(run, tmp_path):
    model = str(save_text_model(tmp_path / "text"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc abc abc\nDescribe\n")
    size = "--max-new-tokens", "8"
    status, out, err = run(
        "tune", model, "--prompts", str(prompts), "--drafters", "ngram,recycle", "--sizes", "3", *size
    )
    assert status == 0
    assert re.fullmatch(r"measuring: 0 %, 4 methods, [\d:]+\nmeasuring: 100 %, [\d:]+\n", err)
    *table, fastest, command = out.splitlines()
    assert fastest.startswith("fastest: ")
    for method in ("ngram, 3 nodes", "ngram, adaptive", "recycle, 3 nodes", "recycle, adaptive"):
        assert sum(method in line for line in table) == 1
    program, *words = command.split()
    assert (program, words[:2]) == ("mmspec", ["generate", "PROMPT"])
    assert run(*words, *size)[0] == 0


def test_its_json(run, tmp_path):
    folder = save_llava(tmp_path / "llava")
    prompts = tmp_path / "prompts.jsonl"
    mmspec_image = {"prompt": "Describe", "images": []}
    prompts.write_text(json.dumps(mmspec_image) + "\n")
    status, out, _ = run(
        "tune", str(folder), "--prompts", str(prompts), "--sizes", "2", "--max-new-tokens", "4", "--json"
    )
    result = json.loads(out)
    assert status == 0
    assert result["best"] == result["methods"][0]
    assert all(row["equal"] == row["prompts"] == 1 for row in result["methods"])
    assert {"ngram, 2 nodes", "recycle, adaptive"} <= {row["method"] for row in result["methods"]}


def test_mistakes(run, tmp_path):
    model = str(save_text_model(tmp_path / "text"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    for options, message in (
        (("--drafters", "none"), "expected a drafter, received 'none'"),
        (("--drafters", "parrot"), "unknown drafter"),
        (("--sizes", "0"), "nodes must be 'default' or a whole number above 0: got '0'"),
    ):
        assert_user_error(run("tune", model, "--prompts", str(prompts), *options), message)
