"""Settings in the query of a link to the page, as the page's "Copy link" writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from mmspec.demos.chat_request import MAX_PROMPT_CHARS, ChatRequest, Kind
from mmspec.demos.methods import MOST
from mmspec.errors import UserError


@dataclass(frozen=True)
class LinkSettings:
    """Settings of a link.

    Attributes:
        chat: the request, without its upload.
        methods: what answered it, one method or several.
        example: name of the example's file, or empty.
    """

    chat: ChatRequest
    methods: tuple[str, ...]
    example: str


def parse_link(query: Mapping[str, str]) -> LinkSettings | None:
    """Settings of a query; None if it has none. Other parameters are ignored.

    Raises:
        UserError: a setting is malformed or out of range.
    """
    if "kind" not in query:
        return None
    if query["kind"] not in get_args(Kind):
        raise UserError(f"kind in the link must be one of {', '.join(get_args(Kind))}: got {query['kind']!r}")
    chat = ChatRequest(
        kind=query["kind"],  # type: ignore[arg-type]
        prompt=query.get("prompt", "")[:MAX_PROMPT_CHARS],
        model=query.get("model", ""),
        temperature=_number(query, "temperature", 0.0),
        max_new_tokens=int(_number(query, "max_new_tokens", 256)),
        frames=int(_number(query, "frames", 8)),
        seed=int(_number(query, "seed", 0)),
    )
    chat.generate_kwargs()
    methods = tuple(name for name in query.get("methods", "").split(",") if name)[:MOST]
    return LinkSettings(chat, methods, query.get("example", ""))


def _number(query: Mapping[str, str], name: str, default: float) -> float:
    try:
        number = float(query.get(name, default))
    except ValueError:
        number = float("nan")
    if not abs(number) <= 2**53:
        raise UserError(f"{name} in the link must be a number: got {query[name]!r}")
    return number
