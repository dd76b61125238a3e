"""Formats of tool calls: a table of models' syntaxes, their grammars and their detection from chat templates.

This module must not import torch: the command line reads the names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmspec.errors import UserError
from mmspec.sampling.syntax import json_rule

if TYPE_CHECKING:
    from mmspec.targets.processor import Processor

AUTO = "auto"
AROUND = r"(?:\s|```(?:json)?|[\[\],])*"  # around unmarked calls
NAME = r"([\w.-]+)(?=[^\w.-])"
HEAD = r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'


@dataclass(frozen=True)
class ToolFormat:
    """A model's syntax of tool calls: marker, opening, calls with separators, end.

    A call is ``{"name": NAME, KEY: ARGUMENTS}``, or the texts of ``call`` around its name and its arguments.

    Attributes:
        name: value of ``--tool-call-parser``.
        marker: text or special token before the calls; with ``in_call``, the start of a call at the output's start.
        opening, between, end: texts; ``between`` is None if the model makes one call at a time.
        key: JSON key of the arguments.
        call: texts before the name, between name and arguments, and after the arguments; ``/PATTERN/`` is a pattern.
        argument: texts before the key, between key and value, and after the value of an argument; None for JSON.
        quote: text around strings, where arguments are ``{key:value,...}`` with bare keys; requires ``argument``.
        before: texts at which a call may begin, marker excluded, where ``call`` matches them.
        in_call: whether the marker is part of a call.
        bare: whether an output may also start with calls without a marker, with or without code fences: Qwen2.5-Coder.
        id_length: alphanumeric characters of a call's id, where templates require a fixed length.
        signs: texts that chat templates with this format contain.
        aliases: further values of ``--tool-call-parser``.
    """

    name: str
    marker: str
    opening: str = ""
    between: str | None = None
    end: str = ""
    key: str = "arguments"
    call: tuple[str, str, str] | None = None
    argument: tuple[str, str, str] | None = None
    quote: str = ""
    before: tuple[str, ...] = ()
    in_call: bool = False
    bare: bool = False
    id_length: int | None = None
    signs: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def around(self) -> tuple[str, str, str]:
        """``call``, or the texts of a JSON object."""
        return self.call or ('{"name": "', f'", "{self.key}": ', "}")

    def special(self, processor: Processor) -> tuple[str, ...]:
        """Names of special tokens in the syntax."""
        texts = (self.marker, self.between or "", self.end, *self.around, *(self.argument or ()), self.quote)
        whole = "".join((*texts, *self.before)).replace("\\", "")  # backslashes of patterns
        return tuple(name for name in processor.special_tokens if name in whole)

    def bare_begin(self, names: Iterable[str]) -> str:
        """Pattern of the text before an unmarked call of these functions, with a lookahead for the call."""
        return rf'{AROUND}(?=\{{\s*"name"\s*:\s*"(?:{"|".join(map(re.escape, names))})")'

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
            parts = ["/ ?/", json.dumps(self.marker)] if self.before else [json.dumps(self.marker), *parts]
        parts.append("call")
        if several and self.between is not None:
            parts.append(f"({json.dumps(self.between)} call)*")
        bare = bare and self.bare
        rules = [
            f"start: calls{' | bare' if bare else ''}{' | instead' if instead else ''}",
            f"calls: {' '.join(parts)} {json.dumps(self.end)}",
            f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}",
            *(_ANY.format(quote=json.dumps(self.quote)).splitlines() if self.quote else ()),
        ]
        if bare:
            rules.append(f"bare: bare_call {'(BETWEEN bare_call)* ' if several else ''}END")
            rules.append(f"bare_call: {' | '.join(f'bare_{number}' for number in range(len(tools)))}")
            rules += [r"BETWEEN: /\s{0,9}(,|```\s{1,9}```(json)?)?\s{0,9}/", r"END: /\s{0,9}\]?\s{0,9}(```)?/"]
        first, then, last = self.around
        for number, tool in enumerate(tools):
            head = f"{_lark(first)} {json.dumps(tool['name'])} {_lark(then)}"
            rules.append(f"call_{number}: {head} args_{number} {_lark(last)}")
            try:
                rules += self._arguments(f"args_{number}", parameters(tool))
            except (AttributeError, LookupError, TypeError):
                raise UserError(f"the parameters of the tool {tool['name']} must be a JSON schema: got none") from None
            if bare:
                gap = r"\s{0,9}"
                head = rf'\{{{gap}"name":{gap}"{tool["name"]}",{gap}"{self.key}":{gap}'
                rules.append(rf"bare_{number}: /{head}/ bare_args_{number} /{gap}\}}/")
                rules.append(f"bare_args_{number}: {json_rule(parameters(tool), any_layout=True)}")
        if instead is not None:
            rules.append(f"instead: {json_rule(json.loads(instead))}")
        return "\n".join(rules)

    def _arguments(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Rules of a function's arguments, the first with this name. Apart from JSON, strings are constrained by
        ``enum``, ``const`` and ``maxLength`` only, and the objects and lists of formats with ``quote`` are free."""
        if self.argument is None:
            return [f"{name}: {json_rule(schema)}"]
        before, between, after = self.argument
        rules, items, optional = [], [], []
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for number, (key, one) in enumerate(schema.get("properties", {}).items()):
            item, one, kinds = f"{name}_{number}", _resolved(one, schema), json_types(one, schema)
            texts = [_lark(value if isinstance(value, str) else json.dumps(value)) for value in _values(one) or ()]
            close, value = ("", _lark(self.quote)) if self.quote else (after, "")
            if "string" not in kinds and not (self.quote and kinds & {"object", "array"}):
                value = f"{json_rule({**shared, **one})} {_lark(close)}"
            elif self.quote and kinds != {"string"}:
                value = "any"
            elif texts:
                value += f" ({' | '.join(texts)}) {_lark(close or self.quote)}"
            else:
                most = one.get("maxLength", _LONGEST) if isinstance(one, Mapping) else _LONGEST
                length = f"{{0,{most}}}" if type(most) is int and 0 <= most < _LONGEST else "*"
                rules.append(f"{item}_text[suffix={_lark(close or self.quote)}]: /(?s:.{length})/")
                value += f" {item}_text"
            rules.append(f"{item}: {_lark(before + key + between)} {value}")
            items.append(item)
            optional.append(key not in schema.get("required", ()))
        if self.quote:
            options = [] if not all(optional) else ['"{" "}"']
            for number, item in enumerate(items):
                later = zip(items[number + 1 :], optional[number + 1 :], strict=True)
                rest = " ".join(f"({_lark(after)} {one}){'?' * may}" for one, may in later)
                options.append(f'"{{" {item} {rest} "}}"')
                if not optional[number]:
                    break
            return [f"{name}: {' | '.join(options)}", *rules]
        body = " ".join(f"{item}{'?' * may}" for item, may in zip(items, optional, strict=True))
        return [f"{name}: {body or json.dumps('')}", *rules]


