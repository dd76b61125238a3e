"""Tool calling: call formats of models, tools in prompts and grammars, and streaming call parsers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mmspec.serving.call_formats import AROUND, GENERIC, HEAD, NAME, ToolFormat, json_types, parameters, pattern
from mmspec.serving.errors import APIError
from mmspec.serving.schemas import REASONING_FIELDS, named_function
from mmspec.targets.processor import Processor, called_arguments

_PROMPT = """You can call these functions. Each is a JSON object with a name and the JSON schema of its parameters:
{tools}
To call one, write its name and arguments as a JSON object between <tool_call> and </tool_call>, and nothing after:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>
Results follow between <tool_response> and </tool_response>. Answer without a call where none is needed."""


def prompted(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Render functions, calls and results as text in the generic format, for chat templates without tools.

    The functions precede the first message's text. Results of consecutive calls become one user message.
    """
    found: list[dict[str, Any]] = []
    before = None
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = _joined(_joined(_like(content, "<tool_response>"), content), "</tool_response>")
            if before == "tool":
                found[-1]["content"] = _joined(found[-1]["content"], content)
            else:
                found.append({"role": "user", "content": content})
        else:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                called = {"name": function["name"], "arguments": called_arguments(function["arguments"])}
                content = _joined(content, f"<tool_call>\n{_json(called)}\n</tool_call>")
            reasoning = {name: message[name] for name in REASONING_FIELDS if name in message}
            found.append({"role": role, "content": content, **reasoning})
        before = role
    if tools:
        text = _PROMPT.format(tools="\n".join(map(_json, tools)))
        found[0]["content"] = _joined(_like(found[0]["content"], text), found[0]["content"], "\n\n")
    return found


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _like(content: Any, text: str) -> Any:
    """Convert text to the type of ``content``: a string, or a list of items."""
    return text if isinstance(content, str) else [{"type": "text", "text": text}]


def _joined(content: Any, more: Any, separator: str = "\n") -> Any:
    """Append content to content of the same type."""
    if isinstance(content, str):
        return f"{content}{separator}{more}" if content else more
    more = [{"type": "text", "text": more}] if isinstance(more, str) else more
    return [*content, {"type": "text", "text": separator}, *more] if content else list(more)


_BEFORE_NAME = (r"\{", r"\s*", *'"name"', r"\s*", ":", r"\s*", '"', r'[^"\\]*')
_PART = (  # of the start of an unmarked call
    r"(?:\s|`{1,3}(?:j(?:s(?:on?)?)?)?|[\[\],])*"
    + "".join(f"(?:{one}" for one in _BEFORE_NAME)
    + ")?" * len(_BEFORE_NAME)
)
_BARE_END = re.compile(r"\s*\}")
_LONGEST_HEAD = 200  # characters; a longer head is not a call


