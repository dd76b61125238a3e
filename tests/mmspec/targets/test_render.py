"""Chat messages in the forms that chat templates expect."""

from __future__ import annotations

import copy
import json

import pytest

import mmspec
from mmspec import UserError
from mmspec.targets.processor import UserText, render
from tests.model_folders import tokenizer

CALLS = "{% for message in messages %}{% for call in message.tool_calls %}{{ call.function.name }}("
END = "){% endfor %}{{ message.content }};{% endfor %}"
OBJECTS = CALLS + "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }},{% endfor %}" + END
EITHER = CALLS + "{% set a = call.function.arguments %}{{ a if a is string else a | tojson }}" + END
TEXTS = CALLS + "{{ '<' + call.function.arguments + '>' }}" + END
ARGUMENTS: dict[str, list[str]] = {  # as sent; in the three templates
    '{"a": 1, "b": "</s>"}': ["a=1,b=</s>,", '{"a": 1, "b": "</s>"}', '<{"a": 1, "b": "</s>"}>'],
    "{}": ["", "{}", "<{}>"],
    "": ["", "{}", "<>"],
    "null": ["", "{}", "<null>"],
    "[1]": ["", "{}", "<[1]>"],
    '{"a": "cut </s>': ["", "{}", '<{"a": "cut </s>>'],
    "[" * 100_000: ["", "{}", f"<{'[' * 100_000}>"],
}


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda text: text[:20])
def test_arguments_are_objects_where_a_template_takes_them_and_otherwise_the_text(arguments: str) -> None:
    plain = copy.deepcopy(tokenizer())
    marks = UserText(plain)
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
        {"role": "user", "content": "arguments"},
    ]
    for plain.chat_template, expected in zip((OBJECTS, EITHER, TEXTS), ARGUMENTS[arguments], strict=True):
        found = render(plain, marks, messages)
        assert found.replace("\ue0a1", "") == f"f({expected});arguments;"
        assert ("</s>" in found) is False  # typed tokens are marked
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return
    if isinstance(given, dict):  # as transformers has it
        messages[0]["tool_calls"][0]["function"]["arguments"] = given  # type: ignore[index]
        plain.chat_template = EITHER
        assert render(plain, marks, messages).replace("\ue0a1", "") == plain.apply_chat_template(
            messages, tokenize=False
        )


JOINS_ANSWERS = (
    "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% else %}{{ '[' + m.content + ']' }}{% endif %}{% endfor %}"
)
JOINS_ALL = "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"
REFUSES = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}{{ raise_exception('roles') }}"


@pytest.mark.parametrize("parts", [False, True])
def test_contents_are_texts_for_templates_that_join_them(parts: bool) -> None:
    pipe = mmspec.load("tiny-llava", drafter=None, device="cpu")
    roles = {"system": "Be brief.", "user": "Hi.", "assistant": "Hello.", "tool": "5"}
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in roles.items()
    ]
    for template, expected in (
        (JOINS_ANSWERS, "[Be brief.]Hi.[Hello.][5]"),
        (JOINS_ALL, "[Be brief.][Hi.][Hello.][5]"),
    ):
        pipe.processor.plain.chat_template = template
        ids = pipe.encode([{"prompt": messages}]).input_ids
        assert ids[0].tolist() == pipe.processor.tokenizer(expected)["input_ids"]
    pipe.processor.plain.chat_template = REFUSES
    with pytest.raises(UserError, match="does not accept the messages: roles"):
        pipe.encode([{"prompt": messages}])
