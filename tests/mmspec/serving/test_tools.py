"""Tools over HTTP with openai-python: choices, streams, histories, formats.

The model is a tiny random one that is biased towards a script, token by token, at the nodes of trees, too.
"""

import copy
import json
from functools import cache

import pytest
import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from mmspec import Pipeline, UserError
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.union import Union
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.testkit.served import served
from tests.tiny import byte_model, byte_tokenizer

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.usefixtures("one_thread")

END, MARKER, CONTEXT = 2, 259, 64  # tokens before one of a script, which tell its place
TURNS = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{{ c.function | tojson }}{% endfor %}"
    "{% if m.name %} of {{ m.name }}{% endif %}</s>{% endfor %}<s>assistant, who may call functions: "
)
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }}<tool_call>{'name', 'arguments'}</tool_call>{% endif %}" + TURNS,
    "llama3_json": '{% if tools %}{{ tools | tojson }}"parameters": dictionary{% endif %}' + TURNS,
    "mistral": "{% if tools %}{{ tools | tojson }}{% endif %}{# [TOOL_CALLS] #}" + TURNS,
    "generic": TURNS,
}
TEMPLATES["tokens"] = TEMPLATES["hermes"]  # with a vocabulary like Qwen's


class weather(pydantic.BaseModel):  # noqa: N801
    """The weather of a town."""

    town: str = pydantic.Field(max_length=40)
    days: int = pydantic.Field(ge=1, le=9)


TOOL = openai.pydantic_function_tool(weather)
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK = {"type": "function", "function": {"name": "clock", "strict": True, "parameters": NOTHING}}
FIRST, SECOND = {"town": 'Ulm </tool_call> "<tool_call>"', "days": 3}, {"town": "Bonn", "days": 1}
USER = [{"role": "user", "content": "What will the weather be?"}]


@cache
def model(vocab=260):
    torch.manual_seed(0)
    changed = {"vocab_size": vocab, "max_position_embeddings": 4096}
    return LlamaForCausalLM(LlamaConfig(**{**byte_model().config.to_dict(), **changed})).eval()


@cache
def pipeline(name, drafter=None):
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    if name == "tokens":
        tokenizer.add_tokens([AddedToken(one, normalized=False) for one in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = TEMPLATES[name]
    drafter = drafter or Union([Recycle(top_k=3), Ngram()])
    target = TransformersTarget(copy.deepcopy(model(len(tokenizer))))
    return Pipeline(target, Processor(tokenizer), drafter, "tiny", max_num_seqs=4)


def scripted(text, messages=USER, tools=(TOOL, CLOCK), pipe=None):
    """Bias the model towards a text after the prompt; returns the text's tokens."""
    pipe = pipe or pipeline("hermes")
    before, _, after = text.partition("[TOOL_CALLS]")
    ids = pipe.processor.text_ids(before) + ([MARKER, *pipe.processor.text_ids(after)] if after else []) + [END]
    prompt = pipe.encode([{"prompt": messages}], tools=list(tools)).input_ids[0].tolist()
    whole = prompt[-CONTEXT:] + ids
    bias = {tuple(whole[at : at + CONTEXT + 1]): 100.0 for at in range(len(ids))}
    assert len(bias) == len(ids)
    pipe.model.generation_config.sequence_bias = bias
    return ids


def written(*calls):
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls
    )


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client():
    with served(pipeline("hermes")) as server, client_of(server) as found:
        yield found


def asked(**fields):
    return {"model": "tiny", "messages": USER, "tools": [TOOL, CLOCK], "temperature": 0, "max_tokens": 300, **fields}


def called(choice):
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]


def both(client, **fields):
    """The only choice of an answer, which is the same as a stream."""
    whole = client.chat.completions.create(**asked(**fields)).choices[0]
    with client.chat.completions.stream(**asked(**fields)) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.message.content or None, final.finish_reason) == (whole.message.content or None, whole.finish_reason)
    assert called(final) == called(whole)
    for one in (whole, final):
        calls = one.message.tool_calls or []
        assert len({call.id for call in calls}) == len(calls)
    assert not any("index" in call.to_dict() for call in whole.message.tool_calls or ())  # which chunks have
    return whole


def test_calls_of_the_models_choice(client):
    calls = [("weather", FIRST), ("clock", {})]
    scripted("Let me see.\n" + written(*calls))
    choice = both(client)
    assert (choice.message.content, choice.finish_reason, called(choice)) == ("Let me see.", "tool_calls", calls)
    single = client.chat.completions.create(**asked(parallel_tool_calls=False)).choices[0]
    assert (single.finish_reason, called(single)) == ("tool_calls", calls[:1])
    cut = client.chat.completions.create(**asked(max_tokens=60)).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("Let me see.", "length")
    parsed = client.chat.completions.parse(**asked()).choices[0].message.tool_calls
    assert parsed[0].function.parsed_arguments == weather(**FIRST)
    scripted("It rains.", tools=())
    plain = both(client, tool_choice="none")
    assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == ("It rains.", None, "stop")


