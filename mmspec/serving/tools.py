"""Tool calling: call formats of models, tools in prompts and grammars, and streaming call parsers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mmspec.errors import UserError
from mmspec.sampling.syntax import json_rule
from mmspec.serving.errors import APIError
from mmspec.serving.schemas import REASONING_FIELDS, named_function
from mmspec.targets.processor import Processor, called_arguments


@dataclass(frozen=True)
class ToolFormat:
    """A model's syntax of tool calls: marker, opening, calls with separators, end.

    A call is ``{"name": NAME, KEY: ARGUMENTS}``.

    Attributes:
        name: value of ``--tool-parser``.
        marker: text or special token before the calls; with ``in_call``, the start of a call at the output's start.
        opening, between, end: texts; ``between`` is None if the model makes one call at a time.
        key: JSON key of the arguments.
        in_call: whether the marker is part of a call.
        bare: whether an output may also start with calls without a marker, with or without code fences: Qwen2.5-Coder.
        id_length: alphanumeric characters of a call's id, where templates require a fixed length.
    """

    name: str
    marker: str
    opening: str = ""
    between: str | None = None
    end: str = ""
    key: str = "arguments"
    in_call: bool = False
    bare: bool = False
    id_length: int | None = None

    def bare_begin(self, names: Iterable[str]) -> str:
        """Pattern of the text before an unmarked call of these functions, with a lookahead for the call."""
        return rf'{_AROUND}(?=\{{\s*"name"\s*:\s*"(?:{"|".join(map(re.escape, names))})")'

    def trigger(self, names: Iterable[str]) -> str:
        """Trigger of the grammar for calls of these functions, marker included; see ``SamplingParams``."""
        marked = f"{'^' if self.in_call else ''}(?={re.escape(self.marker)})"
        return f"/{marked}|^{self.bare_begin(names)}/" if self.bare else f"/{marked}/"

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        marked: bool,
        several: bool,
        bare: bool = False,
        instead: str | None = None,
    ) -> str:
        """Grammar of calls, in llguidance's variant of Lark's syntax.

        Args:
            marked: whether the grammar includes the marker; otherwise it applies after the marker.
            several: whether to allow several calls, if the format supports them.
            bare: whether to allow unmarked calls at the start, if the format supports them.
            instead: a JSON schema of outputs that are allowed in place of calls.
        """
        parts = [] if self.in_call else ["/[ \\n]?/", json.dumps(self.opening)]
        if marked and not self.in_call:
            parts.insert(0, json.dumps(self.marker))
        parts.append("call")
        if several and self.between is not None:
            parts.append(f"({json.dumps(self.between)} call)*")
        bare = bare and self.bare
        rules = [
            f"start: calls{' | bare' if bare else ''}{' | instead' if instead else ''}",
            f"calls: {' '.join(parts)} {json.dumps(self.end)}",
            f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}",
        ]
        if bare:
            rules.append(f"bare: bare_call {'(BETWEEN bare_call)* ' if several else ''}END")
            rules.append(f"bare_call: {' | '.join(f'bare_{number}' for number in range(len(tools)))}")
            rules += [r"BETWEEN: /\s{0,9}(,|```\s{1,9}```(json)?)?\s{0,9}/", r"END: /\s{0,9}\]?\s{0,9}(```)?/"]
        for number, tool in enumerate(tools):
            head = f'{{"name": {json.dumps(tool["name"])}, "{self.key}": '
            rules.append(f'call_{number}: {json.dumps(head)} args_{number} "}}"')
            rules.append(f"args_{number}: {json_rule(parameters(tool))}")
            if bare:
                gap = r"\s{0,9}"
                head = rf'\{{{gap}"name":{gap}"{tool["name"]}",{gap}"{self.key}":{gap}'
                rules.append(rf"bare_{number}: /{head}/ bare_args_{number} /{gap}\}}/")
                rules.append(f"bare_args_{number}: {json_rule(parameters(tool), any_layout=True)}")
        if instead is not None:
            rules.append(f"instead: {json_rule(json.loads(instead))}")
        return "\n".join(rules)


def parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    return {"type": "object", **function.get("parameters", {})}


HERMES = ToolFormat("hermes", "<tool_call>", "", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", bare=True)
"""``<tool_call>{json}</tool_call>`` of Hermes 2 Pro, Qwen2.5 and Qwen3."""

LLAMA = ToolFormat("llama3_json", '{"name": "', key="parameters", in_call=True)
"""``{"name": ..., "parameters": ...}`` of Llama 3.1 and later: one call, which is the whole output."""

MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "[", ", ", "]", id_length=9)
"""``[TOOL_CALLS][{json}, {json}]`` of Mistral's models up to version 7 of their tokenizers."""

