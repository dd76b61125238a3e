"""``python -m mmspec.eval agent``: the recorded session, and its replay on programs that answer as servers do."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from mmspec.eval import agent
from mmspec.eval.agent import edits, session
from mmspec.eval.harness.peers import Server
from tests.eval.llama_server import install

BODY = "    return [length + len(tokens) for token in tokens if length]\n" * 7


def test_edits_rename_the_last_parameter_of_functions_of_medium_length() -> None:
    code = f"class A:\n    def f(self, length, tokens):\n{BODY.replace('    ', '        ')}\n"
    code += f"def g(tokens, length):\n{BODY}\ndef h(self):\n{BODY}\ndef i(a, b):\n    return b\n"
    (second, first) = edits(code)  # breadth first
    assert first[0] == "Rename the parameter `tokens` of `f` to `given_tokens`."
    assert second[0] == "Rename the parameter `length` of `g` to `given_length`."
    for (_, answer), name in ((first, "tokens"), (second, "length")):
        changed = re.fullmatch(r"```python\n(def .*)\n```", answer, re.DOTALL)
        assert changed is not None
        names = {node.id for node in ast.walk(ast.parse(changed[1])) if isinstance(node, ast.Name)}
        assert f"given_{name}" in names
        assert name not in names


def test_a_session_reads_each_file_once_and_appends_recorded_answers() -> None:
    turns = list(session(3, 2))
    assert len(turns) == 6
    for turn, messages in enumerate(turns):
        read = turn % 2 == 0
        assert [one["role"] for one in messages[-3:]] == (
            ["assistant", "tool", "user"] if read else ["user", "assistant", "user"]
        )
        if turn:
            assert messages[: len(turns[turn - 1])] == turns[turn - 1]
            assert messages[len(turns[turn - 1])]["content"].startswith("```python\ndef ")
    results = [one for one in turns[-1] if one["role"] == "tool"]
    assert len({one["tool_call_id"] for one in results}) == 3
    assert all(len(one["content"]) in range(7000, 15000) for one in results)


def test_a_run_sends_each_turn_to_all_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    programs = {}
    for name in ("none", "auto", "llama.cpp"):
        (tmp_path / name).mkdir()
        programs[name] = str(install(tmp_path / name))

    @contextmanager
    def serving(drafter: str, served_model_name: str, model: str) -> Iterator[Any]:
        assert served_model_name == "agent"
        server = Server("llama.cpp", programs[drafter], model, 1)
        yield SimpleNamespace(url=f"{server.url}/v1")
        server.close()

    monkeypatch.setattr(agent, "serving", serving)
    options = ["--model", str(tmp_path / "model.gguf"), "--files", "1", "--edits", "2", "--max-new-tokens", "9"]
    options += ["--methods", "auto,llama.cpp:ngram-mod", "--peer", f"llama.cpp={programs['llama.cpp']}"]
    done = CliRunner().invoke(agent.main, options)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["method"] for row in rows] == ["none", "auto", "llama.cpp:ngram-mod"]
    turns = list(session(1, 2))
    sizes = [len(json.dumps(messages)) for messages in turns]
    answers = [[turn[-1]["content"][::-1][:9], []] for turn in turns]
    for row in rows:
        assert [turn["answer"] for turn in row["turns"]] == answers
        assert (row["equal"], row["tokens"], row["prompt"], row["computed"]) == (2, 6, sizes[-1], sum(sizes) - 4)
        assert row["of_best"] == pytest.approx(row["seconds"] / rows[-1]["seconds"])
    assert agent.rows_of({"none": rows[0]["turns"], "auto": rows[1]["turns"][::-1]})[1]["equal"] == 0
    first, *requests = map(json.loads, (tmp_path / "llama.cpp" / "llama-server.jsonl").read_text().splitlines())
    assert (first["--spec-type"], first["--threads"]) == ("ngram-mod", str(torch.get_num_threads()))
    assert (first["--ctx-size"], first["--cache-ram"]) == ("32768", "8192")
    assert [one["messages"] for one in requests[1:]] == turns
    assert {(one["temperature"], one["max_tokens"], one["tools"][0]["function"]["name"]) for one in requests[1:]} == {
        (0, 9, "read_file")
    }


@pytest.mark.parametrize("method", ["llama.cpp", "mistral.rs"])
def test_a_method_without_a_server_of_chats(method: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(agent.main, ["--model", str(tmp_path), "--methods", method])
    assert done.exit_code == 2
    assert f"'{method}' needs --peer {method}=COMMAND, a server of llama.cpp or ik_llama.cpp" in done.output
