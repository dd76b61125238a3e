"""LoRA adapters behind OpenAI's API: models by their own names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

import mmspec
from mmspec.serving.command import serve
from mmspec.serving.limits import Limits
from tests.mmspec.targets.test_lora import PROMPTS, pytestmark, saved
from tests.testkit.served import served

pytest.importorskip("peft")
__all__ = ["pytestmark"]


def test_adapters_are_models(tmp_path: Path) -> None:
    """Clients of several of them at once get what each gets alone."""
    folders = {name: saved(tmp_path / name, "tiny-llava", seed) for seed, name in enumerate(("one", "two"))}
    pipe = mmspec.load("tiny-llava", adapters=folders, prefix_cache=1 << 26)
    asked = [(model, prompt) for prompt in PROMPTS for model in ("tiny-llava", "one", "two")]

    def expected(model: str, prompt: str) -> str:
        name = None if model == "tiny-llava" else model
        return pipe.generate(prompt, max_new_tokens=16, temperature=0.0, adapter=name).text

    def body(model: str, prompt: str) -> dict[str, object]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 16,
            "temperature": 0,
        }

    texts = [expected(*one) for one in asked]
    with served(pipe, Limits(max_running=4, max_waiting=16)) as server:
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["tiny-llava", "one", "two"]
        with ThreadPoolExecutor(9) as threads:
            answers = [found.json() for found in threads.map(lambda one: server.post(body(*one)), asked)]
        unknown = server.post(body("three", PROMPTS[0]))
        completion = {"model": "one", "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0}
        completed = server.post(completion, "completions").json()["choices"][0]["text"]
    options = {"max_new_tokens": 16, "temperature": 0.0, "chat_template": False}
    assert completed == pipe.generate(PROMPTS[0], adapter="one", **options).text
    assert [answer["model"] for answer in answers] == [model for model, _ in asked]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == texts
    assert len(set(texts)) > len(PROMPTS)
    assert unknown.status_code == 404
    assert "expected 'tiny-llava' or 'one' or 'two', got 'three'" in unknown.text


def test_the_option_needs_a_name_and_a_folder() -> None:
    found = CliRunner().invoke(serve, ["--adapter", "one"])
    assert found.exit_code == 2
    assert "must be NAME=FOLDER: got 'one'" in found.output
