"""Formats of tool calls: recognised from templates, their grammars, and prompts without one."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mmspec import UserError
from mmspec.sampling.syntax import check_grammar
from mmspec.serving.command import serve
from mmspec.serving.tools import AUTO, FORMATS, GENERIC, HERMES, LLAMA, MISTRAL, ToolFormat, prompted, tool_format
from mmspec.targets.processor import Processor

# The lines of published templates that show the format.
TEMPLATES: dict[str, tuple[Any, ToolFormat]] = {
    "Qwen2.5, Qwen3": (
        "{% if tools %}... <tool_call>\n{'name': <function-name>, 'arguments': <args-json-object>}\n</tool_call>",
        HERMES,
    ),
    "Hermes 2 Pro": ({"default": "{{ messages }}", "tool_use": "{{ tools }}<tool_call>{{ arguments }}"}, HERMES),
    "Llama 3.1, 3.2": (
        "{% if tools %}Respond in the format {'name': function name, \"parameters\": dictionary of argument name",
        LLAMA,
    ),
    "Mistral 7B v0.3, Nemo": ("{{ '[AVAILABLE_TOOLS]' + tools }}{{ '[TOOL_CALLS] [' }}", MISTRAL),
    "Mistral, later": ("{{ tools }}[TOOL_CALLS]name[ARGS]{}", GENERIC),
    "Qwen3-Coder": ("{{ tools }}<tool_call>\n<function=name>{{ arguments }}", GENERIC),
    "GLM-4.5": ("{{ tools }}<tool_call>name\n<arg_key>{{ arguments }}", GENERIC),
    "no tools": ("{{ messages }}", GENERIC),
    "no template": (None, GENERIC),
}


def test_names_are_those_of_the_command_line() -> None:
    (option,) = (one for one in serve.params if one.name == "tool_parser")
    assert option.type.choices == (AUTO, *FORMATS)  # type: ignore[attr-defined]


def processor(template: Any) -> Processor:
    return Processor(SimpleNamespace(chat_template=template))


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(name: str) -> None:
    template, form = TEMPLATES[name]
    assert tool_format(processor(template)) is form
    assert tool_format(processor(template), "generic") is GENERIC
    if "tools" in str(template):
        assert tool_format(processor(template), "mistral") is MISTRAL
    else:
        with pytest.raises(UserError, match="the tool parser mistral needs a chat template with tools"):
            tool_format(processor(template), "mistral")


SCHEMA = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/Unit"}, "n": {"type": "integer"}},
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
TOOLS: list[dict[str, Any]] = [{"name": "heat", "parameters": SCHEMA}, {"name": "stop"}]


def accepts(grammar: str, text: str) -> bool:
    """Whether a grammar accepts a text as a whole."""
    check_grammar("grammar", grammar)
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def written(form: ToolFormat, *calls: tuple[str, Any]) -> str:
    """Calls as the format's documentation shows them."""
    texts = [json.dumps({"name": name, form.key: arguments}) for name, arguments in calls]
    if form is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(texts)}]"
    return texts[0] if form is LLAMA else "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_grammars(form: ToolFormat) -> None:
    heat, stop = ("heat", {"unit": "C", "n": 3}), ("stop", {})
    many = {"several": True, "marked": True}
    assert accepts(form.grammar(TOOLS, **many), written(form, heat))
    assert accepts(form.grammar(TOOLS, **many), written(form, stop))
    if form is not LLAMA:
        assert accepts(form.grammar(TOOLS, **many), written(form, heat, stop, heat))
        assert not accepts(form.grammar(TOOLS, marked=True, several=False), written(form, heat, stop))
    for wrong in (("heat", {"unit": "K"}), ("heat", {}), ("heat", {"unit": "C", "x": 1}), ("other", {})):
        assert not accepts(form.grammar(TOOLS, **many), written(form, wrong))
    after = form.grammar(TOOLS, marked=False, several=True)
    assert accepts(after, written(form, heat).removeprefix(form.marker))
    assert not accepts(after, written(form, heat))
    either = form.grammar(TOOLS, **many, instead='{"const": [1]}')
    assert accepts(either, "[1]")
    assert accepts(either, written(form, heat))


def test_prompts_without_a_template_for_tools() -> None:
    def turns(wrap: Any) -> list[dict[str, Any]]:
        calls = [{"id": "1", "function": {"name": "heat", "arguments": {"unit": "°"}}}]
        return [
            {"role": "system", "content": wrap("Be brief.")},
            {"role": "user", "content": wrap("Heat!")},
            {"role": "assistant", "content": wrap("Well."), "tool_calls": calls * 2},
            {"role": "tool", "content": wrap("one"), "tool_call_id": "1"},
            {"role": "tool", "content": wrap("two"), "tool_call_id": "1"},
        ]

    call = '<tool_call>\n{"name": "heat", "arguments": {"unit": "°"}}\n</tool_call>'
    results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    expected = ["Heat!", f"Well.\n{call}\n{call}", results]
    found = prompted(turns(lambda text: text), TOOLS)
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in found[1:]] == expected
    assert found[0]["content"].endswith("Answer without a call where none is needed.\n\nBe brief.")
    assert json.dumps(TOOLS[0]) in found[0]["content"]
    # Models that read images take lists of items.
    items = prompted(turns(lambda text: [{"type": "text", "text": text}]), TOOLS)
    assert ["".join(item["text"] for item in message["content"]) for message in items[1:]] == expected
    assert prompted(turns(str), [])[0]["content"] == "Be brief."
