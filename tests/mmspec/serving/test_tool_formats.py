"""Forms of tool calls: recognised from templates, as grammars, and read from streamed outputs."""

import json
import time
from types import SimpleNamespace

import pytest
from llguidance import LLMatcher, LLTokenizer

from mmspec import UserError
from mmspec.sampling.syntax import check_grammar
from mmspec.serving.call_formats import (
    FORMATS,
    GEMMA,
    GENERIC,
    GLM,
    GLM47,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    OPENAI,
    QWEN3_CODER,
    tool_format,
)
from mmspec.serving.tools import CallReader, plan_tools, prompted
from mmspec.targets.processor import Processor

# The lines of published templates that show the format.
TEMPLATES = {
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
    "Mistral, later": ("{{ tools }}{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", MISTRAL_ARGS),
    "Qwen3-Coder, Qwen3.5": ("{{ tools }}<tool_call>\n<function=name>\n{{ arguments }}", QWEN3_CODER),
    "Seed-OSS": ("{{ tools }}<seed:tool_call>\n<function=name>\n{{ arguments }}", GENERIC),
    "MiniMax-M2": ('{{ tools }}<minimax:tool_call>\n<invoke name="n">{{ arguments }}', GENERIC),
    "GLM-4.5": ("{{ tools }}<tool_call>name\n<arg_key>a</arg_key>\n<arg_value>{{ arguments }}", GLM),
    "GLM-4.7": ("{{ tools }}<tool_call>name<arg_key>a</arg_key><arg_value>{{ arguments }}", GLM47),
    "Gemma 4": ("{{ tools }}{{- '<|tool_call>call:' + function['name'] + '{' -}}", GEMMA),
    "gpt-oss": (
        "{{ tools }}{{ '<|start|>assistant to=' }}{{ 'functions.' + name + '<|channel|>commentary ' }}",
        OPENAI,
    ),
    "no tools": ("{{ messages }}", GENERIC),
    "no template": (None, GENERIC),
}
TRICKY = json.dumps({"a": 'x </tool_call> <tool_call> {"name": "b"} ] } \\" [TOOL_CALLS] \n', "b": [{"c": {}}]})
SMALL = '{"n": 3}'
BACKSLASH = json.dumps({"path": "C:\\", "quoted": '\\"', "last": "}\\"})
"""Arguments that end in a backslash before their quote."""


def processor(template):
    return Processor(SimpleNamespace(chat_template=template))


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(name):
    template, form = TEMPLATES[name]
    assert tool_format(processor(template)) is form
    assert tool_format(processor(template), "generic") is GENERIC
    if "tools" in str(template):
        assert tool_format(processor(template), "mistral") is (MISTRAL_ARGS if form is MISTRAL_ARGS else MISTRAL)
        assert tool_format(processor(template), "qwen3_xml") is QWEN3_CODER
    else:
        with pytest.raises(UserError, match="the tool parser mistral needs a chat template with tools"):
            tool_format(processor(template), "mistral")


SCHEMA = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/Unit"}, "n": {"type": "integer"}, "s": {"type": "string", "maxLength": 3}},
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
TOOLS = [{"name": "heat", "parameters": SCHEMA}, {"name": "stop"}]


def accepts(grammar, text):
    check_grammar("grammar", grammar)
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def quoted(value):
    """A value as Gemma 4's template renders it."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{quoted(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def plain(value):
    """A value as templates with tags render it."""
    return value if isinstance(value, str) else json.dumps(value)


def written(form, *calls):
    """Calls as the format's documentation and templates show them."""
    texts = [json.dumps({"name": name, form.key: arguments}) for name, arguments in calls]
    tags = {
        QWEN3_CODER: ("<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>"),
        GLM: ("{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", ""),
        GLM47: ("{}", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", ""),
    }
    if form in tags:
        head, item, end = tags[form]
        texts = [
            head.format(name) + "".join(item.format(key, plain(value)) for key, value in arguments.items()) + end
            for name, arguments in calls
        ]
    if form in (GLM, GLM47):
        return ("\n" if form is GLM else "").join(f"<tool_call>{text}</tool_call>" for text in texts)
    if form is GEMMA:
        return "".join(f"<|tool_call>call:{name}{quoted(arguments)}<tool_call|>" for name, arguments in calls)
    if form is OPENAI:
        ((name, arguments),) = calls
        return f" to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"
    if form is MISTRAL_ARGS:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    if form is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(texts)}]"
    return texts[0] if form is LLAMA else "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def label(form):
    return "".join((form.name, *form.call[1:2])) if form.call else form.name


