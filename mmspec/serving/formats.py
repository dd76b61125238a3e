"""Response objects of OpenAI's API, complete and as stream chunks."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter as clock
from typing import Any

from mmspec.drafters.registry import PLAIN
from mmspec.engine.stats import Stats, TokenLogprob
from mmspec.pipeline import Piece
from mmspec.serving.errors import APIError
from mmspec.serving.metrics import per_request
from mmspec.serving.schemas import GenerationRequest
from mmspec.serving.tools import CallReader, Delta
from mmspec.targets.processor import Processor

_LEAST = -9999.0  # JSON has no infinity


def spelt(token: bytes) -> str:
    """Text of a token; incomplete characters are shown as bytes, like OpenAI's ``bytes:\\xe2\\x80``."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _timings(usage: Mapping[str, Any], *seconds: float) -> dict[str, float]:
    """llama.cpp's ``timings``, given the seconds until the first token and after it."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    tokens, found = (usage["prompt_tokens"] - cached, usage["completion_tokens"]), {"cache_n": cached}
    for name, count, passed in zip(("prompt", "predicted"), tokens, seconds, strict=True):
        found |= {f"{name}_n": count, f"{name}_ms": passed * 1e3}
        found |= {f"{name}_per_token_ms": passed * 1e3 / max(count, 1), f"{name}_per_second": count / max(passed, 1e-9)}
    return found


def counts(prompt: int, generated: int) -> dict[str, int]:
    """Token counts of ``usage``."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class WireFormat(ABC):
    """Builds the response of one request from the pieces of its choices. ``before``: text to prepend to each choice."""

    prefix: str
    whole_object: str
    chunk_object: str
    end = b"data: [DONE]\n\n"
    """What ends a stream."""

    api, media_type = "", "text/event-stream"
    """Path of the API, for the format of errors, and content type of streams."""

    def __init__(
        self, model: str, processor: Processor, asked: GenerationRequest, before: Sequence[str], drafter: str = PLAIN
    ) -> None:
        self._processor, self._n, self._logprobs = processor, asked.n, asked.alternatives is not None
        self._usage_in, self._drafter = asked.usage_in, drafter
        self._head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._made, self._times = clock(), dict[str, float]()
        self.choices = [Piece(text, []) for text in before]

    def whole(self) -> dict[str, Any]:
        """The complete response; all choices must be complete."""
        choices = [
            {
                "index": index,
                **self._content(index, choice),
                "logprobs": self._logprobs_of(choice.logprobs, choice),
                "finish_reason": self._finish_reason(index),
            }
            for index, choice in enumerate(self.choices)
        ]
        return {**self._head, "object": self.whole_object, "choices": choices, **self._figures()}

    def add(self, index: int, piece: Piece) -> Piece:
        """Append a piece to a choice; returns the whole choice so far."""
        before = self.choices[index]
        before.token_ids.extend(piece.token_ids)
        before.logprobs.extend(piece.logprobs)
        self.choices[index] = replace(
            piece,
            text=before.text + piece.text,
            token_ids=before.token_ids,
            logprobs=before.logprobs,
            reasoning=before.reasoning + piece.reasoning,
            num_reasoning_tokens=before.num_reasoning_tokens + piece.num_reasoning_tokens,
        )
        return self.choices[index]

    def event(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as a server-sent event, named by its type if it has one."""
        name = f"event: {chunk['type']}\n".encode() if "type" in chunk else b""
        return name + b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        """Chunks before the first piece."""
        return ()

    def chunks(self, index: int, piece: Piece) -> Iterable[dict[str, Any]]:
        """Chunks for a piece of a choice. Without usage, the last piece's chunk has the statistics."""
        choice = self.add(index, piece)
        delta = {**self._delta(index, piece), "logprobs": self._logprobs_of(piece.logprobs, choice)}
        chunk = self._chunk({"index": index, **delta, "finish_reason": self._finish_reason(index)})
        ended = all(choice.finish_reason is not None for choice in self.choices)
        if self._usage_in == "none":
            figures = self._figures() if ended else {}
            return [chunk | {name: figures[name] for name in ("metrics", "timings") if ended}]
        last = [{**self._chunk(), **self._figures()}] if ended else []
        known = counts(choice.num_prompt_tokens, len(choice.token_ids))
        usage = known if self._usage_in == "every" else None
        return [{**chunk, "usage": usage}, *last]

    def failed(self, error: APIError) -> Iterable[dict[str, Any]]:
        """Chunks of an error after the first piece."""
        return [error.content(self.api)]

    def logged(self) -> dict[str, Any]:
        """Fields for the request log; values that are known only after choices end are None until then."""
        stats = [choice.stats or Stats() for choice in self.choices]
        reasons = [self._finish_reason(index) for index in range(len(self.choices))]
        return {
            "id": self._head["id"],
            "finish": None if None in reasons else ",".join(dict.fromkeys(map(str, reasons))),
            "prompt_tokens": sum(one.num_prompt_tokens for one in stats[:: self._n]) or None,
            "generated_tokens": sum(len(choice.token_ids) for choice in self.choices),
            "acceptance_length": round(Stats.combined(stats).mean_acceptance_length, 2) or None,
            **{name: f"{seconds:.3f}" for name, seconds in self._times.items()},
        }

    def reached(self, stage: str) -> None:
        """Record the time at which a stage is first reached, for the log."""
        self._times.setdefault(stage, clock() - self._made)

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def _figures(self) -> dict[str, Any]:
        stats = [choice.stats or Stats() for choice in self.choices]
        whole = Stats.combined(stats)
        asked = Stats.combined(stats[:: self._n])  # one prompt has n choices
        usage = {
            **counts(asked.num_prompt_tokens, whole.num_generated_tokens),
            "prompt_tokens_details": {"cached_tokens": asked.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": sum(one.num_reasoning_tokens for one in self.choices)},
        }
        first = self._times.get("first_token_s", 0.0)
        seconds = first - self._times.get("queue_s", 0.0), clock() - self._made - first
        return {"usage": usage, "metrics": per_request(whole, self._drafter), "timings": _timings(usage, *seconds)}

    def _finish_reason(self, index: int) -> str | None:
        """OpenAI's finish reason; None while the choice is running."""
        return self.choices[index].finish_reason

    @abstractmethod
    def _content(self, index: int, choice: Piece) -> Mapping[str, Any]:
        """Fields of a whole choice that contain its text."""

    @abstractmethod
    def _delta(self, index: int, piece: Piece) -> Mapping[str, Any]:
        """Fields of a chunk's choice that contain the new text."""

    @abstractmethod
    def _logprobs_of(self, tokens: Sequence[TokenLogprob], choice: Piece) -> dict[str, Any] | None:
        """Format the log probabilities of a choice's next tokens; called once per token, after its text was added."""


class ChatFormat(WireFormat):
    """``chat.completion`` and ``chat.completion.chunk``; ``reader`` makes parsers of tool calls, None for text."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, *common: Any, reader: Callable[[], CallReader] | None = None) -> None:
        super().__init__(*common)
        self._readers = None if reader is None else [reader() for _ in self.choices]

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        for index in range(len(self.choices)):
            yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def _read(self, index: int, piece: Piece) -> Delta:
        if self._readers is None:
            return Delta(piece.text, reasoning=piece.reasoning)
        final = piece.finish_reason is not None
        return self._readers[index].feed(piece.text, final=final, reasoning=piece.reasoning)

    def _content(self, index: int, choice: Piece) -> Mapping[str, Any]:
        read = self._read(index, choice).to_dict()
        empty = None if "tool_calls" in read or choice.reasoning else ""
        calls = [{key: one for key, one in call.items() if key != "index"} for call in read.pop("tool_calls", ())]
        message = {"role": "assistant", "content": empty, "refusal": None, **read}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def _delta(self, index: int, piece: Piece) -> Mapping[str, Any]:
        delta = self._read(index, piece).to_dict()
        return {"delta": delta or ({"content": ""} if self._readers is None else {})}

    def _finish_reason(self, index: int) -> str | None:
        reason = super()._finish_reason(index)
        called = self._readers is not None and self._readers[index].calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _logprobs_of(self, tokens: Sequence[TokenLogprob], choice: Piece) -> dict[str, Any] | None:
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
        content = self._processor.token_bytes(token)
        return {"token": spelt(content), "logprob": max(logprob, _LEAST), "bytes": list(content)}


class TextFormat(WireFormat):
    """``text_completion``."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        for index, choice in enumerate(self.choices):
            if choice.text:
                yield self._chunk({"index": index, "text": choice.text, "logprobs": None, "finish_reason": None})

    def _content(self, index: int, choice: Piece) -> Mapping[str, Any]:
        return {"text": choice.text}

    def _delta(self, index: int, piece: Piece) -> Mapping[str, Any]:
        return {"text": piece.text}

    def _logprobs_of(self, tokens: Sequence[TokenLogprob], choice: Piece) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        contents = [self._processor.token_bytes(one.token_id) for one in tokens]
        return {
            "tokens": [spelt(content) for content in contents],
            "token_logprobs": [max(one.logprob, _LEAST) for one in tokens],
            "top_logprobs": [self._by_text(one.top) for one in tokens],
            # Clipped to the end at a stop string.
            "text_offset": [min(one.text_offset, len(choice.text)) for one in tokens],
        }

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Log probabilities by token text; later tokens of equal text are named ``token_id:7``, as in vLLM."""
        found: dict[str, float] = {}
        for token, logprob in top:
            text = spelt(self._processor.token_bytes(token))
            found[f"token_id:{token}" if text in found else text] = max(logprob, _LEAST)
        return found


class InfillFormat(TextFormat):
    """llama.cpp's answer of ``/infill``; the chunks of a stream have its fields, too."""

    prefix, whole_object, chunk_object, end = "infill-", "infill", "infill", b""

    def whole(self) -> dict[str, Any]:
        return self._answer(self.choices[0].text)

    def chunks(self, index: int, piece: Piece) -> Iterable[dict[str, Any]]:
        self.add(index, piece)
        return [self._answer(piece.text)]

    def _answer(self, text: str) -> dict[str, Any]:
        figures, reason = self._figures(), self._finish_reason(0)
        usage, kind = figures["usage"], {None: "none", "length": "limit"}.get(reason, "eos")
        counts = {"tokens_predicted": usage["completion_tokens"], "tokens_evaluated": usage["prompt_tokens"]}
        counts["tokens_cached"] = usage["prompt_tokens_details"]["cached_tokens"]
        state = {"content": text, "stop": reason is not None, "stop_type": kind, "truncated": False}
        return {**state, "model": self._head["model"], **counts, "metrics": figures["metrics"]}
