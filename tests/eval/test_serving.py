"""Loads of a server: metrics of given requests, bodies of a soak, and small runs against a real server."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import httpx
import psutil
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from mmspec.errors import UserError
from mmspec.eval import serving, soak
from mmspec.eval.serving import StreamedRequest
from mmspec.eval.serving import serving as run_server


def run(command: click.Command, *options: str, status: int = 0) -> Any:
    done = CliRunner().invoke(command, options)
    assert done.exit_code == status, done.output
    return json.loads(done.stdout.splitlines()[-1])["loads"]


def test_figures_of_a_load() -> None:
    def request(text: str, tokens: int, first: float, gaps: list[float], accepted: int) -> StreamedRequest:
        metrics = {"num_accepted_draft_tokens": accepted, "num_spec_steps": len(gaps)}
        return StreamedRequest(text, tokens, first, gaps, first + sum(gaps), metrics)

    one, two = request("a", 7, 1.0, [0.5, 0.1], 4), request("b", 1, 3.0, [], 0)
    row = serving._row(2, [([one, two], 4.0, 5 << 20), ([one, two], 2.0, None)], ["a", "c"])
    assert row["tokens_per_second"] == pytest.approx((8 / 4 + 8 / 2) / 2)
    assert row["first_token_seconds"] == 2.0
    assert row["inter_token_seconds"] == pytest.approx(0.3)
    assert row["token_seconds"] == pytest.approx(0.1)
    assert row["mean_acceptance_length"] == 1 + 8 / 4
    assert row["peak_mebibytes"] == 5.0
    assert (row["equal"], row["answers"]) == (2, 4)


@pytest.mark.slow
def test_a_small_run() -> None:
    small = ["--requests", "8", "--clients", "1,4", "--rounds", "1", "--max-new-tokens", "16", "--max-running", "2"]
    loads = run(serving.main, *small)
    assert [(row["clients"], row["answers"], row["equal"]) for row in loads] == [(1, 8, 8), (4, 8, 8)]
    for row in loads:
        assert row["tokens_per_second"] > 0 < row["first_token_seconds"] <= row["first_token_seconds_90"]
        assert row["mean_acceptance_length"] > 1
    # With two slots for four clients, some wait.
    assert loads[1]["first_token_seconds_90"] > loads[0]["first_token_seconds"]


_SERVER = """#!{python}
import json, os, sys, time
if "--model=bad" in sys.argv:
    sys.exit("a warning\\nerror: no such model")
with open("{log}", "w") as log:
    json.dump([sys.argv[1:], os.environ["OMP_NUM_THREADS"]], log)
print("mmspec: http://a.b/v1 is ready", flush=True)
time.sleep(600)
"""


def test_options_and_end_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, log = tmp_path / "python", tmp_path / "log"
    program.write_text(_SERVER.format(python=sys.executable, log=log))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    torch.set_num_threads(3)
    options = {"model": "m", "max_running": 0, "api_key": None, "lora": ("a", "b")}
    with pytest.raises(ValueError, match=r"^http://a.b/v1 True$"), run_server(**options) as server:
        raise ValueError(f"{server.url} {psutil.pid_exists(server.pid)}")
    words = ["-m", "mmspec", "serve", "--port=0", "--model=m", "--max-running=0", "--lora=a", "--lora=b"]
    assert json.loads(log.read_text()) == [words, "3"]
    assert not psutil.pid_exists(server.pid)
    with pytest.raises(UserError, match=r"^no such model$"), run_server(model="bad"):
        pass


def test_memory_is_compared_with_that_after_the_first_minutes() -> None:
    rows = [{"minutes": at, "resident": size} for at, size in ((0.0, 900), (4.0, 300), (10.0, 400), (11.0, 500))]
    assert soak.compare_settled(rows, 10.0) == 1.25
    assert [row["over_settled"] for row in rows] == [2.25, 0.75, 1.0, 1.25]
    assert soak.compare_settled(rows[:2], 10.0) == 1.0  # a run that ended before


def test_loads_have_equal_lengths_and_other_texts() -> None:
    image = Image.new("RGB", (8, 8))
    one, two = (soak.load_bodies("m", number, (4, 40), 8, [image], ["ngram"]) for number in (1, 2))
    assert len(one) == len(two) == 27
    for first, second in zip(one, two, strict=True):
        assert first != second
        assert len(json.dumps(first)) == len(json.dumps(second))
    assert {body.get("n") for body in one} == {None, 2, 3}
    assert {body.get("speculative") for body in one} == {None, False, True, "ngram"}
    assert {body.get("num_draft_tokens") for body in one} == {None, 0, 1, 9, 64}
    assert any(body.get("stream") for body in one)
    assert any("tools" in body for body in one)
    assert one[-1]["messages"][0]["content"][0]["type"] == "image_url"


@pytest.mark.long
def test_a_small_soak() -> None:
    small = ["--model", "tiny-llava", "--minutes", "0.01", "--images", "1", "--words", "4", "--max-new-tokens", "8"]
    loads = run(soak.main, *small, "--most", "9")
    assert len(loads) == 2
    for row in loads:
        assert row["wrong"] == 0 < row["resident"] <= row["peak"]
        assert row["requests"] == 14


@pytest.mark.parametrize("wrong", [0, 1])
def test_wrong_answers_fail_a_run(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_PAUSE", 0)
    monkeypatch.setattr(soak, "_MIXES", [{}, {"stream": bool(wrong)}])

    def answer(request: httpx.Request) -> httpx.Response:  # streams are refused
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(503 if json.loads(request.content).get("stream") else 200)

    running = SimpleNamespace(url="http://server", pid=os.getpid())
    monkeypatch.setattr(soak, "serving", lambda **_: nullcontext(running))
    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(soak, "open_client", lambda url: client(base_url=url))
    loads = run(soak.main, "--minutes", "0.001", "--most", "9", "--images", "0", status=wrong)
    assert {(row["wrong"], row["requests"]) for row in loads} == {(wrong * 3, 9)}
