"""Ollama's API: requests, which become chat requests, and answers; descriptions of the model for it and llama.cpp's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from fastapi import FastAPI

from mmspec import __version__
from mmspec.pipeline import Piece
from mmspec.serving.formats import ChatFormat
from mmspec.serving.middleware import RequestQueue
from mmspec.serving.runner import JobBuilder
from mmspec.serving.schemas import ChatCompletionRequest, Fields
from mmspec.targets.processor import called_arguments

_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Options under other names than OpenAI's and vLLM's."""

_OPTIONS = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_keep", "num_thread", "numa", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock", "vocab_only", "logits_all", "draft_num_predict", "mirostat_tau", "mirostat_eta"),
)
"""Options that are ignored: they concern memory and speed, or go with options that are refused."""


class OllamaRequest(ChatCompletionRequest):
    """``POST /api/chat`` and ``POST /api/generate``."""

    ignored = (*ChatCompletionRequest.ignored, *_OPTIONS, "shift", "truncate")
    neutral: ClassVar = {
        **{**ChatCompletionRequest.neutral, "raw": (False,), "context": ([],), "max_tokens": (-1, -2)},
        **{"template": ("",), "suffix": ("",), "repeat_last_n": (-1,), "penalize_newline": (True,)},
    }
    refused: ClassVar = {
        **ChatCompletionRequest.refused,
        "context": "messages of /api/chat go on with a conversation",
        "raw": "/v1/completions has no template",
        "suffix": "/v1/completions and /infill have it",
        "template": "the model's is used",
    }
    n: Literal[1] = 1
    stream: bool = True

    @classmethod
    def converted(cls, asked: dict[str, Any]) -> dict[str, Any]:
        if isinstance(asked.get("options"), dict):
            asked |= {_NAMES.get(name, name): one for name, one in asked.pop("options").items()}
        if (form := asked.pop("format", None)) not in (None, ""):
            schema = {"type": "json_schema", "json_schema": {"schema": form}}
            asked["response_format"] = {"type": "json_object"} if form == "json" else schema
        if isinstance(think := asked.pop("think", None), bool):
            asked["chat_template_kwargs"] = {"enable_thinking": think}
        elif think is not None:
            asked["reasoning_effort"] = think
        if "prompt" in asked:
            system, user = asked.pop("system", None), {"role": "user", "content": asked.pop("prompt")}
            before = [{"role": "system", "content": system}] if system else []
            asked["messages"] = [*before, user | {"images": asked.pop("images", None)}]
        if isinstance(messages := asked.get("messages"), list):
            asked["messages"] = [_as_message(one) if isinstance(one, dict) else one for one in messages]
        return asked


def _as_message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form of OpenAI's API."""
    message = {{"thinking": "reasoning_content", "tool_name": "name"}.get(key, key): one for key, one in given.items()}
    images, calls = message.pop("images", None), message.get("tool_calls")
    if images and isinstance(images, list):
        text = [{"type": "text", "text": message.get("content") or ""}]
        urls = [f"data:image/any;base64,{one}" if isinstance(one, str) else one for one in images]
        message["content"] = [{"type": "image_url", "image_url": url} for url in urls] + text
    if isinstance(calls, list):
        message["tool_calls"] = [_as_call(one) for one in calls]
    return message


def _as_call(given: Any) -> Any:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        return given
    function = {key: one for key, one in function.items() if key != "index"}
    return {"id": "", **given, "function": {**function, "arguments": json.dumps(function.get("arguments"))}}


