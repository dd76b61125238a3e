"""Backends that answer the requests of a check: local pipelines, transformers' ``generate``, and servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Self

import httpx
import torch

from mmspec.cache.prefix_cache import PrefixCache
from mmspec.compare import first_difference
from mmspec.errors import UserError, first_line
from mmspec.http_client import open_client, stream_json
from mmspec.pipeline import Generation, Pipeline
from mmspec.sampling.params import SamplingParams

Token = int | bytes  # a token's id, or its text if a server does not return ids
_ALTERNATIVES = 5
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class SkippedError(Exception):
    """A case or a part of a case cannot run; the message is the reason, or empty."""


@dataclass(frozen=True)
class Question:
    """A chat request with fields of OpenAI's API and vLLM's.

    Attributes:
        messages: chat messages as JSON text, so that questions can be compared.
        tools: functions as JSON text, or "".
        seed: seed of the first choice; choice i uses ``seed + i``.
        top_logprobs: number of alternatives per token with log probabilities.
        adapter: name of a LoRA adapter, which servers list as a model.
    """

    messages: str
    max_tokens: int | None = 48
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | None = None
    n: int = 1
    min_tokens: int | None = None
    top_logprobs: int | None = None
    tools: str = ""
    adapter: str | None = None

    @classmethod
    def user(cls, text: str, *images: str, **fields: Any) -> Question:
        """A user message with optional images, given as data URIs."""
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        return cls(json.dumps([{"role": "user", "content": content}]), **fields)

    def then(self, answer: str, following: Question) -> Question:
        turns = [*json.loads(self.messages), {"role": "assistant", "content": answer}, *json.loads(following.messages)]
        return replace(following, messages=json.dumps(turns))

    @property
    def text(self) -> str:
        """The last user message, shortened."""
        content = json.loads(self.messages)[-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        return text if len(text) < 64 else f"{text[:60]} ..."

    def params(self, choice: int = 0) -> SamplingParams:
        seed = None if self.seed is None else self.seed + choice
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop")
        given = {name: getattr(self, name) for name in names}
        return SamplingParams(**given, seed=seed, max_new_tokens=self.max_tokens, min_new_tokens=self.min_tokens)


@dataclass(frozen=True)
class Answer:
    """One choice of an answer.

    Attributes:
        tokens: token ids; None if not known.
        steps: if requested, for each token: the token, its log probability, and log probabilities of the most probable
            tokens.
        accepted: number of accepted draft tokens; None if not known.
        cached: prompt tokens found in a prefix cache.
        failure: error of the drafter, after which decoding was plain.
    """

    text: str
    finish_reason: str
    tokens: tuple[int, ...] | None = None
    steps: tuple[tuple[Token, float, tuple[tuple[Token, float], ...]], ...] = ()
    accepted: int | None = None
    cached: int = 0
    failure: str = ""

    @property
    def length(self) -> int:
        """Number of tokens, or of words if tokens are not known."""
        return len(self.tokens if self.tokens is not None else self.steps or self.text.split())


@dataclass(frozen=True)
class Difference:
    """The first difference between two answers: its token index and logit margin if known (see
    ``mmspec.compare.Difference``), and the shortened texts from there on."""

    position: int | None
    found: str
    expected: str
    margin: float | None


class LocalSide:
    """A local pipeline that answers questions, with or without a prefix cache, and with ``size`` draft tokens per step
    (None is adaptive). Prompt and answer have at most ``limit`` tokens; None if not known."""

    name = "plain decoding"

    def __init__(self, pipe: Pipeline, prefixes: PrefixCache | None = None, size: int | None = None) -> None:
        self.pipe, self.limit = pipe, pipe.context_limit
        self.adapters: Sequence[str] = pipe.adapters
        self._prefixes, self._size = prefixes, size

    def request(self, question: Question) -> dict[str, Any]:
        """Convert to a request of ``Pipeline.generate_batch``; a text prompt without a chat template."""
        messages = json.loads(question.messages)
        if self.pipe.processor.chat_template_text():
            return {"prompt": messages}
        if not all(isinstance(message["content"], str) for message in messages):
            raise SkippedError("images need a chat template: there is none")
        return {"prompt": "\n".join(message["content"] for message in messages)}

    def keywords(self, question: Question) -> dict[str, Any]:
        """Keywords of ``Pipeline.generate`` other than sampling parameters."""
        about = {"num_draft_tokens": self._size, "logprobs": question.top_logprobs, "adapter": question.adapter}
        return {**about, "context_limit": self.limit, **_tools(question)}

    def ask(self, *questions: Question) -> list[list[Answer]]:
        """Choices of each question, sent concurrently; ``SkippedError`` if this side does not support the questions."""
        keywords = self.keywords(questions[0])
        requests = [
            {**self.request(question), "params": question.params(choice)}
            for question in questions
            for choice in range(question.n)
        ]
        self._use_prefixes()
        found = iter(self.pipe.generate_batch(requests, **keywords))
        return [[self._answer(next(found)) for _ in range(question.n)] for question in questions]

    def stream(self, question: Question) -> Iterator[Answer]:
        """Stream an answer; closing the iterator aborts the request."""
        self._use_prefixes()
        for piece in self.pipe.stream(**self.request(question), params=question.params(), **self.keywords(question)):
            yield Answer(piece.text, piece.finish_reason or "", tuple(piece.token_ids))

    def count(self, question: Question) -> int:
        return int(self.pipe.encode([self.request(question)], **_tools(question)).input_ids.shape[1])

    def difference(self, question: Question, found: Answer, own: Answer) -> Difference | None:
        """The first difference between another side's answer and this side's answer."""
        assert own.tokens is not None
        if found.tokens == own.tokens:
            same = found.text == own.text and found.finish_reason == own.finish_reason
            texts = [f"{one.text} ({one.finish_reason})" for one in (found, own)]
            return None if same else Difference(None, texts[0], texts[1], None)
        assert found.tokens is not None
        keywords = {"params": question.params(), **self.keywords(question)}
        first = first_difference(self.pipe, self.request(question), keywords, found.tokens, own.tokens)
        at, decode = first.position, partial(self.pipe.processor.decode, skip_special_tokens=False)
        texts = [decode(tokens[at : at + 8], tokens[:at]) for tokens in (found.tokens, own.tokens)]
        return Difference(at, texts[0], texts[1], first.margin)

    def limited(self, limit: int | None) -> Self:
        """A copy of this side with at most this context limit."""
        other = copy(self)
        other.limit = limit
        return other

    def _use_prefixes(self) -> None:
        """Set this side's prefix cache in the engine, which all sides share."""
        if self.pipe.engine.prefixes is not self._prefixes:
            self.pipe.engine.use_prefixes(self._prefixes)

    def _answer(self, one: Generation) -> Answer:
        steps = tuple((step.token_id, step.logprob, tuple(step.top)) for step in one.logprobs)
        counts = one.stats.num_accepted_draft_tokens, one.stats.num_cached_tokens
        return Answer(one.text, one.finish_reason, tuple(one.token_ids), steps, *counts, one.stats.drafter_error)