@pytest.mark.parametrize("form", FORMATS, ids=label)
def test_grammars(form):
    heat, stop = ("heat", {"unit": "C", "n": 3, "s": "abc"}), ("stop", {})
    many, long = {"several": True, "marked": True}, ("heat", {"unit": "C", "s": "long"})
    assert accepts(form.grammar(TOOLS, **many), written(form, heat))
    assert accepts(form.grammar(TOOLS, **many), written(form, stop))
    record = {"$schema": "http://json-schema.org/draft-07/schema#", "propertyNames": {"type": "string"}}
    free = [{"name": "heat", "parameters": {**record, "properties": {"unit": True, "n": {}}}}]
    assert accepts(form.grammar(free, **many), written(form, ("heat", {"unit": "K", "n": [1, {"a": None}]})))
    if form.between is not None:
        assert accepts(form.grammar(TOOLS, **many), written(form, heat, stop, heat))
        assert not accepts(form.grammar(TOOLS, marked=True, several=False), written(form, heat, stop))
    for wrong in (long, ("heat", {"unit": "K"}), ("heat", {}), ("heat", {"unit": "C", "x": 1}), ("other", {})):
        assert not accepts(form.grammar(TOOLS, **many), written(form, wrong))
    if not form.in_call:
        after = form.grammar(TOOLS, marked=False, several=True)
        assert accepts(after, written(form, heat).lstrip().removeprefix(form.marker))
        assert not accepts(after, written(form, heat))
    bare = form.grammar(TOOLS, **many, bare=True)
    assert accepts(bare, written(form, heat))
    for texts, right in (
        ([json.dumps({"name": "heat", form.key: {"unit": "C", "n": 3}}, indent=2)], True),
        ([json.dumps({"name": "stop", form.key: {}}), json.dumps({"name": "stop", form.key: {}}, indent=1)], True),
        ([json.dumps({"name": "heat", form.key: {"unit": "K"}}, indent=2)], False),
        ([json.dumps({"name": "other", form.key: {}}, indent=2)], False),
    ):
        for between, end in (("\n```\n\n```json\n", "\n```"), (",\n  ", "\n]\n```"), ("\n", "\n")):
            assert accepts(bare, between.join(texts) + end) == (right and form in (HERMES, GENERIC))
            single = form.grammar(TOOLS, marked=True, several=False, bare=True)
            assert accepts(single, between.join(texts) + end) == (len(texts) == 1 and right and form.bare)
    either = form.grammar(TOOLS, **many, instead='{"const": [1]}')
    assert accepts(either, "[1]")
    assert accepts(either, written(form, heat))


@pytest.mark.parametrize("form", FORMATS, ids=label)
def test_arguments_that_may_be_left_out(form):
    properties = {name: {"type": "integer"} for name in "ab"} | {"c": {"type": "array", "items": {"$ref": "#/$defs/N"}}}
    schema = {"properties": properties, "required": ["b"], "additionalProperties": False}
    tool = {"name": "f", "parameters": {**schema, "$defs": {"N": {"type": "integer"}}}}
    grammar, given = form.grammar([tool], marked=True, several=False), {"a": 1, "b": 2, "c": [3]}
    for names in ("", "a", "b", "c", "ab", "ac", "bc", "abc"):
        assert accepts(grammar, written(form, ("f", {name: given[name] for name in names}))) == ("b" in names), names
    assert accepts(grammar, written(form, ("f", {"b": 2, "c": ["3"]}))) == bool(form.quote)  # lists are free there


