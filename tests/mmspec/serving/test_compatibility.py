"""What clients send: ranges of OpenAI's API, harmless fields of other servers, names of models; documented clients."""

import re
import subprocess
import sys
from importlib.util import find_spec
from shutil import which

import httpx
import pytest

import mmspec
from mmspec.serving.schemas import IGNORED
from tests.mmspec.serving.test_app import figures
from tests.model_folders import save_gguf
from tests.process import ROOT
from tests.testkit.served import SCENE, served

pytestmark = pytest.mark.usefixtures("one_thread")


FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}}}
MODEL = {"model": "tiny-llava"}
BODIES = {
    "chat/completions": {**MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "completions": {**MODEL, "prompt": "Hi", "max_tokens": 2},
    "responses": {**MODEL, "input": "Hi", "max_output_tokens": 2},
}
PENALTY = ([-2, 0, 1.5, 2, None], [-2.01, 2.01, "1"])
COUNT = ([1, 2048, None], [0, -1, 1.5, "1"])
EVERYWHERE = {
    "temperature": ([0, 1e-8, 0.7, 2, None], [-0.01, "1", True]),
    "top_p": ([0, 0.0, 1e-9, 0.5, 1, None], [-0.01, 1.01, "1"]),
    "seed": ([-(2**63), -1, 0, 2**63 - 1, None], [1.5, "1"]),
    "stop": (["", [], [""], ["", "a"], ["a", "b", "c", "d"], "a", None], [5, ["a", 5], {}]),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "logit_bias": ([{}, {"5": -100, "6": 100}, None], [{"5": -101}, {"5": 101}, {"a": 1}, [5]]),
    "stream": ([False, None], ["yes", 1]),
    "model": (["tiny-llava", None], [5]),
}
TABLE = {
    "chat/completions": {
        **EVERYWHERE,
        "n": ([1, 8, None], [0, 9, 1.5]),
        "max_tokens": COUNT,
        "max_completion_tokens": ([2, None], [0, -1, 1.5]),
        "logprobs": ([True, False, None], [1]),
        "top_logprobs": ([0, None], [-1, 21, 1.5]),
        "tools": ([[], None], [{}]),
        "tool_choice": (["none", "auto", None], ["some"]),
        "parallel_tool_calls": ([True, False, None], [1]),
        "response_format": ([FORMAT, {"type": "text"}, {"type": "json_object"}, None], ["text"]),
        "reasoning_effort": (["none", "minimal", "low", "medium", "high", "xhigh", None], [1]),
        "modalities": ([["text"], None], [["text", "audio"]]),
        "stream_options": ([None], [5]),
        "web_search_options": ([None], [{}]),
    },
    "completions": {
        **EVERYWHERE,
        "prompt": (["a", ["a", "b"], [5], [[5], [6]]], [None, [], 5, [["a"]]]),
        "n": ([1, 8, None], [0, 9, 1.5]),
        "max_tokens": COUNT,
        "logprobs": ([0, 5, 20, None], [-1, 21, True]),
        "echo": ([True, False, None], [1]),
        "best_of": ([1, None], [2]),
        "suffix": (["", None], ["a", 5]),  # tiny-llava has no tokens of a middle
        "parse_special": ([True, False, None], ["no"]),
        "add_special_tokens": ([True, False, None], ["no"]),
    },
    "responses": {
        **EVERYWHERE,
        "user": (["u", None], [5]),
        "metadata": ([{"a": "b"}, None], [{"a": 5}]),
        "max_output_tokens": COUNT,
        "top_logprobs": ([0, 20, None], [-1, 21]),
        "truncation": (["disabled", None], ["auto"]),
        "include": ([[], ["message.output_text.logprobs"], None], ["a"]),
        "text": ([{}, {"format": {"type": "text"}}, {"verbosity": "low"}, None], ["text"]),
        "reasoning": ([{}, {"effort": "low", "summary": "auto"}, None], ["low"]),
        "tool_choice": (["none", "auto", None], ["some"]),
        "store": ([True, False, None], [1]),
        "background": ([False, None], [True]),
        "previous_response_id": ([None], ["resp_x"]),
    },
}
WRITTEN = "http://127.0.0.1:8000"
CLIENTS = ("curl", "openai", "langchain_openai", "anthropic", "ollama")
HARMLESS = {
    **{"cache_prompt": False, "id_slot": 3, "slot_id": -1, "n_cache_reuse": 9, "speculative.n_max": 4},
    **{"keep_alive": "5m", "ttl": 60, "draft_model": "x", "priority": 1, "request_id": "a", "rid": "b"},
}
NEUTRAL = {"typical_p": 1, "mirostat": 0, "repeat_penalty": 1.0, "use_beam_search": False, "stop_token_ids": []}


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in TABLE.items() for field in fields])
def test_ranges_contain_those_of_openai(path, field, server):
    accepted, refused = TABLE[path][field]
    for value in accepted:
        found = server.post({**BODIES[path], field: value}, path)
        assert found.status_code == 200, (value, found.text)
    for value in refused:
        found = server.post({**BODIES[path], field: value}, path)
        error = found.json()["error"]
        assert (found.status_code, error["type"]) == (400, "invalid_request_error"), (value, error)
        assert field in error["message"], (value, error)


