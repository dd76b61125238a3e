"""Chat messages of requests, and their form for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mmspec.serving.fields import MOST_ITEMS, Fields
from mmspec.serving.media import Medium


class _URL(Fields):
    ignored: ClassVar = ("detail",)  # images have the resolution that the model's processor gives them
    url: str


class TextPart(Fields):
    type: Literal["text"]
    text: str


class ImagePart(Fields):
    """An image; a text as ``image_url`` is its URL."""

    type: Literal["image_url"]
    image_url: _URL

    @field_validator("image_url", mode="before")
    @classmethod
    def _as_object(cls, given: Any) -> Any:
        return {"url": given} if isinstance(given, str) else given


class VideoPart(Fields):
    type: Literal["video_url"]
    video_url: _URL


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class ChatMessage(Fields):
    """One message; a text as content is one text part, an assistant's content may be null."""

    neutral: ClassVar = {"annotations": ([],), "tool_calls": ([],)}  # of answers that clients send back
    role: Literal["system", "developer", "user", "assistant"]
    content: list[Part] = Field(max_length=MOST_ITEMS)

    @model_validator(mode="before")
    @classmethod
    def _without_content(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("role") != "assistant" or given.get("content") is not None:
            return given
        return {**given, "content": []}

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    @property
    def texts(self) -> list[str]:
        return [part.text for part in self.content if isinstance(part, TextPart)]


def conversation(given: Sequence[ChatMessage], reads_media: bool) -> tuple[list[dict[str, Any]], list[Medium]]:
    """Messages in transformers' format, and their images and videos in order.

    Args:
        reads_media: whether the model's template takes lists of parts; those of text models expect a text.
    """
    messages, media = [], []
    for place, message in enumerate(given):
        items: list[dict[str, Any]] = []
        for number, part in enumerate(message.content):
            if isinstance(part, TextPart):
                items.append({"type": "text", "text": part.text})
                continue
            kind: Any = part.type.removesuffix("_url")
            url = part.image_url.url if part.type == "image_url" else part.video_url.url
            media.append(Medium(kind, url, f"messages[{place}].content[{number}].{part.type}.url"))
            items.append({"type": kind})
        content = items if reads_media else "\n".join(item.get("text", "") for item in items)
        role = "system" if message.role == "developer" else message.role
        messages.append({"role": role, "content": content})
    return messages, media