_LONGEST = 1000  # longer strings are not counted: automata have a state per character

_ANY = r"""any: quoted | NUMBER | WORD | "[" (any ("," any)*)? "]" | "{{" (pair ("," pair)*)? "}}"
pair: /[^\s:<,{{}}\[\]]+:/ any
quoted: {quote} text
text[suffix={quote}]: /(?s:.*)/
NUMBER: /-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?/
WORD: "true" | "false" | "null"
"""
"""Rules of a value with bare keys and quoted strings."""


def _lark(text: str) -> str:
    return text if text.startswith("/") else json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """Pattern of a text in any layout, or the pattern between slashes."""
    return text[1:-1] if text.startswith("/") else r"\s*".join(map(re.escape, re.split(r"\s+", text)))


def parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    return {"type": "object", **function.get("parameters", {})}


_DEPTH = 16  # references may be circular


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that ``$ref`` points to; None if there is none."""
    for _ in range(_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(path := schema.get("$ref"), str):
            break
        schema = root
        for part in path.removeprefix("#").split("/")[1:]:
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema


def json_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """JSON types that a schema, whose ``$ref`` points into ``root``, allows by ``type``, values or alternatives; all
    types for other schemas."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return {*_TYPES.values()}
    if (values := _values(schema)) is not None:
        return {_TYPES[type(value)] for value in values}
    if isinstance(kind := schema.get("type"), str | list):
        return {kind} if isinstance(kind, str) else set(kind)
    inner = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())]
    return set().union(*(json_types(one, root, depth + 1) for one in inner or [None]))