@dataclass
class Delta:
    """Increment of a streamed message. ``calls``: call deltas by index, in OpenAI's format."""

    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    reasoning: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The non-empty fields, as in a delta or message."""
        content = dict.fromkeys(REASONING_FIELDS, self.reasoning) if self.reasoning else {}
        content |= {"content": self.content} if self.content else {}
        return {**content, "tool_calls": list(self.calls.values())} if self.calls else content


class CallReader:
    """Streaming parser for the calls of one output.

    JSON arguments are streamed verbatim up to the end of their object, others value by value; markers inside strings
    are text. Whitespace around calls is dropped. Text that starts like a call but is not a call becomes content.

    Args:
        functions: declarations of the functions.
        bare: whether unmarked calls of the functions are parsed, too, if the format has them.
        begun: whether the prompt ends with the marker.
    """

    def __init__(
        self, form: ToolFormat, functions: Sequence[Mapping[str, Any]] = (), *, bare: bool = True, begun: bool = False
    ) -> None:
        self._form, self.calls, self._schemas = form, 0, {one["name"]: parameters(one) for one in functions}
        self._bare = re.compile(form.bare_begin(self._schemas)) if form.bare and bare and functions else None
        self._around = re.compile(r"\s*" if self._bare is None else AROUND)
        self._starts = () if form.in_call else (*form.before, form.marker)
        first, then, last = form.around
        call = HEAD if form.call is None else rf"{pattern(first)}{NAME}{pattern(then)}"
        separator = "," if form.between is None else form.between
        optional = "".join(rf"(?:\s*{re.escape(text)})?" for text in self._starts)
        self._head = re.compile(rf"{self._around.pattern}{optional}\s*(?:{re.escape(form.opening.strip())})?\s*{call}")
        self._end = re.compile(rf"\s*{pattern(last)}\s*{re.escape(form.end.strip())}")
        self._next = re.compile(rf"\s*{pattern(last)}\s*{pattern(separator.strip())}\s*(?={call})")
        self._rest = ""
        self._step = self._in_head if begun else self._in_text
        self._said = False  # whether there was content: some markers count only at the start
        self._arguments: _Object | _Tagged | _Quoted = _Object()

    def feed(self, text: str, *, final: bool = False, reasoning: str = "") -> Delta:
        """Parse the next piece of the output, which may be the last."""
        self._rest += text
        delta = Delta(reasoning=reasoning)
        while self._step(delta, final):
            pass
        return delta

    def _in_text(self, delta: Delta, final: bool) -> bool:
        rest, starts = self._rest, self._starts
        if self._bare is not None and not self._said:
            if self._bare.match(rest):
                self._end, self._step = _BARE_END, self._in_head
                return True
            if not final and re.fullmatch(_PART, rest):
                return False
        at = min((place for one in starts if (place := rest.find(one)) >= 0), default=-1)
        if self._form.in_call and not self._said and rest.startswith(self._form.marker):
            at = 0
        if at >= 0:
            said = rest[:at].rstrip()
            self._say(delta, said)
            self._rest, self._step = rest[len(said) :], self._in_head
            return True
        held = len(rest.rstrip())
        if self._form.in_call and not self._said:
            starts = (self._form.marker,)
        held = min([held, *(len(rest) - n for one in starts for n in range(1, len(one)) if rest.endswith(one[:n]))])
        held = len(rest[:held].rstrip())
        if self.calls and self._around.fullmatch(rest):
            held = 0
        elif final:
            held = len(rest)
        self._say(delta, rest[:held])
        self._rest = rest[held:]
        return False

    def _in_head(self, delta: Delta, final: bool) -> bool:
        found = self._head.match(self._rest)
        if found is not None:
            prefix, length = ("", self._form.id_length) if self._form.id_length else ("call_", 24)
            call = {"index": self.calls, "id": f"{prefix}{uuid.uuid4().hex[:length]}", "type": "function"}
            delta.calls[self.calls] = {**call, "function": {"name": found[1], "arguments": ""}}
            self._rest, self._step = self._rest[found.end() :], self._in_arguments
            self._arguments = _Quoted(self._form.quote) if self._form.quote else _Object()
            if self._form.argument and not self._form.quote:
                self._arguments = _Tagged(self._form, self._schemas.get(found[1], {}))
            return True
        if final or len(self._rest) > _LONGEST_HEAD:
            self._say(delta, self._rest)
            self._rest, self._step = "", self._in_text
        return False

    def _in_arguments(self, delta: Delta, final: bool) -> bool:
        end, text = self._arguments.read(self._rest)
        if text:
            call = delta.calls.setdefault(self.calls, {"index": self.calls, "function": {"arguments": ""}})
            call["function"]["arguments"] += text
        self._rest = self._rest[end:]
        if self._arguments.over:
            self.calls, self._step = self.calls + 1, self._in_tail
        elif final:
            self.calls += 1  # a truncated call
        return self._arguments.over

    def _in_tail(self, delta: Delta, final: bool) -> bool:
        for text, step in ((self._next, self._in_head), (self._end, self._in_text)):
            if (found := text.match(self._rest)) is not None:
                self._rest, self._step = self._rest[found.end() :], step
                return True
        return False

    def _say(self, delta: Delta, text: str) -> None:
        delta.content += text
        self._said = self._said or bool(text)


class _Object:
    """Finds the end of a JSON object that arrives in pieces; ``over`` is whether it was read."""

    def __init__(self) -> None:
        self.over = False
        self._depth, self._in_string, self._escaped = 0, False, False

    def read(self, text: str) -> tuple[int, str]:
        """Number of characters of a piece that belong to the object, and their JSON."""
        for place, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.over = True
                    return place + 1, text[: place + 1]
        return len(text), text


class _Tagged:
    """Converts arguments between tags to a JSON object; interface of ``_Object``."""

    def __init__(self, form: ToolFormat, schema: Mapping[str, Any]) -> None:
        self.over, self._schema = False, schema
        self._begun, self._length = False, 0  # of the text that has been searched
        assert form.argument is not None
        before, between, after = (re.escape(text) for text in (*form.argument[:2], form.argument[2].rstrip()))
        self._item = re.compile(rf"\s*{before}(.*?){between}(.*?){after}", re.DOTALL)
        self._end = re.compile(rf"\s*{pattern(form.around[2] or form.end)}")

    def read(self, text: str) -> tuple[int, str]:
        """Number of characters that whole arguments take, and their JSON."""
        end, parts = 0, list[str]()
        if ">" in text[self._length :]:  # searches whole values once per tag, not once per piece
            while (found := self._item.match(text, end)) is not None:
                parts.append(f"{', ' if self._begun else '{'}{json.dumps(found[1])}: {self._value(*found.groups())}")
                self._begun, end = True, found.end()
            self.over = self._end.match(text, end) is not None
        if self.over:
            parts.append("}" if self._begun else "{}")
        self._length = len(text) - end
        return end, "".join(parts)

    def _value(self, key: str, text: str) -> str:
        """JSON of a value: text where the schema allows text only, otherwise JSON where it is JSON."""
        if json_types(self._schema.get("properties", {}).get(key), self._schema) != {"string"}:
            with suppress(ValueError):
                json.loads(text)
                return text.strip()
        return _json(text)


_LITERAL = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


class _Quoted:
    """Converts an object with bare keys and quoted strings to JSON; interface of ``_Object``."""

    def __init__(self, quote: str) -> None:
        self.over, self._depth, self._length = False, 0, 0
        after, quote = r"(?=\s*[:,}\]])", re.escape(quote)
        values = rf"{quote}(?P<text>.*?){quote}{after}|(?P<word>[^\s<:,{{}}\[\]]+){after}"
        self._lexeme = re.compile(rf"\s*(?:{values}|(?P<mark>[{{}}\[\],:]))", re.DOTALL)

    def read(self, text: str) -> tuple[int, str]:
        """Number of characters that whole lexemes take, and their JSON."""
        end, parts = 0, list[str]()
        if set(text[self._length :]) & set(":,{}[]"):
            while not self.over and (found := self._lexeme.match(text, end)) is not None:
                mark, end = found["mark"] or "", found.end()
                self._depth += (mark in ("{", "[")) - (mark in ("}", "]"))
                self.over = mark != "" and not self._depth
                is_key = text[end:].lstrip().startswith(":")
                literal = found["word"] is not None and not is_key and _LITERAL.fullmatch(found["word"])
                parts.append(mark or (found["word"] if literal else _json(found["text"] or found["word"] or "")))
                parts.append(" " * (mark in (":", ",")))
        self._length = len(text) - end
        return end, "".join(parts)


@dataclass(frozen=True)
class ToolPlan:
    """Effect of a request's tools on prompt, grammar and parsing.

    Attributes:
        grammar, trigger: constraint of the output; see ``SamplingParams``.
        schemas: JSON schemas in the grammar, by their names in errors.
        as_text: functions to render in the messages, for chat templates without tools.
    """

    keywords: Mapping[str, Any] = field(default_factory=dict)
    grammar: str | None = None
    trigger: str | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)
    reader: Callable[[], CallReader] | None = None
    as_text: Sequence[Mapping[str, Any]] | None = None

    def messages(self, given: Sequence[Mapping[str, Any]]) -> list[Any]:
        return list(given) if self.as_text is None else prompted(given, self.as_text)


def plan_tools(
    processor: Processor,
    form: ToolFormat,
    functions: Sequence[Mapping[str, Any]],
    choice: Any,
    *,
    several: bool = True,
    schema: str | None = None,
) -> ToolPlan:
    """Plan the tools of a request; ``schema`` constrains outputs without calls. Raises ``APIError``: the choice does
    not match the tools, or the format does not support the schema."""
    special, tokens = form.marker in processor.special_tokens, form.special(processor)
    generic, named = form is GENERIC, named_function(choice)
    names = [one["name"] for one in functions]
    if len(set(names)) < len(names):
        raise APIError(400, f"tools must have different names: got {', '.join(names)[:200]}", "tools")
    if choice == "required" and not functions:
        raise APIError(400, "tool_choice required goes with tools: got none", "tool_choice")
    if named is not None and named not in names:
        raise APIError(400, f"tool_choice must name one of the tools: got {named[:80]!r}", "tool_choice")
    if choice == "none" or not functions:
        return ToolPlan(as_text=[] if generic else None)
    tools_of_template = [{"type": "function", "function": one} for one in functions]
    keywords: dict[str, Any] = {} if generic else {"tools": tools_of_template, "text_tokens": tokens}
    as_text = functions if generic else None
    if choice == "auto" and schema is None:
        grammar = form.grammar(functions, marked=not special, several=several, bare=not special)
        trigger = form.marker if special else form.trigger(names)
        reader = partial(CallReader, form, functions, bare=not special)
        return ToolPlan(keywords, grammar, trigger, _schemas(functions), reader, as_text)
    if choice == "auto" and special:
        message = "response_format beside tools needs tool_choice none or required: got auto"
        raise APIError(400, message, "response_format")
    called = [one for one in functions if named in (None, one["name"])]
    instead = schema if choice == "auto" else None
    several = several and named is None
    grammar = form.grammar(called, marked=not special, several=several, instead=instead)
    if special:
        keywords["answer_start"] = form.marker
    reader = partial(CallReader, form, functions, bare=False, begun=special)
    schemas = _schemas(called) | ({} if instead is None else {"response_format": instead})
    return ToolPlan(keywords, grammar, None, schemas, reader, as_text)


def _schemas(functions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """JSON schemas of the calls' arguments, by their names in errors."""
    return {f"tool {one['name']}": json.dumps(parameters(one)) for one in functions}