def test_bare_calls_may_be_spread_over_many_lines():
    """Objects in objects, as far to the right as they come."""
    inner = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    given = {"n": 1}
    for _ in range(4):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        given = {"a": given}
    bare = HERMES.grammar([{"name": "f", "parameters": inner}], marked=True, several=True, bare=True)
    for indent in (None, 1, 4, "\t"):
        assert accepts(bare, json.dumps({"name": "f", "arguments": given}, indent=indent) + "\n"), indent
    given["a"]["a"]["a"]["a"]["n"] = "1"
    assert not accepts(bare, json.dumps({"name": "f", "arguments": given}, indent=4) + "\n")


def test_descriptions_are_not_in_grammars():
    """Fields and definitions of these names are."""
    text = "x" * 100_000
    named = {"title": {"type": "string", "description": text}, "n": {"$ref": "#/description"}}
    schema = {"title": text, "description": {"type": "integer", "title": text}, "properties": named}
    grammar = HERMES.grammar([{"name": "f", "parameters": schema}], marked=True, several=True, bare=True)
    for arguments, right in (({"title": "a", "n": 1}, True), ({"title": 1}, False), ({"n": "a"}, False)):
        assert accepts(grammar, written(HERMES, ("f", arguments))) == right


def test_prompts_without_a_template_for_tools():
    def turns(wrap):
        calls = [{"id": "1", "function": {"name": "heat", "arguments": {"unit": "°"}}}]
        return [
            {"role": "system", "content": wrap("Be brief.")},
            {"role": "user", "content": wrap("Heat!")},
            {"role": "assistant", "content": wrap("Well."), "tool_calls": calls * 2, "reasoning": "Hm"},
            {"role": "tool", "content": wrap("one"), "tool_call_id": "1"},
            {"role": "tool", "content": wrap("two"), "tool_call_id": "1"},
        ]

    call = '<tool_call>\n{"name": "heat", "arguments": {"unit": "°"}}\n</tool_call>'
    results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    expected = ["Heat!", f"Well.\n{call}\n{call}", results]
    found = prompted(turns(lambda text: text), TOOLS)
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in found[1:]] == expected
    assert [message.get("reasoning") for message in found] == [None, None, "Hm", None]
    assert found[0]["content"].endswith("Answer without a call where none is needed.\n\nBe brief.")
    assert json.dumps(TOOLS[0]) in found[0]["content"]
    # Models that read images take lists of items.
    items = prompted(turns(lambda text: [{"type": "text", "text": text}]), TOOLS)
    assert ["".join(item["text"] for item in message["content"]) for message in items[1:]] == expected
    assert prompted(turns(str), [])[0]["content"] == "Be brief."
    (pictured,) = prompted([{"role": "user", "content": [{"type": "image"}]}], TOOLS)
    assert [item["type"] for item in pictured["content"]] == ["text", "text", "image"]


def call(name, arguments, key="arguments"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def spread(name, arguments):
    return call(name, arguments).replace("{", "{\n  ", 1).replace(', "', ',\n  "', 1)


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)


