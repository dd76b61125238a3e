"""Mistakes in a call's keywords and requests: one line with the rule and what was received, before anything runs."""

from dataclasses import fields
from inspect import signature
from typing import Unpack, get_type_hints

import numpy as np
import pytest

import mmspec
from mmspec import Pipeline, SamplingParams, UserError
from mmspec.checks import shown
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.registry import make_drafter
from mmspec.engine.request import DecodeOptions, GenerateKeywords, parse
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.vision.processor import VisionProcessor
from tests.mmspec.test_checks import values
from tests.tiny import byte_model, byte_tokenizer


@pytest.fixture(scope="module")
def pipe():
    return Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), Ngram())


def mistake(function, *arguments, **keywords):
    with pytest.raises(UserError) as caught:
        function(*arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 240
    message.encode()  # can be printed
    return message


@pytest.mark.parametrize("method", ["generate", "generate_batch", "stream", "astream"])
def test_keywords_are_declared(method):
    """For type checkers and editors, and for ``help``: those that are taken, with their types."""
    function, declared = getattr(Pipeline, method), get_type_hints(GenerateKeywords)
    assert get_type_hints(function)["keywords"] == Unpack[GenerateKeywords]
    shown = {one.name: one.annotation for one in signature(function).parameters.values() if one.default is ...}
    assert shown == declared
    taken = {name: kind for owner in (SamplingParams, DecodeOptions) for name, kind in get_type_hints(owner).items()}
    for encode in (Processor.encode, VisionProcessor.encode):
        known = signature(encode).parameters.values()
        hints = get_type_hints(encode)
        taken |= {one.name: hints[one.name] for one in known if one.kind is one.KEYWORD_ONLY}
    assert declared == taken | {"params": SamplingParams | None, "nodes": int | None}


@pytest.mark.parametrize("kind", [SamplingParams, DecodeOptions])
def test_a_keyword_of_another_type_or_out_of_range(pipe, kind):
    for name in (one.name for one in fields(kind)):
        for value in values(kind.rule(name).expected)[1]:
            message = mistake(pipe.generate, "a", **{name: value})
            assert message == f"{name} must be {kind.rule(name).expected}: got {shown(value)}"
            assert mistake(lambda name=name, value=value: next(pipe.stream("a", **{name: value}))) == message
    assert mistake(pipe.generate, "a", nodes=object()).endswith(": got object")


@pytest.mark.parametrize(
    "keywords",
    [
        {"max_new_tokens": np.int64(3), "top_k": np.int32(2), "temperature": np.float32(0.5), "seed": np.int64(5)},
        {"max_new_tokens": 3, "stop": None, "seed": None, "num_draft_tokens": None},
        {"max_new_tokens": 3, "stop": ("x", "y"), "temperature": 1, "top_p": 1, "seed": 2**64 - 1},
        {"max_new_tokens": 3, "temperature": 0.5, "seed": -1},
        {"max_new_tokens": 3, **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))},
    ],
)
def test_numbers_of_numpy_and_whole_numbers_pass(pipe, keywords):
    assert len(pipe.generate("a", **keywords).token_ids) <= 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"a", "^a prompt must be text, chat messages or token ids: got b'a'$"),
        (None, "^a prompt must be text, chat messages or token ids: got None$"),
        (
            {"role": "user", "content": "a"},
            "^a prompt must be text, chat messages or token ids: got {'role'",
        ),
        ("ab\ud800c", r"^a prompt must be text that UTF-8 can encode: got '\\ud800' at character 2$"),
        (["a", "b"], r"^a prompt is one text, .* go to generate_batch\(\[.*\]\), got \['a', 'b'\]$"),
        ([[5, 6], [7]], r"^a prompt is one text, .* go to generate_batch\("),
        ([[{"role": "user", "content": "a"}]], r"^a prompt is one text, .* go to generate_batch\("),
        ([5, {"role": "user"}], "^a chat message must be a dict with a role and content: got 5$"),
        ([{"content": "a"}], "^a chat message must be a dict with a role and content: got {'content': 'a'}$"),
        ([{"role": "user"}], "^a message's content must be text or a list of items: got None$"),
        ([{"role": "user", "content": 5}], "^a message's content must be text or a list of items: got 5$"),
        ([{"role": "user", "content": "\udfff"}], "UTF-8"),
        ([{"role": "user", "content": ["a"]}], "^an item of a message must be a dict with a type: got 'a'$"),
        (
            [{"role": "user", "content": [{"text": "a"}]}],
            "^an item of a message must be a dict with a type: got {'text'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "^a text item must have a text: got {'type': 'text'}$"),
        ([{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], "UTF-8"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "a.png"}]}],
            "^an item's type must be text, image, video, image_url or video_url: got 'input_image'$",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "url": "data:image/png;base64,QUJD"}]}],
            r"^an item of type image_url must have {\"image_url\": {\"url\": \.\.\.}}: got .*/png;base64,\.\.\.'}$",
        ),
    ],
)
def test_prompts_that_are_none(pipe, prompt, message):
    with pytest.raises(UserError, match=message):
        pipe.generate(prompt)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (
            [{"prompt": "a", "image": "a.png"}],
            r"^a request's keys are prompt, images, videos, params: got image; did you mean images\?$",
        ),
        (
            [{"prompt": "a"}, {"prompt": "b", "max_new_tokens": 5}],
            r"prompt, images, videos, params: got max_new_tokens, which belongs into params: SamplingParams\(\.\.\.\)$",
        ),
        ([{"prompt": "a", "params": {"seed": 1}}], "^params must be mmspec.SamplingParams: got {'seed': 1}$"),
        ([{"images": None}], "^a request must have a prompt: got images$"),
        ([{}], "^a request must have a prompt: got nothing$"),
        (["a"], r"^a request must be a dict with a prompt, as {\"prompt\": \"Hello\"}: got 'a'$"),
        ({"prompt": "a"}, "^requests must be a list of dicts: got {'prompt': 'a'}$"),
        ("a", "^requests must be a list of dicts: got 'a'$"),
        ([{"prompt": 5}], "^a prompt must be text, chat messages or token ids: got 5$"),
    ],
)
def test_requests_of_a_batch(pipe, requests, message):
    with pytest.raises(UserError, match=message):
        pipe.generate_batch(requests)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda pipe: pipe.generate("a", max_tokens=5), "got max_tokens; did you mean max_new_tokens"),
        (lambda pipe: pipe.stream("a", temprature=5), "got temprature; did you mean temperature"),
        (lambda pipe: pipe.generate("a", logit_processor=[]), "got logit_processor; did you mean logits_processor"),
        (lambda pipe: pipe.generate("a", param=SamplingParams()), "got param; did you mean params"),
        (lambda pipe: pipe.generate_batch([{"prompts": "a"}]), "got prompts; did you mean prompt"),
        (lambda pipe: pipe.encode([{"prompt": "a"}], nonsense=1), "got nonsense$"),
        (
            lambda pipe: SamplingParams(temprature=1),
            "unknown field of SamplingParams: got temprature; did you mean temp",
        ),
        (lambda pipe: mmspec.load("tiny-llava", drafer="x"), "got drafer; did you mean drafter"),
        (lambda pipe: mmspec.load("tiny-hybrid", None, trust_remot_code=True), "; did you mean trust_remote_code"),
        (lambda pipe: mmspec.load("tiny-hybrid", None, nonsense=True), "unknown option of mmspec.load: got nonsense$"),
        (
            lambda pipe: mmspec.load(pipe.model, processor=pipe.processor, max_num_seq=1),
            "got max_num_seq; did you mean max_num_seqs",
        ),
        (lambda pipe: make_drafter("ngrams"), "got 'ngrams'; did you mean ngram"),
    ],
)
def test_names_that_are_nearly_right(pipe, function, message):
    with pytest.raises(UserError, match=message):
        function(pipe)