def test_harmless_fields_of_other_engines_are_ignored_and_counted(server):
    asked = {
        **MODEL,
        "temperature": 1.5,
        "seed": 3,
        "max_tokens": 12,
        "messages": BODIES["chat/completions"]["messages"],
    }
    before, plain = figures(server), server.post(asked).json()
    given = server.post({**asked, **HARMLESS, **NEUTRAL, "keep_alive": None})
    assert given.json()["choices"] == plain["choices"]
    after = figures(server)
    grown = {name for name in IGNORED if after.get(key := f"vllm:ignored_fields_total/{name}", 0) > before.get(key, 0)}
    assert grown == {*HARMLESS} - {"keep_alive"}
    for field, value in {"mirostat": 2, "typical_p": 0.5, "n_predict": 5, "options": {"num_ctx": 9}, "xyz": 1}.items():
        error = server.post({**asked, field: value}).json()["error"]
        assert (error["param"], error["message"][: len(field) + 17]) == (field, f"{field} is not supported"[:99]), error
    assert not any("xyz" in name for name in figures(server))


def test_the_only_name_of_a_model_may_be_left_out(tmp_path):
    file = save_gguf(tmp_path / "Tiny-1B.Q8_0.gguf")
    pipe = mmspec.load(str(file), drafter=None, dtype="float32")
    asked = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}
    with served(pipe) as server:
        for name in (None, str(file), "Tiny-1B.Q8_0", "Tiny-1B.Q8_0.gguf"):
            found = server.post({**asked, "model": name}, "completions")
            assert (found.status_code, found.json().get("model")) == (200, str(file)), name
        assert server.post(asked, "completions").status_code == 200
        assert server.post({**asked, "model": "Tiny-1B"}, "completions").status_code == 404
    with served(pipe, names=("a", "b")) as server:
        assert [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]] == ["a", "b"]
        for name, status in (("a", 200), ("b", 200), ("Tiny-1B.Q8_0", 404)):
            response = server.post({**asked, "model": name}, "completions")
            assert (response.status_code, response.json().get("model")) == (status, "a" if status == 200 else None)
            assert httpx.get(f"{server.url}/v1/models/{name}").status_code == status
        error = server.post(asked, "completions").json()["error"]
        assert (error["param"], error["message"]) == ("model", "model is required: expected 'a' or 'b', got none")
        assert httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}).status_code == 200
        assert 'model_name="a"' in httpx.get(f"{server.url}/metrics").text
        assert "serve: a\n" in httpx.get(server.url).text


def documented():
    """The command of each client."""
    section = (ROOT / "docs/serving.md").read_text().split("\n## Clients\n")[1].split("\n## ")[0]
    found = {}
    for language, code in re.findall(r"```(sh|python)\n(.*?)```", section, re.DOTALL):
        name = "curl" if language == "sh" else re.findall(r"^from (\w+) import", code, re.MULTILINE)[0]
        assert WRITTEN in code
        found[name] = ["sh", "-c", code] if language == "sh" else [sys.executable, "-c", code]
    return found


@pytest.mark.parametrize("client", CLIENTS)
def test_client(client, server, pipe):
    commands = documented()
    assert set(commands) == set(CLIENTS)
    if not (which(client) if client == "curl" else find_spec(client)):
        pytest.skip(f"needs {client}")
    *command, code = commands[client]
    done = subprocess.run(
        [*command, code.replace(WRITTEN, server.url)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    asked = ("Describe the image.", str(SCENE)) if client == "openai" else ("What is in a picture?", None)
    limit = {"max_new_tokens": 40} if client in ("curl", "anthropic") else {}
    assert pipe.generate(*asked, **limit).text in done.stdout
