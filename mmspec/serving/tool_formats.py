"""Forms in which models write tool calls: recognised from chat templates, as grammars, and as prompts without one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmspec.errors import UserError
from mmspec.sampling.syntax import json_rule
from mmspec.sampling.trigger import AT_START
from mmspec.targets.processor import Processor


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls: marker, opening, calls with separators between them, end.

    A call is ``{"name": NAME, KEY: ARGUMENTS}``.

    Attributes:
        name: of ``--tool-parser``.
        marker: text or special token before the calls; of ``in_call``, the beginning of a call at that of the output.
        opening, between, end: texts; ``between`` is None where a model makes one call at a time.
        key: of the arguments.
        in_call: whether the marker is part of a call.
        id_length: letters and digits of a call's id, if templates require so many.
    """

    name: str
    marker: str
    opening: str = ""
    between: str | None = None
    end: str = ""
    key: str = "arguments"
    in_call: bool = False
    id_length: int | None = None

    @property
    def trigger(self) -> str:
        """The trigger of the grammar of calls; see ``SamplingParams``."""
        return AT_START + self.marker if self.in_call else self.marker

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], *, marked: bool, several: bool, instead: str | None = None
    ) -> str:
        """Grammar of calls, in llguidance's variant of Lark's syntax.

        Args:
            tools: functions in OpenAI's form.
            marked: whether it begins with the marker, or follows it.
            several: whether there may be several calls, if the model can make them.
            instead: a JSON schema that the output may satisfy in place of calls.
        """
        parts = [] if self.in_call else ["/[ \\n]?/", json.dumps(self.opening)]
        if marked and not self.in_call:
            parts.insert(0, json.dumps(self.marker))
        parts.append("call")
        if several and self.between is not None:
            parts.append(f"({json.dumps(self.between)} call)*")
        rules = [
            f"start: {'calls | instead' if instead else 'calls'}",
            f"calls: {' '.join(parts)} {json.dumps(self.end)}",
            f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}",
        ]
        for number, tool in enumerate(tools):
            head = f'{{"name": {json.dumps(tool["name"])}, "{self.key}": '
            head = head if marked or not self.in_call else head.removeprefix(self.marker)
            rules.append(f'call_{number}: {json.dumps(head)} args_{number} "}}"')
            rules.append(f"args_{number}: {json_rule(parameters(tool))}")
        if instead is not None:
            rules.append(f"instead: {json_rule(json.loads(instead))}")
        return "\n".join(rules)


def parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    return {"type": "object", **function.get("parameters", {})}


HERMES = ToolFormat("hermes", "<tool_call>", "", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
"""``<tool_call>{json}</tool_call>`` of Hermes 2 Pro, Qwen2.5 and Qwen3."""

LLAMA = ToolFormat("llama3_json", '{"name": "', key="parameters", in_call=True)
"""``{"name": ..., "parameters": ...}`` of Llama 3.1 and later: one call, which is the whole output."""

MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "[", ", ", "]", id_length=9)
"""``[TOOL_CALLS][{json}, {json}]`` of Mistral's models up to version 7 of their tokenizers."""

GENERIC = replace(HERMES, name="generic")
"""That of Hermes, which the prompt explains: for chat templates without tools, or with other formats."""

FORMATS = {one.name: one for one in (HERMES, LLAMA, MISTRAL, GENERIC)}
AUTO = "auto"

_PROMPT = """You can call these functions. Each is a JSON object with a name and the JSON schema of its parameters:
{tools}
To call one, write its name and arguments as a JSON object between <tool_call> and </tool_call>, and nothing after:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>
Results follow between <tool_response> and </tool_response>. Answer without a call where none is needed."""


def tool_format(io: Processor, name: str = AUTO) -> ToolFormat:
    """The format of a model's calls.

    Args:
        name: of a format; ``AUTO`` recognises the one of the chat template.

    Raises:
        UserError: the named format needs a chat template that renders tools, and the model has none.
    """
    template = io.chat_template_text()
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
"""Parts of calls that are no JSON (Qwen3-Coder, GLM-4.5, MiniMax) between ``<tool_call>`` and its end."""


def prompted(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the generic format, for a chat template that has no tools: functions, calls and results as text.

    The functions precede the first message's text. Results of consecutive calls are one message of the user's.
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
                called = {name: call["function"][name] for name in ("name", "arguments")}
                content = _joined(content, f"<tool_call>\n{_json(called)}\n</tool_call>")
            found.append({"role": role, "content": content})
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
    """A text in the form of a content: text, or a list of items."""
    return text if isinstance(content, str) else [{"type": "text", "text": text}]


def _joined(content: Any, more: Any, separator: str = "\n") -> Any:
    """A content with more after it."""
    if isinstance(content, str):
        return f"{content}{separator}{more}" if content else more
    more = [{"type": "text", "text": more}] if isinstance(more, str) else more
    return [*content, {"type": "text", "text": separator}, *more] if content else list(more)
