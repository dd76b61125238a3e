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

from mmspec.errors import UserError
from mmspec.eval import agent
from mmspec.eval.agent import edits, session
from mmspec.eval.harness.peers import Server
from tests.eval.llama_server import install

BODY = "    return [length + len(tokens) for all_tokens in tokens if length]\n" * 7


def test_edits_rename_the_last_parameter_of_functions_of_medium_length() -> None:
    code = f"class A:\n    def f(self, length, tokens):\n{BODY.replace('    ', '        ')}\n"
    code += f"def g(tokens, length):\n{BODY}\ndef h(self):\n{BODY}\ndef i(a, b):\n    return b\n"
    code += f"def j(tokens, length):\n{BODY * 2}\n"
    (second, first) = edits(code)  # breadth first
    assert first[0] == "Rename the parameter `tokens` of `f` to `given_tokens`."
    assert second[0] == "Rename the parameter `length` of `g` to `given_length`."
    for (_, answer), name in ((first, "tokens"), (second, "length")):
        changed = re.fullmatch(r"```python\n(def .*)\n```", answer, re.DOTALL)
        assert changed is not None
        names = {node.id for node in ast.walk(ast.parse(changed[1])) if isinstance(node, ast.Name)}
        assert names == {"len", "length", "tokens", "all_tokens", f"given_{name}"} - {name}


def test_a_session_reads_each_file_once_and_appends_recorded_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first files of a suitable size with enough edits, in the order of their names."""
    one, padding = f"def f(tokens, length):\n{BODY}\n", f"{'#' * 9999}\n"
    texts = {"b/d": padding + one * 2, "b/c": padding + one * 3, "b/e": one * 15, "b/f": padding + one * 4}
    texts |= {"a/few": padding + one, "a/small": one * 3, "a/long": padding + one * 15}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr("mmspec.__file__", str(tmp_path / "__init__.py"))
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
    results = [(one["tool_call_id"], one["content"]) for one in turns[-1] if one["role"] == "tool"]
    assert results == [(f"{name}.py", texts[name]) for name in ("b/c", "b/d", "b/e")]
    asked = [json.loads(one["tool_calls"][0]["function"]["arguments"]) for one in turns[-1] if "tool_calls" in one]
    assert asked == [{"path": name} for name, _ in results]


def test_a_run_sends_each_turn_to_all_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    programs = {}
    for name in ("none", "auto", "llama.cpp", "ik_llama.cpp"):
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
    options += ["--methods", "auto,none,llama.cpp:ngram-mod,ik_llama.cpp"]
    options += [f"--peer={name}={programs[name]}" for name in ("llama.cpp", "ik_llama.cpp")]
    done = CliRunner().invoke(agent.main, options)
    assert done.exit_code == 0, done.output
    *table, line = done.stdout.splitlines()
    result, methods = json.loads(line), ["none", "auto", "llama.cpp:ngram-mod", "ik_llama.cpp"]
    assert (result["model"], result["threads"]) == ("model.gguf", torch.get_num_threads())
    assert f"2 turns, threads: {torch.get_num_threads()}" in table[0]
    rows = result["rows"]
    assert [row["method"] for row in rows] == methods
    sent = re.findall(r"^turn (\d), (\S+): ", done.stderr, re.MULTILINE)[len(methods) :]  # after the warm-up
    assert sent == [(str(turn + 1), name) for turn in (0, 1) for name in methods[turn:] + methods[:turn]]
    turns = list(session(1, 2))
    sizes = [len(json.dumps(messages)) for messages in turns]
    calls: list[Any] = [[], [{"name": "read_file"}]]  # the program's calls of tools
    answers = [[turn[-1]["content"][::-1][:9], called] for turn, called in zip(turns, calls, strict=True)]
    for row in rows:
        assert [turn["answer"] for turn in row["turns"]] == answers
        assert (row["equal"], row["tokens"], row["prompt"], row["computed"]) == (2, 6, sizes[-1], sum(sizes) - 4)
        assert row["of_best"] == pytest.approx(row["seconds"] / min(one["seconds"] for one in rows[2:]))
    alone = agent.rows_of({"none": rows[0]["turns"], "auto": rows[1]["turns"][::-1]})[1]
    assert (alone["equal"], alone["of_best"]) == (0, None)
    log = (tmp_path / "ik_llama.cpp" / "llama-server.jsonl").read_text()
    assert json.loads(log.splitlines()[0])["--spec-type"] == "none"
    first, *requests = map(json.loads, (tmp_path / "llama.cpp" / "llama-server.jsonl").read_text().splitlines())
    assert (first["--spec-type"], first["--threads"]) == ("ngram-mod", str(torch.get_num_threads()))
    assert (first["--ctx-size"], first["--cache-ram"]) == ("32768", "8192")
    assert (requests[0]["messages"], requests[0]["max_tokens"]) == ([{"role": "user", "content": "Hello"}], 8)
    assert [one["messages"] for one in requests[1:]] == turns
    assert {(one["temperature"], one["max_tokens"], one["tools"][0]["function"]["name"]) for one in requests[1:]} == {
        (0, 9, "read_file")
    }


@pytest.mark.parametrize("method", ["llama.cpp", "mistral.rs"])
def test_a_method_without_a_server_of_chats(method: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(agent.main, ["--model", str(tmp_path), "--methods", method])
    assert done.exit_code == 2
    assert f"'{method}' needs --peer {method}=COMMAND, a server of llama.cpp or ik_llama.cpp" in done.output


def test_servers_that_refuse_or_do_not_answer(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    server = Server("llama.cpp", str(install(tmp_path)), str(tmp_path), 1)
    turns = [[{"role": "user", "content": "x" * count}] for count in (9, 20000)]
    with pytest.raises(UserError, match=r"^auto refused turn 2: .*request exceeds the available context size"):
        agent.replay(turns, {"auto": server.url}, 9)
    server.close()
    with pytest.raises(UserError, match=r"^auto did not answer turn 1: "):
        agent.replay(turns, {"auto": server.url}, 9)