class OllamaFormat(ChatFormat):
    """Answers of ``/api/chat`` and ``/api/generate``, streamed as lines of JSON; calls are sent whole, at the end."""

    end, api, media_type = b"", "/api/", "application/x-ndjson"

    def __init__(self, *common: Any, generates: bool = False, **keywords: Any) -> None:
        super().__init__(*common, **keywords)
        self._generates = generates
        self._calls: list[dict[str, Any]] = []

    def whole(self) -> dict[str, Any]:
        return self._answer(self.choices[0])

    def event(self, chunk: dict[str, Any]) -> bytes:
        return json.dumps(chunk, ensure_ascii=False).encode() + b"\n"

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        return ()

    def chunks(self, index: int, piece: Piece) -> Iterable[dict[str, Any]]:
        self.add(index, piece)
        return [self._answer(piece)]

    def _answer(self, piece: Piece) -> dict[str, Any]:
        read, ended = self._read(0, piece), piece.finish_reason is not None
        for call in read.calls.values():
            if "id" in call:
                self._calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            self._calls[-1]["arguments"] += call["function"]["arguments"]
        said: dict[str, Any] = {"response" if self._generates else "content": read.content}
        said |= {"thinking": read.reasoning} if read.reasoning else {}
        if ended and self._calls:
            said["tool_calls"] = [
                {"id": name, "function": {"index": index, "name": function, "arguments": called_arguments(given)}}
                for index, (name, function, given) in enumerate(map(dict.values, self._calls))
            ]
        answer: dict[str, Any] = said if self._generates else {"message": {"role": "assistant", **said}}
        if (found := self._logprobs_of(piece.logprobs, self.choices[0])) is not None:
            answer["logprobs"] = found["content"]
        head = {"model": self._head["model"], "created_at": _now(), "done": ended}
        return head | answer | (self._ended() if ended else {})

    def _ended(self) -> dict[str, Any]:
        """Fields of the end; durations are in nanoseconds."""
        figures = self._figures()
        usage, timings = figures["usage"], figures["timings"]
        prompt, answer = (round(timings[name] * 1e6) for name in ("prompt_ms", "predicted_ms"))
        return {
            **{"done_reason": self.choices[0].finish_reason, "total_duration": prompt + answer, "load_duration": 0},
            **{"prompt_eval_count": usage["prompt_tokens"], "prompt_eval_duration": prompt},
            **{"eval_count": usage["completion_tokens"], "eval_duration": answer, "metrics": figures["metrics"]},
        }


def _now() -> str:
    return datetime.now(UTC).isoformat()


class ShowRequest(Fields):
    """``POST /api/show``."""

    ignored = ("verbose",)
    model: str


def describe(app: FastAPI, builder: JobBuilder, slots: RequestQueue) -> Callable[[ShowRequest], dict[str, Any]]:
    """Add the endpoints of Ollama's and llama.cpp's servers that describe the model; returns the answer of
    ``/api/show``."""
    pipe, most, started = builder.pipe, builder.limits.max_running, _now()
    names = [*builder.names, *pipe.adapters]
    tensors = [*pipe.model.parameters(), *pipe.model.buffers()]
    size, context = sum(one.nbytes for one in tensors), builder.limits.context_limit(pipe.context_limit)
    family, template = pipe.model.config.model_type, pipe.processor.chat_template_text()
    details, media = {"family": family, "families": [family]}, pipe.processor.reads_media

    def listed(**more: Any) -> dict[str, Any]:
        common = {"size": size, "details": details, **more}
        return {"models": [{"name": name, "model": name, **common} for name in names]}

    app.get("/api/version")(lambda: {"version": __version__})
    app.get("/api/tags")(lambda: listed(modified_at=started))
    app.get("/api/ps")(lambda: listed(size_vram=size * (pipe.target.device.type != "cpu"), context_length=context))
    app.get("/slots")(lambda: [{"id": id, "n_ctx": context, "is_processing": id < slots.running} for id in range(most)])
    app.get("/props")(
        lambda: {
            "default_generation_settings": {"n_ctx": context, "params": pipe.defaults.served},
            **{"total_slots": most, "model_path": names[0], "model_alias": names[0], "chat_template": template},
            **{"modalities": {"vision": media, "audio": False}, "build_info": f"mmspec {__version__}"},
        }
    )

    def show(asked: ShowRequest) -> dict[str, Any]:
        builder.check_model(asked.model)
        able = {"vision": media, "tools": "tools" in template, "thinking": builder.reasoning is not None}
        return {
            "capabilities": ["completion", *(name for name, has in able.items() if has)],
            "model_info": {"general.architecture": family, f"{family}.context_length": context},
            **{"details": details, "template": template, "modified_at": started},
        }

    return show
