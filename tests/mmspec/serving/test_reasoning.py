"""Models that think, over HTTP with openai-python: reasoning, answers, tools, histories, variables of templates."""

import json
from contextlib import contextmanager

import pytest

from mmspec.checking.oracle import Oracle
from mmspec.serving.runner import effort_variables
from tests.testkit.served import served
from tests.thinking import END, MARKERS, PROMPT, ids_of, pipeline, prompt_of, script, tokenizer

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": "x"}}\n</tool_call>'
DECOY = '<tool_call>\n{"name": "look", "arguments": {"a": "no"}}\n</tool_call> {"a": 1}'
"""In reasoning: no call, and no JSON of the schema."""


@contextmanager
def serving(pipe, mode, **options):
    with (
        served(pipe, names=["tiny"], chat_template_kwargs={"mode": mode}, **options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client


def asked(**fields):
    return {"model": "tiny", "messages": PROMPT, "temperature": 0, "max_tokens": 200, **fields}


def both(client, **fields):
    """The only choice of an answer, which is the same as a stream, and its reasoning under both names."""
    whole = client.chat.completions.create(**asked(**fields))
    choice, message = whole.choices[0], whole.choices[0].message
    chunks = list(
        client.chat.completions.create(**asked(**fields), stream=True, stream_options={"include_usage": True})
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    for name in ("reasoning_content", "reasoning"):
        reasoning = "".join(getattr(delta, name, None) or "" for delta in deltas)
        assert reasoning == (getattr(message, name, None) or "")
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    arguments = "".join(call.function.arguments or "" for delta in deltas for call in delta.tool_calls or ())
    assert arguments == "".join(call.function.arguments for call in message.tool_calls or ())
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason
    assert chunks[-1].usage == whole.usage
    choice.tokens = whole.usage.completion_tokens_details.reasoning_tokens
    return choice


def said(spelling, mode, reasoning, answer):
    start, end = MARKERS[spelling]
    begun = {"begun": "", "open": f"{start}\n"}.get(mode)
    return ids_of(spelling, answer if begun is None else f"{begun}{reasoning}\n{end}\n\n{answer}")


@pytest.mark.parametrize("mode", ["begun", "open", "closed"])
@pytest.mark.parametrize("spelling", MARKERS)
def test_reasoning_and_answers(spelling, mode):
    """Drafted across the markers; tools and formats concern the answer alone."""
    thinks = mode != "closed"
    for fields, answer in (
        ({}, "Ulm: it is {warm}."),
        ({"response_format": FORM}, '{"a": "y"}'),
        ({"tools": [TOOL]}, "No call."),
        ({"tools": [TOOL]}, CALL),
        ({"tools": [TOOL], "tool_choice": "required"}, CALL),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}, CALL),
        ({"tools": [TOOL], "response_format": FORM}, '{"a": "x"}'),
        ({"tools": [TOOL], "response_format": FORM}, CALL),
    ):
        wanted = said(spelling, mode, DECOY, answer)
        pipe = pipeline(spelling, Oracle([[*wanted, END]], vocab=len(tokenizer(spelling))))
        script(spelling, mode, wanted, tools=fields.get("tools"))
        with serving(pipe, mode) as (_, client):
            choice = both(client, **fields)
        message = choice.message
        assert getattr(message, "reasoning_content", None) == (DECOY if thinks else None), (fields, answer)
        rest = answer if spelling == "text" else "\n\n" + answer  # a token ends the marker with the white space
        assert choice.tokens == (len(wanted) - len(ids_of(spelling, rest)) if thinks else 0)
        if answer == CALL:
            assert (message.content, choice.finish_reason) == (None, "tool_calls")
            assert json.loads(message.tool_calls[0].function.arguments) == {"a": "x"}
        else:
            assert (message.content, message.tool_calls, choice.finish_reason) == (answer, None, "stop")


@pytest.fixture(scope="module")
def running():
    with serving(pipeline("added"), "begun") as server:
        yield server


def test_an_output_that_ends_in_reasoning(running):
    script("added", "begun", said("added", "begun", DECOY, "Never."))
    choice = both(running[1], max_tokens=9, tools=[TOOL])
    assert (choice.message.content, choice.finish_reason, choice.tokens) == (None, "length", 9)
    assert choice.message.reasoning_content == DECOY[:9]


def test_stop_strings_count_in_the_answer(running):
    """Which begins after white space: clients stop at blank lines."""
    script("added", "begun", said("added", "begun", "One. Two.\n\nThree.", "One. Two.\n\nThree."))
    for stop, answer in ((" Two", "One."), ("\n\n", "One. Two."), (["x", "Three."], "One. Two.\n\n")):
        choice = both(running[1], stop=stop)
        assert choice.message.reasoning_content == "One. Two.\n\nThree."
        assert (choice.message.content, choice.finish_reason) == (answer, "stop")


def test_the_model_wants_to_leave_the_grammar(running):
    script("added", "begun", said("added", "begun", "So.", "No JSON."))
    choice = both(running[1], response_format=FORM, logit_bias={str(END): 50})
    assert choice.message.reasoning_content == "So."
    assert json.loads(choice.message.content)["a"] in ("x", "y")


def test_reasoning_that_come_back(running):
    server, client = running
    turns = [*PROMPT, {"role": "assistant", "content": "Ulm", "reasoning_content": "Hm </s>"}, *PROMPT]
    expected = len(prompt_of("added", "begun", turns))
    script("added", "begun", said("added", "begun", "Hm", "Ulm"))
    message = client.chat.completions.create(**asked()).choices[0].message
    found = client.chat.completions.create(**asked(messages=[*PROMPT, message, *PROMPT])).usage.prompt_tokens
    assert found == expected - len(ids_of("added", " ")) - len("</s>")
    for name in ("reasoning_content", "reasoning"):
        given = [*PROMPT, {"role": "assistant", "content": "Ulm", name: "Hm </s>"}, *PROMPT]
        assert server.post(asked(messages=given, max_tokens=1)).json()["usage"]["prompt_tokens"] == expected
        wrong = server.post(asked(messages=[{**PROMPT[0], name: "x"}])).json()["error"]
        assert wrong["message"].endswith(f"{name} goes with the role assistant")


def rendered(server, **fields):
    """The prompt of a request, as ``/tokenize`` shows it."""
    tokens = server.post({"model": "tiny", "messages": PROMPT, **fields}, "../tokenize").json()["tokens"]
    return str(tokenizer("added").decode(tokens))


def test_variables_of_the_template(running):
    server, client = running
    assert rendered(server).endswith("<think>\n")
    assert rendered(server, chat_template_kwargs={"mode": "closed"}).endswith("</think>\n\n")
    script("added", "closed", ids_of("added", "<think> is no marker"))
    off = {"chat_template_kwargs": {"mode": None, "enable_thinking": False}}
    for fields in (off, {**off, "reasoning_effort": "high"}):
        message = client.chat.completions.create(**asked(max_tokens=40), extra_body=fields).choices[0].message
        assert (message.content, hasattr(message, "reasoning_content")) == ("<think> is no marker", False)
    plain = client.chat.completions.create(**asked(max_tokens=1)).usage.prompt_tokens
    high = client.chat.completions.create(**asked(max_tokens=1), reasoning_effort="high").usage.prompt_tokens
    assert high - plain == len("effort high")
    own = {"chat_template_kwargs": {"reasoning_effort": "minimal"}}  # counts more
    given = client.chat.completions.create(**asked(max_tokens=1), reasoning_effort="high", extra_body=own)
    assert given.usage.prompt_tokens - plain == len("effort minimal")
    response = client.responses.create(model="tiny", input="Which?", reasoning={"effort": "high"}, max_output_tokens=1)
    assert response.usage.input_tokens == high
    for name in ("messages", "tokenize", "add_generation_prompt", "chat_template"):
        error = server.post(asked(chat_template_kwargs={name: "x"})).json()["error"]["message"]
        assert error == f"chat_template_kwargs must not have names that rendering itself uses: got {name}"
    error = server.post(asked(chat_template_kwargs=[1])).json()["error"]
    assert (error["message"], error["param"]) == (
        "chat_template_kwargs must be an object: got [1]",
        "chat_template_kwargs",
    )


def test_effort():
    """Templates get the variables that they read."""
    both = "{{ enable_thinking }}{{ reasoning_effort }}"
    assert effort_variables("none", both) == {"enable_thinking": False}
    assert (
        effort_variables("low", both)
        == effort_variables("low", "{{ reasoning_effort }}")
        == {"reasoning_effort": "low"}
    )
    assert effort_variables("none", "{{ reasoning_effort }}") == {"reasoning_effort": "none"}
    assert effort_variables("low", "{{ enable_thinking }}{{ my_reasoning_effort }}") == {}
    assert effort_variables(None, both) == {}


def test_none_takes_reasoning_for_the_answer():
    script("added", "begun", said("added", "begun", "Hm.", "Ulm"))
    with serving(pipeline("added"), "begun", reasoning_parser="none") as (_, client):
        choice = both(client)
    assert (choice.message.content, choice.tokens) == ("Hm.\n</think>\n\nUlm", 0)


def responded(client, **fields):
    """A response, which is the same as a stream, and the types of its events."""
    request = {"model": "tiny", "input": "Which?", "temperature": 0, "max_output_tokens": 200, **fields}
    whole = client.responses.create(**request)
    events = list(client.responses.create(**request, stream=True))
    last = events[-1].response
    strip = {"id": True, "call_id": True}
    assert [item.model_dump(exclude=strip) for item in last.output] == [
        item.model_dump(exclude=strip) for item in whole.output
    ]
    assert last.usage == whole.usage
    for kind in ("reasoning_text", "output_text"):
        deltas = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        assert deltas == "".join(
            part.text for item in whole.output for part in getattr(item, "content", ()) if part.type == kind
        )
    whole.events = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    return whole


def test_items_of_reasoning(running):
    _, client = running
    item = ("output_item.added", "content_part.added")
    done = ("content_part.done", "output_item.done")
    script("added", "begun", said("added", "begun", DECOY, "Ulm."))
    found = responded(client, reasoning={"effort": "high", "summary": "auto"}, include=["message.output_text.logprobs"])
    assert found.events == [
        *("created", "in_progress", *item, "reasoning_text.done", *done),
        *(*item, "output_text.done", *done, "completed"),
    ]
    reasoning, message = found.output
    assert (reasoning.type, reasoning.content[0].text, message.content[0].text) == ("reasoning", DECOY, "Ulm.")
    assert "".join(one.token for one in message.content[0].logprobs).strip() == "Ulm.</s>"
    assert found.usage.output_tokens_details.reasoning_tokens == len(said("added", "begun", DECOY, "")) - 1
    assert found.reasoning.effort == "high"
    script("added", "begun", said("added", "begun", DECOY, CALL))
    function = {"type": "function", **TOOL["function"]}
    assert [item.type for item in responded(client, tools=[function]).output] == ["reasoning", "function_call"]
    cut = responded(client, max_output_tokens=9)
    assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]
    assert cut.output[0].content[0].text == DECOY[:9]


def test_a_conversation_with_reasoning_goes_on(running):
    """By its items, or by its id: the template gets the reasoning of earlier turns."""
    _, client = running
    script("added", "begun", said("added", "begun", "Hm", "Ulm"))
    first = client.responses.create(model="tiny", input="Which?", temperature=0)
    turns = [*PROMPT, {"role": "assistant", "content": "Ulm", "reasoning_content": "Hm"}, *PROMPT]
    expected = len(prompt_of("added", "begun", turns))
    by_id = client.responses.create(model="tiny", input="Which?", previous_response_id=first.id, max_output_tokens=1)
    items = [*PROMPT, *[item.model_dump(exclude_none=True) for item in first.output], *PROMPT]
    by_items = client.responses.create(model="tiny", input=items, max_output_tokens=1)
    hidden = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    with_hidden = client.responses.create(model="tiny", input=[*items[:-1], hidden, items[-1]], max_output_tokens=1)
    assert with_hidden.usage.input_tokens == expected
    assert by_id.usage.input_tokens == by_items.usage.input_tokens == expected