BOTH = [("first", TRICKY), ("second", SMALL)]
FUNCTIONS = [
    {
        "name": "first",
        "parameters": {
            "properties": {
                "a": {"type": "string"},
                "b": {"type": "array"},
                "c": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Text"}]},
            },
            "$defs": {"Text": {"anyOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/Text"}]}},
        },
    },
    {"name": "second", "parameters": {"properties": {"n": {"type": "integer"}}}},
]
MIXED = [
    ("first", {"a": ' <b> {"x": ], \\ é\n\n', "b": [1, {"k": ["}", "null"], "m": None}], "c": "3 of"}),
    ("second", {"n": -3}),
    ("first", {"a": "5", "b": [], "c": 4}),
    ("first", {}),
]
OTHER = call("third", SMALL)
LATER = call("first", SMALL, "parameters")
CASES = {
    "hermes": (HERMES, hermes(call("first", TRICKY), call("second", SMALL)), "", BOTH),
    "backslashes": (HERMES, hermes(call("first", BACKSLASH)), "", [("first", BACKSLASH)]),
    "hermes after text": (HERMES, "Well.\n\n" + hermes(call("first", TRICKY)), "Well.", BOTH[:1]),
    "hermes without lines": (HERMES, f"<tool_call>{call('second', SMALL)}</tool_call>\n", "", BOTH[1:]),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{call('first', TRICKY)}, {call('second', SMALL)}]", "", BOTH),
    "mistral after text": (MISTRAL, f"Well. [TOOL_CALLS][{call('second', SMALL)}]", "Well.", BOTH[1:]),
    "llama": (LLAMA, call("first", TRICKY, "parameters"), "", BOTH[:1]),
    "llama later": (LLAMA, "See " + LATER, "See " + LATER, []),
    "text": (HERMES, "a < b, <tool is no marker \n", "a < b, <tool is no marker \n", []),
    "no call": (HERMES, "a <tool_call>\n{broken", "a <tool_call>\n{broken", []),
    "cut in its arguments": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    "fenced": (HERMES, f"```json\n{spread('first', TRICKY)}\n```", "", BOTH[:1]),
    "bare": (HERMES, f"{call('first', TRICKY)}\n{call('second', SMALL)}\n", "", BOTH),
    "bare, generic": (GENERIC, spread("second", SMALL), "", BOTH[1:]),
    "a fenced list": (HERMES, f"```\n[{spread('first', TRICKY)},\n  {call('second', SMALL)}]\n```\n", "", BOTH),
    "two fences": (HERMES, "\n\n".join(f"```json\n{spread(*one)}\n```" for one in BOTH), "", BOTH),
    "cut in its name": (HERMES, '```json\n{"name": "fir', '```json\n{"name": "fir', []),
    "bare later": (HERMES, "See " + call("first", SMALL), "See " + call("first", SMALL), []),
    "a name that begins as a function's": (HERMES, call("first_thing", SMALL), call("first_thing", SMALL), []),
    "JSON that is no call": (HERMES, f"```json\n{OTHER}\n```", f"```json\n{OTHER}\n```", []),
    "code": (HERMES, "```python\n{'name': 1}\n```\n", "```python\n{'name': 1}\n```\n", []),
    "cut in its end": (HERMES, hermes(call("second", SMALL))[:-4], "", BOTH[1:]),
}


def read(form, pieces, begun=False):
    """Content and calls, put together from deltas as openai-python does."""
    reader, content = CallReader(form, FUNCTIONS, begun=begun), ""
    calls = []
    for number, piece in enumerate(pieces):
        delta = reader.feed(piece, final=number == len(pieces) - 1).to_dict()
        content += delta.get("content", "")
        for one in delta.get("tool_calls", ()):
            if one["index"] == len(calls):
                calls.append({"id": one["id"], "name": one["function"]["name"], "arguments": ""})
            calls[one["index"]]["arguments"] += one["function"]["arguments"]
    assert reader.calls == len(calls)
    assert len({one["id"] for one in calls}) == len(calls)
    assert all(len(one["id"]) == (form.id_length or 29) for one in calls)
    return content, [(one["name"], one["arguments"]) for one in calls]


