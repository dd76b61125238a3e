"""Chat messages of requests, and their form for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mmspec.checks import Rule
from mmspec.serving.fields import MOST_ITEMS, Fields, checked
from mmspec.serving.media import Medium

CACHE_BREAKPOINT = "prompt_cache_breakpoint"
"""Field of parts that is ignored: all prefixes of prompts are kept."""


class _URL(Fields):
    ignored: ClassVar = ("detail",)  # images have the resolution that the model's processor gives them
    url: str


class TextPart(Fields):
    ignored: ClassVar = (CACHE_BREAKPOINT,)
    type: Literal["text"]
    text: str


class RefusalPart(Fields):
    """What an assistant has said instead of an answer: text of the conversation."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImagePart(Fields):
    """An image; a text as ``image_url`` is its URL."""

    ignored: ClassVar = (CACHE_BREAKPOINT,)
    type: Literal["image_url"]
    image_url: _URL

    @field_validator("image_url", mode="before")
    @classmethod
    def _as_object(cls, given: Any) -> Any:
        return {"url": given} if isinstance(given, str) else given


class VideoPart(Fields):
    type: Literal["video_url"]
    video_url: _URL


Part = Annotated[TextPart | RefusalPart | ImagePart | VideoPart, Field(discriminator="type")]


def _is_object(text: Any) -> bool:
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


_ARGUMENTS = Rule("text of a JSON object", _is_object)


class CalledFunction(Fields):
    name: str
    arguments: Annotated[Any, checked("arguments", _ARGUMENTS)]


class ToolCall(Fields):
    ignored: ClassVar = ("index",)
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Fields):
    """One message; a text as content is one text part, an assistant's content may be null, or a refusal."""

    refused: ClassVar = {"audio": "answers are text", "function_call": "tool_calls replaces it"}
    neutral: ClassVar = {"annotations": ([],), "tool_calls": ([],)}  # of answers that clients send back
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: list[Part] = Field(max_length=MOST_ITEMS)
    tool_calls: list[ToolCall] | None = Field(None, max_length=MOST_ITEMS)
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_content(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("role") != "assistant":
            return given
        given = dict(given)
        refusal = given.pop("refusal", None)
        if given.get("content") is None:
            given["content"] = [] if refusal is None else refusal
        return given

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    @model_validator(mode="after")
    def _of_its_role(self) -> ChatMessage:
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) is not None and self.role != role:
                raise ValueError(f"{name} goes with the role {role}")
        return self

    @property
    def texts(self) -> list[str]:
        """What a chat template may write of the message."""
        parts = [part.text for part in self.content if isinstance(part, TextPart | RefusalPart)]
        called = [(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        return [*parts, *chain(*called), self.tool_call_id or "", self.name or ""]

    def extras(self) -> dict[str, Any]:
        """What a chat template's message has beside role and content: arguments of calls are objects there."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments)},
            }
            for call in self.tool_calls or ()
        ]
        name = self.name if self.role == "tool" else None  # of its function; those of speakers are ignored
        values = {"tool_calls": calls or None, "tool_call_id": self.tool_call_id, "name": name}
        return {name: value for name, value in values.items() if value is not None}


def conversation(given: Sequence[ChatMessage], reads_media: bool) -> tuple[list[dict[str, Any]], list[Medium]]:
    """Messages in transformers' format, and their images and videos in order.

    Args:
        reads_media: whether the model's template takes lists of parts; those of text models expect a text.
    """
    messages, media = [], []
    names: dict[str, str] = {}  # of functions by ids of calls
    for place, message in enumerate(given):
        items: list[dict[str, Any]] = []
        for number, part in enumerate(message.content):
            if isinstance(part, TextPart | RefusalPart):
                items.append({"type": "text", "text": part.text})
                continue
            kind: Any = part.type.removesuffix("_url")
            url = part.image_url.url if part.type == "image_url" else part.video_url.url
            media.append(Medium(kind, url, f"messages[{place}].content[{number}].{part.type}.url"))
            items.append({"type": kind})
        content = items if reads_media else "\n".join(item.get("text", "") for item in items)
        role = "system" if message.role == "developer" else message.role
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        extras = message.extras()
        if message.tool_call_id in names:
            extras.setdefault("name", names[message.tool_call_id])  # some templates need it
        messages.append({"role": role, "content": content, **extras})
    return messages, media
