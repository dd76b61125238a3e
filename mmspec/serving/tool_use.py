"""Tools of requests: fields, and what they make of a prompt and its output."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from mmspec.checks import Rule
from mmspec.serving.errors import APIError
from mmspec.serving.fields import Fields, checked
from mmspec.serving.tool_calls import CallReader
from mmspec.serving.tool_formats import AUTO, GENERIC, parameters, prompted, tool_format
from mmspec.targets.processor import Processor

_NAME = Rule(
    "1 to 64 letters, digits, and any of _.-",
    lambda name: isinstance(name, str) and re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", name) is not None,
)


class Function(Fields):
    ignored: ClassVar[Sequence[str]] = ("strict",)  # arguments are constrained strictly in any case
    name: Annotated[Any, checked("name", _NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


def _is_choice(value: Any) -> bool:
    if not isinstance(value, dict):
        return value in ("none", "auto", "required")
    return value.keys() == {"type", "function"} and value["type"] == "function" and isinstance(_named(value), str)


def _named(choice: Any) -> str | None:
    """Name of the function that must be called, if one is named."""
    function = choice["function"] if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


CHOICE = Rule('"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}', _is_choice)


@dataclass(frozen=True)
class Use:
    """What the tools of a request make of it.

    Attributes:
        keywords: of ``Processor.encode``.
        grammar, trigger: of the output; see ``SamplingParams``.
        schemas: what the grammar was made of, by names for errors.
        reader: makes readers of the calls in outputs.
        as_text: the functions that the messages must explain, for a chat template that does not.
    """

    keywords: Mapping[str, Any] = field(default_factory=dict)
    grammar: str | None = None
    trigger: str | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)
    reader: Callable[[], CallReader] | None = None
    as_text: Sequence[Mapping[str, Any]] | None = None

    def messages(self, given: Sequence[Mapping[str, Any]]) -> list[Any]:
        return list(given) if self.as_text is None else prompted(given, self.as_text)


class ToolUse:
    """Tools with one model.

    Args:
        parser: name of a format of calls, or ``AUTO``.
    """

    def __init__(self, io: Processor, parser: str = AUTO) -> None:
        self._form = tool_format(io, parser)
        self._special = io.special_token(self._form.marker) is not None

    def of(self, tools: Sequence[Tool], choice: Any, *, several: bool = True, schema: str | None = None) -> Use:
        """Tools of a request.

        Args:
            tools: empty without any.
            choice: as OpenAI's ``tool_choice``.
            several: whether there may be several calls.
            schema: the JSON schema of outputs that are no calls, if they have one.

        Raises:
            APIError: the choice does not go with the tools, or the schema with the format.
        """
        generic, named = self._form is GENERIC, _named(choice)
        functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
        names = [one["name"] for one in functions]
        if len(set(names)) < len(names):
            raise APIError(400, f"tools must have different names: got {', '.join(names)[:200]}", "tools")
        if choice == "required" and not tools:
            raise APIError(400, "tool_choice required goes with tools: got none", "tool_choice")
        if named is not None and named not in names:
            raise APIError(400, f"tool_choice must name one of the tools: got {named[:80]!r}", "tool_choice")
        if choice == "none" or not tools:
            return Use(as_text=[] if generic else None)
        tools_of_template = [{"type": "function", "function": one} for one in functions]
        keywords: dict[str, Any] = {} if generic else {"tools": tools_of_template}
        as_text = functions if generic else None
        if choice == "auto" and schema is None:
            grammar = self._form.grammar(functions, marked=False, several=several)
            schemas = _schemas(functions)
            return Use(keywords, grammar, self._form.trigger, schemas, partial(CallReader, self._form), as_text)
        if choice == "auto" and self._special:
            message = "response_format beside tools needs tool_choice none or required: got auto"
            raise APIError(400, message, "response_format")
        called = [one for one in functions if named in (None, one["name"])]
        instead = schema if choice == "auto" else None
        several = several and named is None
        grammar = self._form.grammar(called, marked=not self._special, several=several, instead=instead)
        if self._special:
            keywords["answer_start"] = self._form.marker
        reader = partial(CallReader, self._form, begun=self._special)
        schemas = _schemas(called) | ({} if instead is None else {"response_format": instead})
        return Use(keywords, grammar, None, schemas, reader, as_text)


def _schemas(functions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The JSON schemas of calls, by names for errors."""
    return {f"tool {one['name']}": json.dumps(parameters(one)) for one in functions}
