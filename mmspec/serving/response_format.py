"""Responses of OpenAI's Responses API, whole and as events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mmspec.answer import Piece
from mmspec.serving.errors import APIError
from mmspec.serving.formats import ChatFormat
from mmspec.serving.tool_calls import Delta

Event = dict[str, Any]


class ResponseFormat(ChatFormat):
    """``response``: an output of messages and function calls, and the events by which it grows.

    The whole response is built from the same events.

    Args:
        about: fields of the response that are known before its output.

    Attributes:
        on_end: called with the whole response.
    """

    prefix, end = "resp_", b""

    def __init__(self, *common: Any, about: Mapping[str, Any], **keywords: Any) -> None:
        super().__init__(*common, **keywords)
        self._about = dict(about)
        self._output: list[dict[str, Any]] = []
        self._growing: dict[str, Any] | None = None  # the last item, if it goes on
        self._number = 0  # of the next event
        self.on_end: Callable[[dict[str, Any]], None] = lambda response: None

    def event(self, chunk: Event) -> bytes:
        return f"event: {chunk['type']}\n".encode() + super().event(chunk)

    def whole(self) -> dict[str, Any]:
        answer = self.answers[0]
        for _ in self._grow(answer.text, answer.logprobs):
            pass
        return self._ended()

    def first_chunks(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def chunks(self, index: int, piece: Piece) -> Iterator[Event]:
        self.answers[index].append(piece)
        yield from self._grow(piece.text, piece.logprobs)
        if piece.finish_reason is not None:
            response = self._ended()
            yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: APIError) -> Iterator[Event]:
        about = {"code": "server_error", "message": error.message}
        yield self._event("response.failed", response=self._response("failed") | {"error": about})

    def _ended(self) -> dict[str, Any]:
        response = self._response(self._status()) | self._usage()
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.on_end(response)
        return response

    def _status(self) -> str:
        return "incomplete" if self.answers[0].finish_reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        head = {"id": self._head["id"], "object": "response", "created_at": self._head["created"], "status": status}
        none = {"background": False, "error": None, "incomplete_details": None, "usage": None}
        return {**head, "model": self._head["model"], **none, **self._about, "output": [*self._output]}

    def _usage(self) -> dict[str, Any]:
        figures = self._figures()
        usage = figures["usage"]
        return figures | {
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        }

    def _grow(self, text: str, logprobs: Iterable[Any]) -> Iterator[Event]:
        """Events of a text that is new in the output; the last ones if the answer has ended."""
        final = self.answers[0].finish_reason is not None
        delta = Delta(text) if self._readers is None else self._readers[0].feed(text, final=final)
        if delta.content or (final and not delta.calls and not self._output):
            yield from self._say(
                delta.content, (self._logprobs_of(list(logprobs), self.answers[0]) or {}).get("content", [])
            )
        for call in delta.calls.values():
            yield from self._call(call)
        if final:
            yield from self._close(self._status())

    def _say(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        if self._growing is None or self._growing["type"] != "message":
            yield from self._open("msg", {"type": "message", "role": "assistant", "content": []})
            part = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
            yield self._item_event("response.content_part.added", content_index=0, part=dict(part))
            self._item["content"].append(part)
        self._item["content"][0]["text"] += text
        self._item["content"][0]["logprobs"] += logprobs
        if text:
            yield self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            names = {"call_id": call["id"], "name": function["name"]}
            yield from self._open("fc", {"type": "function_call", **names, "arguments": ""})
        if arguments := function["arguments"]:
            self._item["arguments"] += arguments
            yield self._item_event("response.function_call_arguments.delta", delta=arguments)

    @property
    def _item(self) -> dict[str, Any]:
        assert self._growing is not None
        return self._growing

    def _open(self, prefix: str, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self._growing = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **fields}
        self._output.append(self._growing)
        first = self._growing | ({"content": []} if "content" in fields else {})
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=first)

    def _close(self, status: str) -> Iterator[Event]:
        if self._growing is None:
            return
        item, self._growing["status"] = self._growing, status
        if item["type"] == "message":
            (part,) = item["content"]
            done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            yield self._item_event("response.output_text.done", **done)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)
        self._growing = None

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}