GENERIC = replace(HERMES, name="generic")
"""The format of Hermes, explained in the prompt: for chat templates without tools, or with other formats."""

FORMATS = {one.name: one for one in (HERMES, LLAMA, MISTRAL, GENERIC)}
AUTO = "auto"
_PROMPT = """You can call these functions. Each is a JSON object with a name and the JSON schema of its parameters:
{tools}
To call one, write its name and arguments as a JSON object between <tool_call> and </tool_call>, and nothing after:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>
Results follow between <tool_response> and </tool_response>. Answer without a call where none is needed."""


def tool_format(processor: Processor, name: str = AUTO) -> ToolFormat:
    """The format of a model's calls. Raises ``UserError``: the named format needs a chat template that renders tools,
    and the model has none."""
    template = processor.chat_template_text()
    if name != AUTO:
        if name != GENERIC.name and "tools" not in template:
            raise UserError(f"the tool parser {name} needs a chat template with tools: the model has none")
        return FORMATS[name]
    if "tools" not in template:
        return GENERIC
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "<tool_call>" in template and "arguments" in template and not any(one in template for one in _OTHERS):
        return HERMES
    return LLAMA if '"parameters": dictionary' in template else GENERIC


_OTHERS = ("<function=", "<arg_key>", "<invoke")
"""Parts of calls in other formats than JSON (Qwen3-Coder, GLM-4.5, MiniMax) after ``<tool_call>``."""


