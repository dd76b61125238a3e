"""Two ranks against one process; ranks that are lost, or leave the common schedule."""

import json
import re
import signal
from pathlib import Path

import httpx
import pytest

import mmspec
from tests.ranks import ended, job
from tests.split_models import PROMPTS, answers

pytestmark = pytest.mark.long


def test_two_ranks_give_the_tokens_of_one_process(split_model: Path, split_head: Path) -> None:
    drafters = ("recycle", str(split_head), "early-exit:2+ngram")
    with job("tests.ranks", "answers", str(split_model), *drafters) as processes:
        (status, out, errors), (other, _, _) = map(ended, processes)
    assert (status, other) == (0, 0), errors
    found = [json.loads(line) for line in out.splitlines()]
    plain = mmspec.load(split_model, None, "cpu", "float32")
    expected = answers(plain)
    assert found == [[expected, expected[1]]] * len(drafters)


@pytest.mark.parametrize(
    ("scenario", "message", "status"),
    [
        ("reversed", "the ranks must run the same schedule: expected turn 1 .* received turn 1 .* of rank 1", 1),
        ("killed", "a step of a sharded model failed, as where a rank is lost|a rank of the sharded model is lost", -9),
        ("stopped", "a rank of the sharded model is lost", -9),
    ],
)
def test_a_rank_that_fails_ends_the_requests(scenario: str, message: str, status: int, split_model: Path) -> None:
    patience = {"MMSPEC_RANK_SECONDS": "4"} if scenario == "stopped" else {}  # for a sign of life
    with job("tests.ranks", scenario, str(split_model), "recycle", **patience) as processes:
        _, out, _ = ended(processes[0])
        processes[1].kill() if scenario == "stopped" else None
        other, _, _ = ended(processes[1])
    errors = json.loads(out)
    assert len(errors) == 2, "a request was answered"
    assert all(re.match(message, error) for error in errors)
    assert other == status


def test_generate_of_two_ranks_prints_one_answer(split_model: Path) -> None:
    options = ("--dtype", "float32", "--drafter", "ngram", "--max-new-tokens", "12", "--json")
    with job("mmspec", "generate", PROMPTS[0], "--model", str(split_model), *options) as processes:
        first, second = map(ended, processes)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    expected = mmspec.load(split_model, None, "cpu", "float32").generate(PROMPTS[0], max_new_tokens=12)
    assert json.loads(first[1])["token_ids"] == expected.token_ids
    assert not second[1]


def test_serve_answers_from_two_ranks_and_ends_on_a_signal(split_model: Path) -> None:
    options = ("--dtype", "float32", "--drafter", "recycle", "--port", "0")
    sampled = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    body = {"model": str(split_model), "prompt": PROMPTS[0], "n": 2, **sampled}
    with job("mmspec", "serve", "--model", str(split_model), *options) as processes:
        assert processes[0].stdout is not None
        found = re.search(r"http://\S+/v1", processes[0].stdout.readline())
        assert found
        choices = httpx.post(f"{found[0]}/completions", json=body, timeout=300).json()["choices"]
        for one in processes:
            one.send_signal(signal.SIGTERM)
        assert [ended(one)[0] for one in processes] == [0, 0]
    plain = mmspec.load(split_model, None, "cpu", "float32")
    for number, choice in enumerate(choices):
        expected = plain.generate(PROMPTS[0], temperature=1.0, seed=7 + number, max_new_tokens=12, chat_template=False)
        assert choice["text"] == expected.text
