"""Response objects of OpenAI's API, whole and as chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmspec.answer import Piece
from mmspec.engine.stats import Stats
from mmspec.sampling.logprobs import TokenLogprob
from mmspec.serving.errors import APIError
from mmspec.serving.metrics import per_request
from mmspec.serving.protocol import GenerationRequest
from mmspec.serving.tool_calls import CallReader

_LEAST = -9999.0  # JSON has no infinity


@dataclass
class Answer:
    """A choice that is complete, or grows."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: Stats | None = None
    finish_reason: str | None = None

    def append(self, piece: Piece) -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.stats, self.finish_reason = piece.stats, piece.finish_reason


class Format(ABC):
    """Builds the responses of one request.

    Args:
        decode: token id to text.
        asked: the request.
        before: text before each choice's own.
    """

    prefix: str
    whole_object: str
    chunk_object: str
    end = b"data: [DONE]\n\n"
    """What ends a stream."""

    def __init__(
        self, model: str, decode: Callable[[int], str], asked: GenerationRequest, before: Sequence[str]
    ) -> None:
        self._decode, self._n, self._logprobs = decode, asked.n, asked.alternatives is not None
        self._include_usage = asked.include_usage
        self._head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.answers = [Answer(text) for text in before]

    def whole(self) -> dict[str, Any]:
        """The response, once all choices are complete."""
        choices = [
            {
                "index": index,
                **self._content(index, answer.text),
                "logprobs": self._logprobs_of(answer.logprobs, 0),
                "finish_reason": self._finish_reason(index),
            }
            for index, answer in enumerate(self.answers)
        ]
        return {**self._head, "object": self.whole_object, "choices": choices, **self._figures()}

    def event(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as a server-sent event."""
        return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        """Chunks before the first piece."""
        return ()

    def chunks(self, index: int, piece: Piece) -> Iterable[dict[str, Any]]:
        """Chunks of a choice's piece. Without ``include_usage``, that of the last piece contains the figures."""
        offset = len(self.answers[index].text)
        self.answers[index].append(piece)
        delta = {**self._delta(index, piece.text), "logprobs": self._logprobs_of(piece.logprobs, offset)}
        choice = {"index": index, **delta, "finish_reason": self._finish_reason(index)}
        chunk = self._chunk(choice)
        ended = all(answer.finish_reason is not None for answer in self.answers)
        if not self._include_usage:
            return [{**chunk, "metrics": self._figures()["metrics"]} if ended else chunk]
        last = [{**self._chunk(), **self._figures()}] if ended else []
        return [{**chunk, "usage": None}, *last]

    def failed(self, error: APIError) -> Iterable[dict[str, Any]]:
        """Chunks of an error after the first piece."""
        return [error.content()]

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def _figures(self) -> dict[str, Any]:
        stats = [answer.stats or Stats() for answer in self.answers]
        whole = Stats.combined(stats)
        asked = Stats.combined(stats[:: self._n])  # one prompt has n choices
        prompt, generated = asked.num_prompt_tokens, whole.num_generated_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": asked.num_cached_tokens},
        }
        return {"usage": usage, "metrics": per_request(whole)}

    def _finish_reason(self, index: int) -> str | None:
        """Why a choice has ended, if it has."""
        return self.answers[index].finish_reason

    @abstractmethod
    def _content(self, index: int, text: str) -> Mapping[str, Any]:
        """Fields of a whole choice that contain its text."""

    @abstractmethod
    def _delta(self, index: int, text: str) -> Mapping[str, Any]:
        """Fields of a chunk's choice that contain the new text."""

    @abstractmethod
    def _logprobs_of(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        """Log probabilities of a choice's tokens, of which the first is at character ``offset`` of the text."""


class ChatFormat(Format):
    """``chat.completion`` and ``chat.completion.chunk``.

    Args:
        reader: makes readers of the tool calls in outputs; None if outputs are text.
    """

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, *common: Any, reader: Callable[[], CallReader] | None = None) -> None:
        super().__init__(*common)
        self._readers = None if reader is None else [reader() for _ in self.answers]

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        for index in range(len(self.answers)):
            yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def _content(self, index: int, text: str) -> Mapping[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._readers is not None:
            read = self._readers[index].feed(text, final=True).to_dict()
            calls = read.get("tool_calls", [])
            for call in calls:
                del call["index"]
            message["content"] = read.get("content", None if calls else "")
            message |= {"tool_calls": calls} if calls else {}
        return {"message": message}

    def _delta(self, index: int, text: str) -> Mapping[str, Any]:
        if self._readers is None:
            return {"delta": {"content": text}}
        return {"delta": self._readers[index].feed(text, final=self._finish_reason(index) is not None).to_dict()}

    def _finish_reason(self, index: int) -> str | None:
        reason = super()._finish_reason(index)
        called = self._readers is not None and self._readers[index].calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _logprobs_of(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {
                **self._token(one.token_id, one.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in one.top],
            }
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode(token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode())}


class TextFormat(Format):
    """``text_completion``."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        for index, answer in enumerate(self.answers):
            if answer.text:
                yield self._chunk({"index": index, "text": answer.text, "logprobs": None, "finish_reason": None})

    def _content(self, index: int, text: str) -> Mapping[str, Any]:
        return {"text": text}

    _delta = _content

    def _logprobs_of(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        texts = [self._decode(one.token_id) for one in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [max(one.logprob, _LEAST) for one in tokens],
            "top_logprobs": [{self._decode(token): max(value, _LEAST) for token, value in one.top} for one in tokens],
            "text_offset": [offset + sum(map(len, texts[:place])) for place in range(len(texts))],
        }
