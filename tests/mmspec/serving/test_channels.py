"""Formats of calls and of reasoning whose markers are special tokens: gpt-oss, Gemma 4, GLM, Mistral, over HTTP."""

import copy
import json
from functools import cache

import pytest
import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from mmspec import Pipeline
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.union import Union
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.mmspec.serving.test_tool_formats import quoted
from tests.mmspec.serving.test_tools import CONTEXT, END, TURNS, USER, both, called, client_of
from tests.testkit.served import served
from tests.tiny import byte_model, byte_tokenizer

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["town"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
TOWN, UNIT = {"town": 'Ulm "<b>" }\n', "days": 3}, {"town": "Bonn", "days": 1, "unit": "F"}
THOUGHT = 'Is it {"name": "weather"} or 3?'
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def harmony(arguments):
    return f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{json.dumps(arguments)}"


def gemma(arguments):
    return f"<|tool_call>call:weather{quoted(arguments)}<tool_call|>"


def glm(arguments):
    items = [(key, one if isinstance(one, str) else json.dumps(one)) for key, one in arguments.items()]
    tags = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{one}</arg_value>\n" for key, one in items)
    return f"<tool_call>weather\n{tags}</tool_call>"


def mistral(arguments):
    return f"[TOOL_CALLS]weather[ARGS]{json.dumps(arguments)}"


MODELS = {
    # special tokens; text of the template; its end; reasoning; before a call, before an answer; a call
    "gpt-oss": (
        ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"],
        "<|start|>assistant to=<|channel|>analysis<|message|>",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        "<|channel|>final<|message|>{}",
        harmony,
    ),
    "Gemma 4": (
        ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
        "<|tool_call><|channel>thought",
        "<|turn>model\n",
        "<|channel>thought\n{}\n<channel|>",
        "{}",
        gemma,
    ),
    "GLM": (
        [f"<{end}{name}>" for name in ("think", "tool_call", "arg_key", "arg_value") for end in ("", "/")],
        "<think><tool_call></arg_key>\n<arg_value>",
        "<|assistant|>\n",
        "<think>{}</think>\n",
        "{}",
        glm,
    ),
    "Mistral": (
        ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
        "[THINK][TOOL_CALLS][ARGS]",
        "[/INST]",
        "[THINK]{}[/THINK]",
        "{}",
        mistral,
    ),
}


@cache
def pipeline(name):
    tokens, says, prompt, *_ = MODELS[name]
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(one, normalized=False) for one in tokens]})
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}SAYS{% endif %}".replace("SAYS", says) + TURNS + prompt
    changed = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    config = LlamaConfig(**{**byte_model().config.to_dict(), **changed})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    drafter = Union([Recycle(top_k=3), Ngram()])
    return Pipeline(TransformersTarget(model), Processor(tokenizer), drafter, "tiny", max_num_seqs=4)


@pytest.fixture(scope="module", params=MODELS)
def running(request):
    pipe = pipeline(request.param)
    with served(pipe) as server, client_of(server) as client:
        yield request.param, pipe, client


def script(pipe, text, tools=(TOOL,)):
    """Bias the model towards a text after the prompt, with markers as tokens; returns its tokens."""
    ids = [*pipe.processor.tokenizer(text, add_special_tokens=False).input_ids, END]
    prompt = pipe.encode([{"prompt": USER}], **({"tools": list(tools)} if tools else {})).input_ids[0].tolist()
    whole = prompt[-CONTEXT:] + ids
    pipe.model.generation_config.sequence_bias = {tuple(whole[at : at + CONTEXT + 1]): 100.0 for at in range(len(ids))}
    return ids