def test_what_is_left_goes_to_the_target():
    (request,) = parse([{"prompt": "a"}], {"frames": 3, "top_k": 2, "nodes": 0})
    assert (request.inputs, request.params.top_k) == ({"frames": 3}, 2)
    options = {"num_draft_tokens": 0, "trace": False, "chat_template": True, "max_time": None, "logprobs": None}
    assert {name: getattr(request.options, name) for name in options} == options


def test_chat_messages_have_items_of_every_type():
    items = [
        {"type": "text", "text": "a"},
        *({"type": kind} for kind in ("image", "video")),
        *({"type": kind, kind: url} for kind in ("image_url", "video_url") for url in ("a.png", {"url": "a.png"})),
    ]
    messages = [{"role": "system", "content": "b"}, {"role": "user", "content": items}]
    (request,) = parse([{"prompt": messages}], {})
    assert request.content == {"prompt": messages}


def test_nodes_is_another_name_of_num_draft_tokens():
    (request,) = parse([{"prompt": "a"}], {"num_draft_tokens": None, "nodes": 3})
    assert request.options.num_draft_tokens == 3
    with pytest.raises(UserError, match=r"^nodes is the former name of num_draft_tokens"):
        parse([{"prompt": "a"}], {"num_draft_tokens": 3, "nodes": 3})


def test_params_of_a_request_take_the_place_of_the_calls():
    own = SamplingParams(top_k=7)
    calls = parse([{"prompt": "a", "params": own}, {"prompt": "b"}, {"prompt": "c", "params": None}], {"top_k": 2})
    assert [call.params.top_k for call in calls] == [7, 2, 2]
    (request,) = parse([{"prompt": "a"}], {"params": own})
    assert request.params is own


def test_params_are_given_in_one_form():
    with pytest.raises(UserError, match=r"^expected either params or sampling keywords: got params and top_k$"):
        parse([{"prompt": "a"}], {"params": SamplingParams(), "top_k": 2})
    with pytest.raises(UserError, match=r"^params must be mmspec.SamplingParams: got 3$"):
        parse([{"prompt": "a"}], {"params": 3})
