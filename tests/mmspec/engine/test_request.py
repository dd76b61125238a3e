"""Mistakes in keywords and requests: one line with the rule and the received value, before anything runs."""

from inspect import signature
from types import MappingProxyType
from typing import Unpack, get_type_hints

import pytest

import mmspec
from mmspec import Pipeline, SamplingParams, UserError
from mmspec.drafters.registry import make_drafter
from mmspec.engine.request import DecodeOptions, GenerateKeywords, parse
from mmspec.targets.processor import Processor
from mmspec.vision.processor import VisionProcessor
from tests.tiny import byte_model, byte_tokenizer


@pytest.fixture(scope="module")
def pipe():
    return mmspec.load(byte_model(), "ngram", processor=byte_tokenizer())


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


def message(role="user", **content):
    return [{"role": role, **content}]


KEYS = "a request's keys are prompt, images, videos, params: got"
SEVERAL = (
    'a prompt is one text, or one list of chat messages or token ids: several go to generate_batch([{"prompt": ...'
)
MISTAKES = [
    *(
        (lambda pipe, prompt=prompt: pipe.generate(prompt), expected)
        for prompt, expected in [
            (b"a", "a prompt must be text, chat messages or token ids: got b'a'"),
            (None, "a prompt must be text, chat messages or token ids: got None"),
            ({"role": "user"}, "a prompt must be text, chat messages or token ids: got {'role'"),
            ("ab\ud800c", r"prompt must be text that UTF-8 can encode: got 'ab\ud800c'"),
            (["a", "b"], SEVERAL),
            ([[5, 6], [7]], SEVERAL),
            ([message(content="a")], SEVERAL),
            ([], "the prompt must not be empty"),
            (message(content="hi"), "chat messages need a chat template: the tokenizer has none"),
            ([5, {"role": "user"}], "prompt[0] must be an object: got 5"),
            ([{"content": "a"}], "prompt[0].role is required"),
            (message(), "prompt[0].content is required"),
            (message(5, content="a"), "prompt[0].role must be text that UTF-8 can encode: got 5"),
            (message(content=5), "prompt[0].content must be a list: got 5"),
            (message(content="\udfff"), r"prompt[0].content[0].text must be text that UTF-8 can encode: got '\udfff'"),
            (message(content=["a"]), "prompt[0].content[0] must be an object: got 'a'"),
            (message(content=[{"text": "a"}]), "prompt[0].content[0].type is required"),
            (message(content=[{"type": "text"}]), "prompt[0].content[0].text is required"),
            (
                message(content=[{"type": "input_image"}]),
                "prompt[0].content[0].type must be 'text', 'image', 'video', 'image_url', 'video_url': got ",
            ),
            (
                message(content=[{"type": "image_url", "url": "data:image/png;base64,QUJD"}]),
                "prompt[0].content[0].image_url is required",
            ),
            (
                message(content=[{"type": "video_url", "video_url": {}}]),
                "prompt[0].content[0].video_url.url is required",
            ),
        ]
    ),
    *(
        (lambda pipe, requests=requests: pipe.generate_batch(requests), expected)
        for requests, expected in [
            ([{"prompt": "a", "image": "a.png"}], f"{KEYS} image; did you mean images?"),
            ([{"prompts": "a"}], f"{KEYS} prompts; did you mean prompt?"),
            (
                [{"prompt": "a"}, {"prompt": "b", "max_new_tokens": 5}],
                f"{KEYS} max_new_tokens, which belongs into params: SamplingParams(...)",
            ),
            ([{"prompt": "a", "params": {"seed": 1}}], "params must be mmspec.SamplingParams: got {'seed': 1}"),
            ([{"images": None}], "a request must have a prompt: got images"),
            ([{}], "a request must have a prompt: got nothing"),
            (["a"], 'a request must be a dict with a prompt, as {"prompt": "Hello"}: got \'a\''),
            ({"prompt": "a"}, "requests must be a list of dicts: got {'prompt': 'a'}"),
            ("a", "requests must be a list of dicts: got 'a'"),
            ([{"prompt": 5}], "a prompt must be text, chat messages or token ids: got 5"),
        ]
    ),
    *(
        (lambda pipe, keywords=keywords: pipe.generate("a", **keywords), expected)
        for keywords, expected in [
            ({"num_draft_tokens": -1}, "num_draft_tokens must be >= 0: got -1"),
            ({"nodes": object()}, "num_draft_tokens must be a whole number: got object"),
            ({"num_draft_tokens": 3, "nodes": 3}, "nodes is the former name of num_draft_tokens"),
            ({"logits_processor": [5]}, "logits_processor must be a list of logits processors: got [5]"),
            ({"logits_processor": len}, "logits_processor must be a list of logits processors: got "),
            ({"logits_processor": [int]}, "logits_processor must be a list of logits processors: got [<class 'int'>]"),
            ({"stopping_criteria": [5]}, "stopping_criteria must be a list of callables: got [5]"),
            ({"trace": 1}, "trace must be true or false: got 1"),
            ({"logprobs": 21}, "logprobs must be <= 20: got 21"),
            ({"logprobs": -1}, "logprobs must be >= 0: got -1"),
            ({"chat_template": "no"}, "chat_template must be true or false: got 'no'"),
            ({"max_time": -0.5}, "max_time must be >= 0: got -0.5"),
            ({"reasoning": "xml"}, "reasoning must be 'auto' or 'none' or 'think' or "),
            ({"adapter": 5}, "adapter must be text that UTF-8 can encode: got 5"),
            ({"max_tokens": 5}, "unknown option for this model: got max_tokens; did you mean max_new_tokens?"),
            (
                {"do_sample": True},
                "unknown option for this model: got do_sample; write temperature, where 0 is greedy, instead",
            ),
            ({"param": SamplingParams()}, "unknown option for this model: got param; did you mean params?"),
            (
                {"params": SamplingParams(), "top_k": 2},
                "expected either params or sampling keywords: got params and top_k",
            ),
            ({"params": 3}, "params must be mmspec.SamplingParams: got 3"),
            ({"frames": 3}, "unknown option for this model: got frames"),
            ({"stop_strings": ["a"]}, "unknown option for this model: got stop_strings; write stop instead"),
            ({"streamer": None}, "unknown option for this model: got streamer; write Pipeline.stream instead"),
        ]
    ),
    (lambda pipe: next(pipe.stream("a", trace=1)), "trace must be true or false: got 1"),
    (lambda pipe: pipe.stream("a", temprature=5), "unknown option for this model: got temprature; did you mean temp"),
    (lambda pipe: pipe.encode([{"prompt": "a"}], nonsense=1), "unknown option for a text model: got nonsense"),
    (
        lambda pipe: mmspec.load("tiny-llava", drafer="x"),
        "unknown option of mmspec.load: got drafer; did you mean drafter?",
    ),
    (lambda pipe: mmspec.load("tiny-hybrid", None, nonsense=True), "unknown option of mmspec.load: got nonsense"),
    (lambda pipe: mmspec.load("tiny-hybrid", warm_up=-1), "warm_up must be >= 0: got -1"),
    (
        lambda pipe: mmspec.load("tiny-hybrid", generation_config="x"),
        "generation_config must be 'auto' or 'mmspec': got 'x'",
    ),
    (
        lambda pipe: mmspec.load(pipe.model, processor=pipe.processor, max_num_seq=1),
        "unknown option of mmspec.load: got max_num_seq; did you mean max_num_seqs?",
    ),
    (lambda pipe: make_drafter("ngrams"), "unknown drafter: expected one of "),
]


@pytest.mark.parametrize(("call", "expected"), MISTAKES)
def test_mistakes(pipe, call, expected):
    with pytest.raises(UserError) as caught:
        call(pipe)
    found = str(caught.value)
    assert found.startswith(expected)
    assert "\n" not in found
    assert len(found) < 300
    found.encode()  # can be printed


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
    messages = ({"role": "system", "content": "b"}, MappingProxyType({"role": "user", "content": tuple(items)}))
    (request,) = parse([{"prompt": messages}], {})
    assert request.content == {"prompt": messages}


def test_params_of_a_request_take_the_place_of_the_calls():
    own = SamplingParams(top_k=7)
    calls = parse([{"prompt": "a", "params": own}, {"prompt": "b"}, {"prompt": "c", "params": None}], {"top_k": 2})
    assert [call.params.top_k for call in calls] == [7, 2, 2]
    (request,) = parse([{"prompt": "a"}], {"params": own})
    assert request.params is own