@pytest.mark.parametrize("thinks", [True, False])
def test_calls_answers_and_forms(running, thinks):
    name, pipe, client = running
    *_, reasoning, header, write = MODELS[name]
    before = reasoning.format(THOUGHT) if thinks else ""
    for fields, answer in (
        ({"response_format": FORM}, json.dumps(UNIT)),  # first, without special tokens as text
        ({"tools": [TOOL]}, "It rains: { <b> }."),
        ({}, "It rains."),
    ):
        script(pipe, before + header.format(answer), fields.get("tools"))
        found = both(client, **{"tools": openai.NOT_GIVEN, **fields})
        assert (found.message.content, found.finish_reason) == (answer, "stop"), (fields, found)
        assert getattr(found.message, "reasoning_content", None) == (THOUGHT if thinks else None)
    for arguments in (TOWN, UNIT):
        # Elsewhere, the prompt of a required call ends with the marker: nothing comes before the call.
        for choice in ("auto", "required") if name == "gpt-oss" else ("auto",):
            ids = script(pipe, before + write(arguments))
            found = both(client, tools=[TOOL], tool_choice=choice, max_tokens=400)
            assert called(found) == [("weather", arguments)], choice
            assert (found.message.content, found.finish_reason) == (None, "tool_calls")
            assert getattr(found.message, "reasoning_content", None) == (THOUGHT if thinks else None)
            inputs = pipe.encode([{"prompt": USER}], tools=[TOOL]).input_ids
            plain = pipe.model.generate(inputs, max_new_tokens=len(ids), do_sample=False)
            assert plain[0, -len(ids) :].tolist() == ids


def test_required_calls(running):
    name, pipe, client = running
    script(pipe, " to" if name == "gpt-oss" else "No.")  # without reasoning, which would end at once
    found = both(client, tools=[TOOL], tool_choice="required", logit_bias={str(END): 100}, max_tokens=400)
    ((function, arguments),) = called(found)
    assert (function, found.finish_reason, type(arguments["town"])) == ("weather", "tool_calls", str)


def test_forms_beside_tools(running):
    """A marker that is a token has no grammar of calls or answers; gpt-oss' is text."""
    name, pipe, client = running
    if name != "gpt-oss":
        message = "response_format beside tools needs tool_choice none or required: got auto"
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            both(client, tools=[TOOL], response_format=FORM)
        assert refused.value.param == "response_format"
    script(pipe, MODELS[name][-2].format('{"town": "Ulm", "days": 44}'), ())
    found = both(client, tools=[TOOL], tool_choice="none", response_format=FORM, logit_bias={str(END): 50})
    answer = json.loads(found.message.content)
    assert (answer["town"], answer["days"]) == ("Ulm", 4)


def test_arguments_are_constrained(running):
    """A value beyond its maximum, a word that is none of an enumeration, and an unknown argument."""
    name, pipe, client = running
    for wrong in ({"town": "Ulm", "days": 44}, {"town": "Ulm", "unit": "K"}, {"town": "Ulm", "hour": 3}):
        script(pipe, MODELS[name][-1](wrong))
        ((called_name, arguments),) = called(both(client, tools=[TOOL], logit_bias={str(END): 50}))
        assert (called_name, arguments["town"]) == ("weather", "Ulm")
        assert arguments.keys() <= SCHEMA["properties"].keys()
        assert (arguments.get("days", 1) <= 9, arguments.get("unit", "C") in "CF") == (True, True)


def test_text_before_a_call(running):
    name, pipe, client = running
    *_, write = MODELS[name]
    said = (
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant" if name == "gpt-oss" else "Let me see."
    )
    script(pipe, said + write(UNIT))
    found = both(client, tools=[TOOL])
    assert (found.message.content, called(found)) == ("Let me see.", [("weather", UNIT)])


@pytest.mark.parametrize("before", ["", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"])
@pytest.mark.parametrize("middle", ["<|channel|>commentary json", "<|channel|>commentary", " <|constrain|>json"])
def test_recipients_before_the_channel(before, middle):
    pipe = pipeline("gpt-oss")
    with served(pipe) as server, client_of(server) as client:
        script(pipe, f"{before} to=functions.weather{middle}<|message|>{json.dumps(UNIT)}")
        found = both(client, tools=[TOOL])
        assert (found.message.content, called(found)) == (None, [("weather", UNIT)])