@pytest.mark.parametrize("form", FORMATS, ids=label)
def test_all_formats_at_all_pieces(form):
    calls = MIXED if form.between is not None else MIXED[:1]
    text = ("" if form is LLAMA else "So." if form.before else "So.\n\n") + written(form, *calls)
    expected = ("" if form is LLAMA else "So.", calls)

    def parsed(pieces):
        content, found = read(form, pieces)
        return content, [(name, json.loads(arguments)) for name, arguments in found]

    assert parsed([text]) == expected
    assert parsed([*text]) == expected
    for cut in range(1, len(text)):
        assert parsed([text[:cut], text[cut:]]) == expected, text[:cut]
        content, found = read(form, [text[:cut]])  # cut by max_tokens
        assert form is LLAMA or "So."[: len(content)] == content[:3]
        for (name, arguments), (right, whole) in zip(found, read(form, [text])[1], strict=False):
            assert name == right
            assert whole.startswith(arguments)


@pytest.mark.parametrize("schema", [{"properties": 5}, {"properties": {"a": {"anyOf": 5}}}, {"required": 5}], ids=str)
def test_schemas_that_are_none(schema):
    """In JSON, llguidance checks them."""
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}, **schema}}
    for form in (QWEN3_CODER, GLM, GEMMA):
        with pytest.raises(UserError, match="the parameters of the tool f must be a JSON schema"):
            form.grammar([tool], marked=True, several=True)


def test_parts_of_a_value_are_searched_once():
    """Long values in many pieces take linear time."""
    text = "x" * 200_000
    for form in (QWEN3_CODER, GEMMA):
        reader, began = CallReader(form, FUNCTIONS), time.perf_counter()
        calls = written(form, ("first", {"a": text}))
        deltas = [reader.feed(calls[at : at + 4]) for at in range(0, len(calls), 4)]
        arguments = "".join(one["function"]["arguments"] for delta in deltas for one in delta.calls.values())
        assert json.loads(arguments) == {"a": text}
        assert time.perf_counter() - began < 10


@pytest.mark.parametrize("case", CASES)
def test_calls_do_not_depend_on_where_pieces_end(case):
    form, text, content, calls = CASES[case]
    assert read(form, [*text]) == (content, calls)
    for cut in range(1, len(text)):
        assert read(form, [text[:cut], text[cut:]]) == (content, calls), text[:cut]


def test_content_and_arguments_are_passed_on_at_once():
    reader = CallReader(HERMES)
    assert reader.feed("One two").to_dict() == {"content": "One two"}
    reader.feed('\n<tool_call>\n{"name": "f", "arguments": ')
    (begun,) = reader.feed('{"a').to_dict()["tool_calls"]
    assert (begun["type"], begun["function"]) == ("function", {"name": "f", "arguments": '{"a'})
    assert reader.feed('": 1').to_dict() == {"tool_calls": [{"index": 0, "function": {"arguments": '": 1'}}]}


def test_only_what_may_be_a_call_is_held():
    for held, more in (("```", "py"), ("```json\n{", '"title'), ('\n{ "name" : "fi', 'sh"')):
        reader = CallReader(HERMES, FUNCTIONS[:1])
        assert reader.feed(held).to_dict() == {}
        assert reader.feed(more).to_dict() == {"content": held + more}
    text = call("a_b", SMALL)
    assert CallReader(HERMES, [{"name": "a.b"}]).feed(text).to_dict() == {"content": text}


@pytest.mark.parametrize("special", [(), ("<tool_call>",)])
def test_calls_without_a_marker_that_is_a_token_are_text(special):
    text, plan = call("stop", "{}"), plan_tools(SimpleNamespace(special_tokens=special), HERMES, TOOLS, "auto")
    delta = plan.reader().feed(text, final=True)
    assert (delta.content, len(delta.calls)) == ((text, 0) if special else ("", 1))


def test_a_marker_before_the_output():
    assert read(MISTRAL, [f"[{call('second', SMALL)}]"], begun=True) == ("", BOTH[1:])


def test_what_begins_like_a_call_is_not_held_for_ever():
    reader = CallReader(HERMES)
    assert not reader.feed("<tool_call>" + "x" * 150).content
    assert reader.feed("y" * 100).content == "<tool_call>" + "x" * 150 + "y" * 100
    assert reader.feed("z").content == "z"