class GenerateSide(LocalSide):
    """transformers' ``generate`` on a pipeline's model: greedy, one question at a time."""

    name = "generate"

    def ask(self, *questions: Question) -> list[list[Answer]]:
        return [[self._generated(question)] for question in questions]

    def _generated(self, question: Question) -> Answer:
        if question.temperature or question.top_logprobs is not None:
            raise SkippedError("")
        pipe = self.pipe
        prompt = pipe.encode([self.request(question)], **_tools(question))
        ids = prompt.input_ids
        most = question.max_tokens if self.limit is None else min(question.max_tokens or 256, self.limit - ids.shape[1])
        options = {"stop_strings": question.stop, "tokenizer": pipe.processor.tokenizer} if question.stop else {}
        options |= {"min_new_tokens": question.min_tokens} if question.min_tokens else {}
        if self.adapters:
            pipe.target.adapters.use(question.adapter)
        options |= {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": most}
        try:
            output = pipe.model.generate(input_ids=ids, **prompt.inputs, **options)
        except Exception as error:
            raise SkippedError(f"generate raises {type(error).__name__}: {first_line(error)}") from error
        tokens = output[0, ids.shape[1] :].tolist()
        return Answer("", "", tuple(tokens))

    def difference(self, question: Question, found: Answer, own: Answer) -> Difference | None:
        return super().difference(question, replace(found, text="", finish_reason=""), own)


class ServerSide:
    """A server with OpenAI's API, with the methods of ``LocalSide``.

    ``model`` is by default the first that the server lists, ``adapters`` are the others. If ``scored``, log
    probabilities are requested, to compute margins of differences. ``version`` has address and name of the server
    program.
    """

    def __init__(self, name: str, url: str, model: str | None, key: str | None, scored: bool = False) -> None:
        self.name, self._scored = name, scored
        base = url.rstrip("/").removesuffix("/v1")
        self._client = open_client(base, key)
        try:
            reply = self._client.get("/v1/models", timeout=30)
            reply.raise_for_status()
            listed = reply.json()["data"]
            names = [one["id"] for one in listed]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            self.close()
            raise UserError(f"{url}: expected a server with OpenAI's API, received {first_line(error)}") from error
        if not names or (model is not None and model not in names):
            self.close()
            raise UserError(f"{url}: expected a server of {model or 'a model'}, received one of {names}")
        self.model = model or names[0]
        self.adapters: Sequence[str] = [name for name in names if name != self.model]
        entry = listed[names.index(self.model)]
        self.limit: int | None = entry.get("max_model_len") or self._slot_size()
        self.version = f"{base} ({reply.headers.get('server', 'unnamed')})"

    def close(self) -> None:
        self._client.close()

    def total_accepted(self) -> int | None:
        """Draft tokens accepted since the server's start, from vLLM's metrics; None without these metrics."""
        with suppress(httpx.HTTPError, ValueError):
            lines = self._client.get("/metrics", timeout=30).text.splitlines()
            counts = [line.split()[-1] for line in lines if line.startswith(_ACCEPTED)]
            return int(sum(map(float, counts))) if counts else None
        return None

    def _slot_size(self) -> int | None:
        """Context length per slot of llama.cpp's server; None for other servers."""
        with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            return int(self._client.get("/props", timeout=30).json()["default_generation_settings"]["n_ctx"])
        return None

    def _body(self, question: Question) -> dict[str, Any]:
        fields = {**vars(question), "messages": json.loads(question.messages), "adapter": None}
        fields["tools"] = json.loads(question.tools) if question.tools else None
        if self._scored and not question.temperature and question.top_logprobs is None:
            fields["top_logprobs"] = _ALTERNATIVES
        if fields["top_logprobs"] is not None:
            fields["logprobs"] = True
        fields["model"] = question.adapter or self.model
        fields["repeat_penalty"] = question.repetition_penalty  # llama.cpp's name
        return {name: value for name, value in fields.items() if value is not None}

    def ask(self, *questions: Question) -> list[list[Answer]]:
        with ThreadPoolExecutor(len(questions)) as pool:
            return list(pool.map(self._answers, questions))

    def _answers(self, question: Question) -> list[Answer]:
        reply = self._post(question)
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        accepted, cached = _accepted(reply), _at(reply, "usage", "prompt_tokens_details", "cached_tokens") or 0
        share = None if accepted is None else accepted // len(choices)
        return [
            Answer(_text(one["message"]), one["finish_reason"], None, _steps(one), share, cached) for one in choices
        ]

    def _post(self, question: Question) -> dict[str, Any]:
        reply = self._client.post("/v1/chat/completions", json=self._body(question))
        if 400 <= reply.status_code < (600 if self._scored else 500):  # a reference may not support all requests
            message = re.search(r'"message": ?"((?:[^"\\]|\\.)*)"', reply.text)
            raise SkippedError(f"{self.name} refuses: {message[1] if message else reply.text[:200]}")
        reply.raise_for_status()
        return dict(reply.json())

    def stream(self, question: Question) -> Iterator[Answer]:
        body = {**self._body(question), "stream": True}
        with closing(stream_json(self._client, "/v1/chat/completions", body)) as chunks:  # an abort closes it at once
            for choice in (choice for chunk in chunks for choice in chunk.get("choices", ())):
                yield Answer(_text(choice["delta"]), choice.get("finish_reason") or "")

    def count(self, question: Question) -> int:
        return int(self._post(replace(question, max_tokens=1, top_logprobs=None))["usage"]["prompt_tokens"])

    def difference(self, question: Question, found: Answer, own: Answer) -> Difference | None:
        if found.text == own.text and found.finish_reason == own.finish_reason:
            return None
        a, b = found.text.encode(), own.text.encode()
        at = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        position, margin = _margin(found, own, at)
        texts = [text[max(at - 8, 0) : at + 24].decode(errors="replace") for text in (a, b)]
        if found.text == own.text:
            texts = [f"finish reason {found.finish_reason}", f"finish reason {own.finish_reason}"]
        return Difference(position, texts[0], texts[1], margin)


def _tools(question: Question) -> dict[str, Any]:
    return {"tools": json.loads(question.tools)} if question.tools else {}


def _margin(found: Answer, own: Answer, at: int) -> tuple[int | None, float | None]:
    """Position of the token at a byte offset, and the log-probability difference at this position between the expected
    token and the most probable token that matches the other text; None if not known."""
    pieces = [token for token, _, _ in own.steps if isinstance(token, bytes)]
    before = b"".join(pieces).find(own.text.encode())
    if before < 0 or not pieces:
        return None, None
    starts = [0, *accumulate(map(len, pieces))]
    position = max(place for place, start in enumerate(starts) if start <= at + before)
    if position == len(pieces):
        return position, None
    _, logprob, top = own.steps[position]
    rest = found.text.encode()[max(starts[position] - before, 0) :]
    fits = rest.startswith if rest else (lambda token: found.finish_reason == "stop")
    fitting = [other for token, other in top if isinstance(token, bytes) and token != pieces[position] and fits(token)]
    return position, abs(logprob - max(fitting)) if fitting else None  # negative if a processor has forbidden tokens


def _steps(choice: dict[str, Any]) -> tuple[Any, ...]:
    tokens = _at(choice, "logprobs", "content") or ()

    def spelt(one: dict[str, Any]) -> bytes:
        return bytes(one["bytes"]) if one.get("bytes") else str(one["token"]).encode()

    return tuple(
        (spelt(one), one["logprob"], tuple((spelt(other), other["logprob"]) for other in one["top_logprobs"]))
        for one in tokens
    )


def _text(message: dict[str, Any]) -> str:
    """Complete text of a message: reasoning, content and tool calls."""
    parts = [message.get("reasoning_content") or message.get("reasoning") or "", message.get("content") or ""]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name") or "", function.get("arguments") or ""]
    return "".join(parts)


def _accepted(reply: dict[str, Any]) -> int | None:
    """Accepted draft tokens as reported by this server, OpenAI's API or llama.cpp; None if not reported."""
    places = (
        ("metrics", "speculative_decoding", "num_accepted_draft_tokens"),
        ("usage", "completion_tokens_details", "accepted_prediction_tokens"),
        ("timings", "draft_n_accepted"),
    )
    return next((found for place in places if (found := _at(reply, *place)) is not None), None)


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


Side = LocalSide | ServerSide
