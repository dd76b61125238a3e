"""Anthropic's Messages API: requests, which become chat requests, responses and events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

from mmspec.pipeline import Piece
from mmspec.serving.formats import ChatFormat
from mmspec.serving.schemas import CACHE, ChatCompletionRequest
from mmspec.targets.processor import called_arguments


class MessagesRequest(ChatCompletionRequest):
    """``POST /v1/messages``, and ``POST /v1/messages/count_tokens``."""

    # Contexts are edited on request of agents, to save tokens.
    ignored = (
        *(*ChatCompletionRequest.ignored, *CACHE),
        *("container", "context_management", "diagnostics", "inference_geo", "speed"),
    )
    neutral: ClassVar = {**ChatCompletionRequest.neutral, "mcp_servers": ([],)}
    refused: ClassVar = {**ChatCompletionRequest.refused, "mcp_servers": "the client makes the calls"}
    n: Literal[1] = 1
    logprobs: Literal[False] = False

    @classmethod
    def converted(cls, given: dict[str, Any]) -> dict[str, Any]:
        asked = {{"stop_sequences": "stop"}.get(name, name): value for name, value in given.items()}
        system, messages, tools = asked.pop("system", None), asked.get("messages"), asked.get("tools")
        if isinstance(messages, list):
            before = [{"role": "system", "content": system}] if system else []
            asked["messages"] = [*before, *(turn for message in messages for turn in _turns(message))]
        if isinstance(tools, list):
            asked["tools"] = list(map(_tool, tools))
        if isinstance(choice := asked.get("tool_choice"), dict):
            asked["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
            called = {"type": "function", "function": {"name": choice.get("name")}}
            asked["tool_choice"] = {"any": "required", "tool": called}.get(kind := str(choice.get("type")), kind)
        if isinstance(thinking := asked.pop("thinking", None), dict):
            asked["chat_template_kwargs"] = {"enable_thinking": thinking.get("type") != "disabled"}
        if isinstance(config := asked.pop("output_config", None), dict):
            asked["reasoning_effort"] = config.get("effort")
            if isinstance(form := config.get("format"), dict):
                asked["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
        return asked


def _turns(given: Any) -> Iterator[Any]:
    """The results of calls in a message, a chat message each, and the chat message of its other blocks."""
    if not isinstance(given, dict) or not isinstance(given.get("content"), list):
        yield given
        return
    message: dict[str, Any] = {**given, "content": [], "tool_calls": [], "reasoning_content": ""}
    for block in given["content"]:
        rest = dict(block) if isinstance(block, dict) else {"type": None}
        kind = rest.pop("type", None)
        if kind == "tool_result":
            content = rest.pop("content", None) or []
            content = list(map(_part, content)) if isinstance(content, list) else content
            rest.pop("is_error", None)  # the content tells of the error
            yield {"role": "tool", "tool_call_id": rest.pop("tool_use_id", None), "content": content, **rest}
        elif kind == "tool_use":
            function = {"name": rest.pop("name", None), "arguments": json.dumps(rest.pop("input", None))}
            message["tool_calls"].append({**rest, "function": function})
        elif kind == "thinking":
            message["reasoning_content"] += str(rest.get("thinking"))
        elif kind != "redacted_thinking":
            message["content"].append(_part(block))
    if message["content"] or message["tool_calls"] or message["reasoning_content"]:
        yield message | {"reasoning_content": message["reasoning_content"] or None}


def _part(block: Any) -> Any:
    if not isinstance(block, dict) or block.get("type") != "image" or not isinstance(block.get("source"), dict):
        return block
    rest, source = {**block, "type": "image_url"}, block["source"]
    del rest["source"]
    return {**rest, "image_url": source.get("url") or f"data:image/any;base64,{source.get('data')}"}


def _tool(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    rest = {{"input_schema": "parameters"}.get(name, name): value for name, value in given.items()}
    if rest.get("type") == "custom":
        del rest["type"]
    return {"type": "function", "function": rest}


Event = dict[str, Any]


class MessagesFormat(ChatFormat):
    """``message`` objects, whose content is blocks of thinking, text and calls, and their stream events."""

    prefix, end, api = "msg_", b"", "/v1/messages"

    def __init__(self, *common: Any, **keywords: Any) -> None:
        super().__init__(*common, **keywords)
        self._blocks: list[dict[str, Any]] = []

    def whole(self) -> dict[str, Any]:
        for _ in self._grow(self.choices[0]):
            pass
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = called_arguments(block["input"])
        return {**self._message(), "content": self._blocks, **self._ended(), "metrics": self._figures()["metrics"]}

    def first_chunks(self) -> Iterable[Event]:
        return ()  # the start has the number of prompt tokens, which the first piece tells

    def chunks(self, index: int, piece: Piece) -> Iterator[Event]:
        if not self.choices[0].num_prompt_tokens:
            yield {"type": "message_start", "message": self._message(self.add(index, piece).num_prompt_tokens)}
            yield {"type": "ping"}
        else:
            self.add(index, piece)
        yield from self._grow(piece)
        if piece.finish_reason is not None:
            ended = self._ended()
            usage = ended.pop("usage")
            yield {"type": "message_delta", "delta": ended, "usage": usage, "metrics": self._figures()["metrics"]}
            yield {"type": "message_stop"}

    def _message(self, prompt: int = 0) -> dict[str, Any]:
        none = {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": prompt, "output_tokens": 0}}
        head = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"]}
        return {**head, "content": [], **none}

    def _ended(self) -> dict[str, Any]:
        choice, usage = self.choices[0], self._figures()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(str(self._finish_reason(0)), "end_turn")
        counts = {
            "input_tokens": usage["prompt_tokens"] - cached,  # both add up in Anthropic's API
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }
        stop = choice.stop_string
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop, "usage": counts}

    def _grow(self, piece: Piece) -> Iterator[Event]:
        """Events for new output, with the last block's end if the answer has ended."""
        delta = self._read(0, piece)
        for kind, text in (("thinking", delta.reasoning), ("text", delta.content)):
            if text:
                if not self._blocks or self._blocks[-1]["type"] != kind:
                    yield from self._open({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
                yield self._delta_event(kind, kind, text)
        for call in delta.calls.values():
            function = call["function"]
            if "id" in call:
                yield from self._open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
                self._blocks[-1]["input"] = ""
            if function["arguments"]:
                yield self._delta_event("input_json", "input", function["arguments"])
        if piece.finish_reason is not None:
            yield from self._close()

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        if self._blocks:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta_event(self, kind: str, field: str, text: str) -> Event:
        self._blocks[-1][field] += text
        name = "partial_json" if field == "input" else field
        delta = {"type": f"{kind}_delta", name: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