def _values(schema: Any) -> Sequence[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


_TYPES: Mapping[type, str] = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{dict: "object", list: "array", type(None): "null"},
}

HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    bare=True,
    signs=("<tool_call>", "arguments"),
)
"""``<tool_call>{json}</tool_call>`` of Hermes 2 Pro, Qwen2.5 and Qwen3."""

QWEN3_CODER = replace(
    HERMES,
    name="qwen3_coder",
    call=("<function=", ">\n", "</function>"),
    argument=("<parameter=", ">\n", "\n</parameter>\n"),
    bare=False,
    signs=("<tool_call>", "<function="),
    aliases=("qwen3_xml", "mimo", "step3p5"),
)
"""``<function=NAME><parameter=KEY>VALUE</parameter></function>`` of Qwen3-Coder, Qwen3.5 and Nemotron 3."""

GLM = ToolFormat(
    "glm45",
    "<tool_call>",
    between="</tool_call>\n<tool_call>",
    end="</tool_call>",
    call=("", "\n", ""),
    argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    signs=("<tool_call>", "</arg_key>\n<arg_value>"),
)
"""``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`` of GLM-4.5 and 4.6."""

GLM47 = replace(
    GLM,
    name="glm47",
    between="</tool_call><tool_call>",
    call=("", "", ""),
    argument=("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    signs=("<tool_call>", "</arg_key><arg_value>"),
)

GEMMA = ToolFormat(
    "gemma4",
    "<|tool_call>",
    between="<tool_call|><|tool_call>",
    end="<tool_call|>",
    call=("call:", "", ""),
    argument=("", ":", ","),
    quote='<|"|>',
    signs=("<|tool_call>",),
)
"""``<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:3}<tool_call|>`` of Gemma 4."""

OPENAI = ToolFormat(
    "openai",
    "to=functions.",
    call=("", r"/(<\|channel\|>commentary)?(( | ?<\|constrain\|>)json)?<\|message\|>/", ""),
    before=("<|start|>assistant", "<|channel|>commentary"),
    signs=("<|channel|>", "<|start|>assistant to="),
)
"""``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{json}`` of gpt-oss: one call."""

LLAMA = ToolFormat(
    "llama3_json",
    '{"name": "',
    key="parameters",
    in_call=True,
    signs=('"parameters": dictionary',),
    aliases=("llama4_json",),
)
"""``{"name": ..., "parameters": ...}`` of Llama 3.1 and later: one call, which is the whole output."""

MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "[", ", ", "]", id_length=9, signs=("[TOOL_CALLS]",))
"""``[TOOL_CALLS][{json}, {json}]`` of Mistral's models up to version 7 of their tokenizers."""

MISTRAL_ARGS = replace(
    MISTRAL,
    opening="",
    between="[TOOL_CALLS]",
    end="",
    call=("", r"/(\[CALL_ID\][a-zA-Z0-9]{9})?\[ARGS\]/", ""),
    signs=("[TOOL_CALLS]", "[ARGS]"),
)
"""``[TOOL_CALLS]NAME[ARGS]{json}`` of Mistral's later models."""

GENERIC = replace(HERMES, name="generic", signs=())
"""The format of Hermes, explained in the prompt: for chat templates without tools, or with other formats."""

FORMATS = (*(QWEN3_CODER, GLM, GLM47, GEMMA, OPENAI, MISTRAL_ARGS, MISTRAL, HERMES, LLAMA), GENERIC)
"""Of the formats whose signs a template contains, the first is its format."""

NAMES = (AUTO, *dict.fromkeys(name for one in FORMATS for name in (one.name, *one.aliases)))


def tool_format(processor: Processor, name: str = AUTO) -> ToolFormat:
    """The format of a model's calls, by name or from its chat template. Raises ``UserError``: the named format needs a
    chat template that renders tools, and the model has none."""
    template = processor.chat_template_text()
    named = [one for one in FORMATS if name in (AUTO, one.name, *one.aliases)]
    if "tools" not in template and GENERIC not in named:
        raise UserError(f"the tool parser {name} needs a chat template with tools: the model has none")
    found = (one for one in named if "tools" in template and all(sign in template for sign in one.signs))
    return next(found, named[-1])
