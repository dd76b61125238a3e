"""A coding session on servers: ``python -m mmspec.eval agent --model FILE.gguf --peer llama.cpp=COMMAND``.

A recorded conversation is sent turn by turn, each turn to one server after another. In every turn, the user asks for an
edit of a function of this package, whose file a tool call reads before the first edit. The recorded answers are
appended, so that all servers read the same prompts. Servers keep prompts as they do by default.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from textwrap import dedent
from time import perf_counter as clock
from typing import Any

import click
import httpx
import torch

import mmspec
from mmspec.errors import UserError, explained
from mmspec.eval.harness.output import Column, benchmark, make_table, processor, wide_console
from mmspec.eval.harness.peers import ENGINES, MISTRAL, servers
from mmspec.eval.harness.timing import rotated
from mmspec.eval.serving import serving
from mmspec.eval.suite import peer_option
from mmspec.eval.suite.methods import PLAIN, split_methods
from mmspec.http_client import open_client

_NAME = "agent"
_KEEPING = "--ctx-size 32768 --cache-ram 8192"  # prompts are kept, as by default
_FILE, _FUNCTION = range(7000, 15000), range(350, 900)  # characters of files, and of functions to edit
_PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_TOOL = {"type": "function", "function": {"name": "read_file", "description": "Read a file.", "parameters": _PATH}}
_SYSTEM = "You edit Python files. Answer an edit with the whole changed function in a fenced block, and nothing else."


def edits(code: str) -> Iterator[tuple[str, str]]:
    """Requests to rename the last parameter of each function of medium length, with their answers."""
    for node in ast.walk(ast.parse(code)):
        source = ast.get_source_segment(code, node) if isinstance(node, ast.FunctionDef) else None
        if isinstance(node, ast.FunctionDef) and source and len(source) in _FUNCTION and node.args.args[1:]:
            name = node.args.args[-1].arg
            changed = re.sub(rf"\b{name}\b", f"given_{name}", dedent(" " * node.col_offset + source))
            asked = f"Rename the parameter `{name}` of `{node.name}` to `given_{name}`."
            yield asked, f"```python\n{changed}\n```"


def session(files: int, each: int) -> Iterator[list[dict[str, Any]]]:
    """The messages of each turn: ``each`` edits in each of the package's first files of a suitable size."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": _SYSTEM}]
    root = Path(mmspec.__file__).parent
    texts = ((path.relative_to(root).as_posix(), path.read_text()) for path in sorted(root.glob("*/*.py")))
    suited = ((name, text) for name, text in texts if len(text) in _FILE and len(list(edits(text))) >= each)
    for name, text in islice(suited, files):
        call = {"name": "read_file", "arguments": json.dumps({"path": name})}
        messages += [
            {"role": "user", "content": f"Read {name}."},
            {"role": "assistant", "content": "", "tool_calls": [{"id": name, "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": name, "content": text},
        ]
        for asked, answer in islice(edits(text), each):
            messages.append({"role": "user", "content": asked})
            yield list(messages)
            messages.append({"role": "assistant", "content": answer})


def replay(turns: Sequence[list[dict[str, Any]]], urls: dict[str, str], most: int) -> dict[str, list[dict[str, Any]]]:
    """Send each turn to all servers; returns by name, for each turn, ``seconds``, ``answer`` and ``usage``. Raises
    ``UserError``: a server refuses a request."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
    for turn, messages in enumerate(turns):
        body = {"model": _NAME, "messages": messages, "tools": [_TOOL], "max_tokens": most, "temperature": 0}
        for name, url in rotated(list(urls.items()), turn):
            with open_client(url) as client, explained(f"{name} did not answer turn {turn + 1}", httpx.HTTPError):
                start = clock()
                response = client.post("/v1/chat/completions", json=body)
                spent = clock() - start
            if response.is_error:
                raise UserError(f"{name} refused turn {turn + 1}: {response.text}")
            reply = response.json()
            message, usage = reply["choices"][0]["message"], reply["usage"]
            answer = [message["content"], [one["function"] for one in message.get("tool_calls") or ()]]
            found[name].append({"seconds": spent, "answer": answer, "usage": usage})
            click.echo(f"turn {turn + 1}, {name}: {spent:.1f} s, {usage['completion_tokens']} tokens", err=True)
    return found


def rows_of(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row of sums per server, of ``replay``'s results; ``equal`` counts the turns with plain decoding's answer."""
    rows = []
    for name, turns in found.items():
        usage = [turn["usage"] for turn in turns]
        cached = sum((one.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for one in usage)
        row: dict[str, Any] = {"method": name, "seconds": sum(turn["seconds"] for turn in turns)}
        row |= {"tokens": sum(one["completion_tokens"] for one in usage), "prompt": usage[-1]["prompt_tokens"]}
        row["computed"] = sum(one["prompt_tokens"] for one in usage) - cached
        row["equal"] = sum(one["answer"] == plain["answer"] for one, plain in zip(turns, found[PLAIN], strict=True))
        rows.append({**row, "turns": turns})
    best = min((row["seconds"] for row in rows if row["method"].partition(":")[0] in ENGINES), default=None)
    return [{**row, "of_best": best and row["seconds"] / best} for row in rows]


COLUMNS: list[Column] = [
    ("method", "{method}"),
    ("seconds", "{seconds:.1f}"),
    ("of the fastest other engine's", "{of_best:.2f}"),
    ("generated tokens", "{tokens}"),
    ("last prompt's tokens", "{prompt}"),
    ("prompt tokens computed", "{computed}"),
    ("equal to plain", "{equal}"),
]


@benchmark
@click.option("--model", required=True, help="A GGUF file, or a name.")
@click.option("--methods", default=f"{PLAIN},auto", show_default=True, help="Drafters, and PEER[:SPECULATION].")
@click.option("--files", default=5, show_default=True, type=click.IntRange(1))
@click.option("--edits", "each", default=4, show_default=True, type=click.IntRange(1), help="Turns per file.")
@click.option("--max-new-tokens", default=250, show_default=True, type=click.IntRange(1))
@peer_option
def main(model: str, methods: str, files: int, each: int, max_new_tokens: int, peers: Sequence[str]) -> dict[str, Any]:
    """Replay a coding session: a table, then one JSON line."""
    turns, threads = list(session(files, each)), torch.get_num_threads()
    chosen = dict.fromkeys([PLAIN, *split_methods(methods)])
    others = servers(model, threads, peers)
    for engine in (method.partition(":")[0] for method in chosen):
        if engine == MISTRAL or engine in ENGINES.keys() - others.keys():
            raise UserError(f"{engine!r} needs --peer {engine}=COMMAND, a server of llama.cpp or ik_llama.cpp")
    with ExitStack() as stack:
        urls = {}
        for method in chosen:
            engine, _, speculation = method.partition(":")
            if engine in ENGINES:
                urls[method] = stack.enter_context(closing(others[engine](f"{speculation or 'none'} {_KEEPING}"))).url
            else:
                own = stack.enter_context(serving(model=model, drafter=method, served_model_name=_NAME))
                urls[method] = own.url.removesuffix("/v1")
        replay([[{"role": "user", "content": "Hello"}]], urls, 8)  # warms up
        rows = rows_of(replay(turns, urls, max_new_tokens))
    wide_console().print(make_table(COLUMNS, rows, title=f"{len(turns)} turns, threads: {threads}"))
    return {"model": Path(model).name, "processor": processor(), "threads": threads, "rows": rows}
