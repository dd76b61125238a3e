"""A program that answers HTTP as llama-server does, without a model: for tests.

It logs its options and every request as JSON lines in its folder. Completions count up from the prompt's last token;
with the option ``--text TEXT``, they have this text and no token ids. A chat's answer is its last message, reversed;
from seven messages on, it also calls a tool.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

LOADING = 2
"""Questions after its health that are answered before it has loaded."""
CRASH = 13
"""Tokens to generate at which it dies."""
STEP, PROMPT_STEP = 0.002, 0.001
"""Seconds per token, generated and of a prompt."""


class Handler(BaseHTTPRequestHandler):
    health = 0

    def do_GET(self) -> None:
        Handler.health += 1
        self.reply(200 if Handler.health > LOADING else 503, {"status": "ok"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        log({"path": self.path, **request})
        if Handler.health <= LOADING:
            return self.reply(503, {"error": {"code": 503, "message": "Loading model"}})
        if self.path.endswith("/chat/completions"):
            size, turns = len(json.dumps(request["messages"])), len(request["messages"])
            if self.refused(size):
                return
            usage = {"completion_tokens": 3, "prompt_tokens": size, "prompt_tokens_details": {"cached_tokens": 2}}
            content = request["messages"][-1]["content"][::-1][: request["max_tokens"]]
            calls = {"tool_calls": [{"id": "1", "function": {"name": "read_file"}}]} if turns > 6 else {}
            self.reply(200, {"choices": [{"message": {"content": content, **calls}}], "usage": usage})
            return
        prompt, count = request["prompt"], request["n_predict"]
        if count == CRASH:
            print(
                "error: an earlier one\nGGML_ASSERT(false) failed\n\n#0 main\nsrv: exiting due to an error", flush=True
            )
            os._exit(6)
        if self.refused(len(prompt)):
            return
        time.sleep(STEP * count)
        tokens = [prompt[-1] + place for place in range(1, count + 1)]
        times = {"prompt_ms": 1000 * PROMPT_STEP * len(prompt), "predicted_ms": 1000 * STEP * (count - 1)}
        answer = {"content": OPTIONS["--text"]} if "--text" in OPTIONS else {"content": "", "tokens": tokens}
        self.reply(200, {**answer, "timings": {"predicted_n": count, **times}})

    def refused(self, size: int) -> bool:
        if large := size > int(OPTIONS["--ctx-size"]):
            self.reply(400, {"error": {"code": 400, "message": "request exceeds the available context size"}})
        return large

    def reply(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *parts: object) -> None:
        """Nothing is printed."""


def log(value: object) -> None:
    with Path(__file__).with_suffix(".jsonl").open("a") as file:
        file.write(json.dumps(value) + "\n")


def install(folder: Path) -> Path:
    program = folder / "llama-server"
    program.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
    program.chmod(0o755)
    return program


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word not in ("--jinja", "--log-disable")]
    OPTIONS = {**dict(zip(given[::2], given[1::2], strict=True)), "--log-disable": given != sys.argv[1:]}
    if OPTIONS.get("--spec-type") == "nonsense":
        print("error: unknown speculative type: nonsense\n\nto show complete usage, run with -h", file=sys.stderr)
        sys.exit(1)
    log(OPTIONS)
    HTTPServer((OPTIONS["--host"], int(OPTIONS["--port"])), Handler).serve_forever()