def prompted(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Render functions, calls and results as text in the generic format, for chat templates without tools.

    The functions precede the first message's text. Results of consecutive calls become one user message.
    """
    found: list[dict[str, Any]] = []
    before = None
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            text = f"<tool_response>\n{_text(content)}\n</tool_response>"
            if before == "tool":
                found[-1]["content"] = _joined(found[-1]["content"], text)
            else:
                found.append({"role": "user", "content": _like(content, text)})
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


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(item.get("text", "") for item in content)


def _like(content: Any, text: str) -> Any:
    """Convert text to the type of ``content``: a string, or a list of items."""
    return text if isinstance(content, str) else [{"type": "text", "text": text}]


def _joined(content: Any, more: Any, separator: str = "\n") -> Any:
    """Append content to content of the same type."""
    if isinstance(content, str):
        return f"{content}{separator}{more}" if content else more
    more = [{"type": "text", "text": more}] if isinstance(more, str) else more
    return [*content, {"type": "text", "text": separator}, *more] if content else list(more)


_AROUND = r"(?:\s|```(?:json)?|[\[\],])*"  # around unmarked calls
_BEFORE_NAME = (r"\{", r"\s*", *'"name"', r"\s*", ":", r"\s*", '"', r'[^"\\]*')
_PART = (  # of the start of an unmarked call
    r"(?:\s|`{1,3}(?:j(?:s(?:on?)?)?)?|[\[\],])*"
    + "".join(f"(?:{one}" for one in _BEFORE_NAME)
    + ")?" * len(_BEFORE_NAME)
)
_HEAD = r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_BARE_END = re.compile(r"\s*\}")
_LONGEST_HEAD = 200  # characters; a longer head is not a call


@dataclass
class Delta:
    """Increment of a streamed message. ``calls``: call deltas by index, in OpenAI's format."""

    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The non-empty fields, as in a delta or message."""
        content = {"content": self.content} if self.content else {}
        return {**content, "tool_calls": list(self.calls.values())} if self.calls else content


class CallReader:
    """Streaming parser for the calls of one output.

    Arguments are streamed verbatim up to the end of their JSON object; markers inside strings are text. Whitespace
    around calls is dropped. Text that starts like a call but is not a call becomes content.

    Args:
        names: functions whose unmarked calls are parsed, too.
        begun: whether the prompt ends with the marker.
    """

    def __init__(self, form: ToolFormat, names: Sequence[str] = (), *, begun: bool = False) -> None:
        self._form, self.calls = form, 0
        self._bare = re.compile(form.bare_begin(names)) if form.bare and names else None
        self._around = re.compile(r"\s*" if self._bare is None else _AROUND)
        opening = re.escape(form.opening)
        marker = "" if form.in_call else f"(?:{re.escape(form.marker)})?"
        self._head = re.compile(rf"{self._around.pattern}{marker}\s*(?:{opening})?\s*{_HEAD}")
        self._end = re.compile(rf"\s*\}}\s*{re.escape(form.end.strip())}")
        self._next = re.compile(r"\s*\}\s*,\s*(?=\{)")
        self._rest = ""
        self._step = self._in_head if begun else self._in_text
        self._said = False  # whether there was content: some markers count only at the start
        self._json = _Object()

    def feed(self, text: str, *, final: bool = False) -> Delta:
        """Parse the next piece of the output, which may be the last."""
        self._rest += text
        delta = Delta()
        while self._step(delta, final):
            pass
        return delta

    def _in_text(self, delta: Delta, final: bool) -> bool:
        rest, marker = self._rest, self._form.marker
        if self._bare is not None and not self._said:
            if self._bare.match(rest):
                self._end, self._step = _BARE_END, self._in_head
                return True
            if not final and re.fullmatch(_PART, rest):
                return False
        at = rest.find(marker)
        if self._form.in_call and (self._said or at > 0):
            at = -1
        if at >= 0:
            said = rest[:at].rstrip()
            self._say(delta, said)
            self._rest, self._step = rest[len(said) :], self._in_head
            return True
        held = len(rest.rstrip())
        if not self._form.in_call or not self._said:
            held = min([held, *(len(rest) - n for n in range(1, len(marker)) if rest.endswith(marker[:n]))])
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
            self._rest, self._step, self._json = self._rest[found.end() :], self._in_arguments, _Object()
            return True
        if final or len(self._rest) > _LONGEST_HEAD:
            self._say(delta, self._rest)
            self._rest, self._step = "", self._in_text
        return False

    def _in_arguments(self, delta: Delta, final: bool) -> bool:
        end = self._json.read(self._rest)
        if end:
            call = delta.calls.setdefault(self.calls, {"index": self.calls, "function": {"arguments": ""}})
            call["function"]["arguments"] += self._rest[:end]
            self._rest = self._rest[end:]
        if self._json.over:
            self.calls, self._step = self.calls + 1, self._in_tail
        elif final:
            self.calls += 1  # a truncated call
        return self._json.over

    def _in_tail(self, delta: Delta, final: bool) -> bool:
        found = self._next.match(self._rest)
        if found is not None:
            self._step = self._in_head
        elif (found := self._end.match(self._rest)) is not None:
            self._step = self._in_text
        if found is not None:
            self._rest = self._rest[found.end() :]
        return found is not None

    def _say(self, delta: Delta, text: str) -> None:
        delta.content += text
        self._said = self._said or bool(text)


class _Object:
    """Finds the end of a JSON object that arrives in pieces; ``over`` is whether it was read."""

    def __init__(self) -> None:
        self.over = False
        self._depth, self._in_string, self._escaped = 0, False, False

    def read(self, text: str) -> int:
        """Number of characters of a piece that belong to the object."""
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
                    return place + 1
        return len(text)


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
    """Plan the tools of a request.

    Args:
        schema: the JSON schema of outputs without calls; None leaves them unconstrained.

    Raises:
        APIError: the choice does not match the tools, or the format does not support the schema.
    """
    special = processor.special_token(form.marker) is not None
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
    keywords: dict[str, Any] = {} if generic else {"tools": tools_of_template}
    as_text = functions if generic else None
    if choice == "auto" and schema is None:
        grammar = form.grammar(functions, marked=not special, several=several, bare=not special)
        trigger = form.marker if special else form.trigger(names)
        reader = partial(CallReader, form, () if special else names)
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
    reader = partial(CallReader, form, begun=special)
    schemas = _schemas(called) | ({} if instead is None else {"response_format": instead})
    return ToolPlan(keywords, grammar, None, schemas, reader, as_text)


def _schemas(functions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """JSON schemas of the calls' arguments, by their names in errors."""
    return {f"tool {one['name']}": json.dumps(parameters(one)) for one in functions}
