"""mistral.rs's Python package as a server: ``python mistral_server.py MODEL PORT THREADS``; see ``peers.ENGINES``."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


def main(model: str, port: str, threads: str) -> None:
    """Answer greedy requests with ``prompt`` (token ids) and ``max_tokens``, in mistral.rs's form of a completion."""
    os.environ["RAYON_NUM_THREADS"] = threads  # read by the import
    from mistralrs import CompletionRequest, Runner, Which

    file: Any = Which.GGUF(str(Path(model).parent), Path(model).name)  # mistral.rs's stubs: not a Which
    runner = Runner(file, max_seqs=1, prefix_cache_n=0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = runner.detokenize_text(asked["prompt"], skip_special_tokens=False)
            request = CompletionRequest(text, "default", max_tokens=asked["max_tokens"], temperature=0.0, top_k=1)
            try:
                done = runner.send_completion_request(request)
                if done.usage.prompt_tokens != len(asked["prompt"]):
                    raise ValueError(f"mistral.rs read another prompt, of {done.usage.prompt_tokens} tokens")
            except ValueError as error:
                return self.reply(400, {"error": {"message": str(error)}})
            usage = {name: getattr(done.usage, name) for name in dir(done.usage) if name.endswith(("tokens", "sec"))}
            self.reply(200, {"choices": [{"text": done.choices[0].text}], "usage": usage})

        def reply(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
