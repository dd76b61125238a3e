"""What the server offers: its model under its names, its endpoints, and what it answers at other paths."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import Any

from mmspec.pipeline import Pipeline
from mmspec.serving.errors import APIError

ENDPOINTS = {
    "POST /v1/chat/completions": "answers a conversation of texts, images and videos",
    "POST /v1/completions": "continues one or several texts as they are, without the chat template",
    "POST /v1/responses": "the same in the form of the Responses API, with stored conversations",
    "GET /v1/responses/{name}": "a stored response",
    "DELETE /v1/responses/{name}": "drops it",
    "GET /v1/models": "the model's names",
    "POST /tokenize": "tokens of a text or a conversation",
    "POST /detokenize": "text of tokens",
    "GET /health": "status 200 while the server accepts requests, 503 while it loads or stops",
    "GET /readyz": "the same",
    "GET /livez": "status 200 while the process answers",
    "GET /metrics": "figures for Prometheus",
}
_INSTEAD = {
    "/v1/embeddings": "the model generates text: use a server of embeddings",
    "/v1/rerank": "the model generates text: use a server of embeddings",
    "/v1/score": "the model generates text: use a server of embeddings",
    "/v1/moderations": "the model generates text: ask it through POST /v1/chat/completions",
    "/v1/audio": "the model reads no audio: use POST /v1/chat/completions with texts, images and videos",
    "/v1/realtime": "the model reads no audio: use POST /v1/chat/completions with stream: true",
    "/v1/images": "the model generates text only: use POST /v1/chat/completions, which reads images",
    "/v1/videos": "the model generates text only: use POST /v1/chat/completions, which reads videos",
    "/v1/files": "send images and videos as data URIs to POST /v1/chat/completions",
    "/v1/uploads": "send images and videos as data URIs to POST /v1/chat/completions",
    "/v1/batches": "send requests to POST /v1/chat/completions at the same time: they decode together",
    "/v1/conversations": "use POST /v1/responses with previous_response_id",
    "/v1/assistants": "use POST /v1/responses with previous_response_id",
    "/v1/threads": "use POST /v1/responses with previous_response_id",
    "/v1/fine_tuning": "the server does not train: see the command mmspec train",
    "/v1/messages": "this is OpenAI's API, not Anthropic's: use POST /v1/chat/completions",
    "/chat/completions": "the base URL ends with /v1: use POST /v1/chat/completions",
    "/completions": "the base URL ends with /v1: use POST /v1/completions",
    "/responses": "the base URL ends with /v1: use POST /v1/responses",
    "/completion": "this is OpenAI's API, not llama.cpp's: use POST /v1/completions",
    "/generate": "use POST /v1/completions",
    "/api": "this is OpenAI's API, not Ollama's: use POST /v1/chat/completions",
}
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>mmspec</title>
<h1>mmspec serve: {name}</h1>
<p>OpenAI's API with speculative decoding. Clients use <code>/v1</code> of this address as their base URL.</p>
<table>{rows}</table>
<p>Fields, limits and examples: <code>docs/serving.md</code> in mmspec's repository, and the site that
<code>make docs</code> builds of it.</p>
"""


class Catalog:
    """The model of a pipeline under its names.

    Args:
        names: what requests may call the model; responses use the first one. By default the pipeline's name.
    """

    def __init__(self, pipe: Pipeline, names: Sequence[str] = ()) -> None:
        self._pipe, self._names = pipe, tuple(names) or (pipe.name,)
        self._created = int(time.time())

    @property
    def name(self) -> str:
        return self._names[0]

    def check(self, name: str | None) -> None:
        """Raises ``APIError`` if the model has another name; None is right."""
        if name is not None and name not in self._names:
            expected = " or ".join(map(repr, self._names))
            message = f"unknown model: expected {expected}, got {name[:200]!r}"
            raise APIError(404, message, "model", "model_not_found")

    def model(self, name: str) -> dict[str, Any]:
        """OpenAI's object of the model, with vLLM's ``max_model_len``.

        Raises:
            APIError: see ``check``.
        """
        self.check(name)
        limit = {"max_model_len": self._pipe.context_limit}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "mmspec", **limit}

    def models(self) -> dict[str, Any]:
        """OpenAI's list of models: one object for each name."""
        return {"object": "list", "data": [self.model(name) for name in self._names]}

    def page(self) -> str:
        rows = "".join(f"<tr><td><code>{path}</code><td>{does}" for path, does in ENDPOINTS.items())
        return _PAGE.format(name=html.escape(self.name), rows=rows)


def unknown_path(path: str) -> APIError:
    """The error of a path without an endpoint, which names one to use instead."""
    shown = path[:100]
    for prefix, instead in _INSTEAD.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return APIError(404, f"there is no {shown} here: {instead}")
    return APIError(404, f"there is no {shown} here: expected one of {', '.join(ENDPOINTS)}")