@pytest.mark.parametrize("marked", [True, False])
def test_arguments_are_constrained_once_a_call_has_begun(client, marked):
    wrong = {"town": "Ulm", "days": 44}
    scripted(written(("weather", wrong)) if marked else json.dumps({"name": "weather", "arguments": wrong}, indent=2))
    ((name, arguments),) = called(both(client, logit_bias={str(END): 50}))
    assert (name, arguments["town"]) == ("weather", "Ulm")
    assert weather(**arguments).days <= 9


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}], ids=str)
def test_calls_that_are_required(client, choice):
    scripted('"No."')
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "No."}}}  # of answers without calls
    found = both(client, tool_choice=choice, logit_bias={str(END): 100}, response_format=form)
    assert (found.message.content, found.finish_reason) == (None, "tool_calls")
    ((name, arguments),) = called(found)
    if name == "clock":
        assert found.message.tool_calls[0].function.arguments == "{}"
    else:
        assert choice == "required"
        assert weather(**arguments)


@pytest.mark.parametrize("parallel", [None, False])
def test_a_named_tool_is_called_once(client, parallel):
    calls = [("weather", FIRST), ("weather", SECOND), ("clock", {})]
    scripted(written(*calls))
    more = {} if parallel is None else {"parallel_tool_calls": parallel}
    named = both(client, tool_choice={"type": "function", "function": {"name": "weather"}}, **more)
    assert (named.finish_reason, called(named)) == ("tool_calls", calls[:1])
    required = both(client, tool_choice="required", **more)
    assert called(required) == (calls[:1] if parallel is False else calls)


def test_calls_without_a_marker(client):
    """As Qwen2.5-Coder writes calls: a valid call, and a name without a function."""
    right, other = (
        json.dumps({"name": name, "arguments": {"town": "Ulm", "days": 3}}, indent=2) for name in ("weather", "Ana")
    )
    scripted(f"```json\n{right}\n```")
    choice = both(client)
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert choice.message.tool_calls[0].function.arguments in right  # laid out as the model does
    assert called(choice) == [("weather", {"town": "Ulm", "days": 3})]
    scripted(other)
    assert both(client).message.content == other


def test_a_conversation_goes_on(client):
    scripted(written(("weather", FIRST)))
    message = both(client).message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    call = {"function": {"name": "weather", "arguments": FIRST}}
    rendered = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "name": "weather"},
    ]
    scripted("Rain.", rendered)
    assert both(client, messages=[*USER, message, result]).message.content == "Rain."


@pytest.mark.parametrize("name", ["mistral", "llama3_json", "generic"])
def test_other_formats(name):
    pipe, one = pipeline(name), json.dumps({"name": "weather", "arguments": SECOND})
    text = {"mistral": f"[TOOL_CALLS][{one}]", "generic": written(("weather", SECOND))}.get(
        name, one.replace("arguments", "parameters")
    )
    with served(pipe) as server, client_of(server) as client:
        if name == "generic":
            pipe.model.generation_config.sequence_bias = None
        else:
            scripted(text, pipe=pipe)
            choice = both(client)
            assert (choice.message.content, called(choice)) == (None, [("weather", SECOND)])
            assert name != "mistral" or len(choice.message.tool_calls[0].id) == 9
        if name == "llama3_json":  # only the start of an output may be a call
            scripted(said := 'See {"name": "Ana"}', pipe=pipe)
            assert both(client).message.content == said
        fields = asked(tool_choice="required", logit_bias={str(END): 100})
        tokens = [client.chat.completions.create(**one).usage.prompt_tokens for one in (asked(max_tokens=1), fields)]
        assert tokens[1] - tokens[0] == (name == "mistral")  # the marker, as one token
        forced = both(client, tool_choice="required", logit_bias={str(END): 100}, max_tokens=400)
        assert len(called(forced)) == 1
        assert forced.finish_reason == "tool_calls"


def test_a_named_format_needs_tools_in_the_template():
    with (
        pytest.raises(UserError, match="tool parser mistral needs"),
        served(pipeline("generic"), tool_call_parser="mistral"),
    ):
        pass


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_markers_that_are_tokens(choice):
    pipe, calls = pipeline("tokens"), [("weather", FIRST), ("clock", {})]
    ids = scripted(written(*calls), pipe=pipe)
    assert ids[0] == MARKER + 1
    with served(pipe) as server, client_of(server) as client:
        assert called(both(client, tool_choice=choice)) == calls
        assert client.chat.completions.create(**asked(tool_choice=choice)).usage.completion_tokens == len(ids)
