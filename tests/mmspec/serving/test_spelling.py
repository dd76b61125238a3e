"""Bytes and places of tokens whose log probabilities are asked for, where characters consist of several tokens."""

import json

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("llguidance")

import mmspec
from mmspec import Pipeline
from mmspec.engine.stats import TokenLogprob
from mmspec.serving.formats import TextFormat
from mmspec.serving.schemas import CompletionRequest
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.mmspec.targets.test_detokenizer import _TOKENIZERS, TOKENIZERS, _sentencepiece
from tests.testkit.served import events, served, texts

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WORD = "naïve 👩‍🚀 日本"
ASKED = {
    "model": "tiny-hybrid",
    "temperature": 0,
    "max_tokens": 80,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": WORD}}},
}


@pytest.fixture(scope="module")
def hybrid(one_thread):
    with served(mmspec.load("tiny-hybrid", drafter=None, device="cpu")) as running:
        yield running


def chunks(response):
    return [chunk["choices"][0] for chunk in events(response)]


def test_bytes_spell_the_text(hybrid):
    body = {**ASKED, "messages": [{"role": "user", "content": "Say it."}], "logprobs": True, "top_logprobs": 2}
    choice = hybrid.post(body).json()["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert json.loads(choice["message"]["content"]) == WORD
    assert b"".join(bytes(one["bytes"]) for one in tokens).decode() == f'"{WORD}"</s>'
    assert "bytes:\\xc3" in [one["token"] for one in tokens]
    streamed = [chunk.get("logprobs") for chunk in chunks(hybrid.post({**body, "stream": True}))]
    assert [one for part in streamed if part for one in part["content"]] == tokens


def test_offsets_are_characters_of_the_text(hybrid):
    body = {**ASKED, "prompt": "Say it.", "logprobs": 5}
    choice = hybrid.post(body, "completions").json()["choices"][0]
    text, found = choice["text"], choice["logprobs"]
    spelt = [hybrid.pipe.io.token_bytes(token) for token in hybrid.pipe.io.text_ids(text, add_special_tokens=False)]
    # The offset of a token is its first character; the last token is the end of the sequence.
    before = [b"".join(spelt[:place]).decode(errors="ignore") for place in range(len(spelt) + 1)]
    assert found["text_offset"] == [len(one) for one in before]
    assert all(len(top) == 5 for top in found["top_logprobs"])
    streamed = chunks(hybrid.post({**body, "stream": True}, "completions"))
    assert [at for chunk in streamed for at in chunk["logprobs"]["text_offset"]] == found["text_offset"]


def test_offsets_of_a_stop_string_are_at_the_end(hybrid):
    body = {**ASKED, "prompt": "Say it.", "logprobs": 0, "stop": "ve 👩"}
    choice = hybrid.post(body, "completions").json()["choices"][0]
    assert choice["text"] == '"naï'
    assert choice["logprobs"]["text_offset"][-1] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_echoes_of_sentencepiece(one_thread, stream):
    """Prompts and answers join as in the decoded whole: one blank before a word, none before the prompt."""
    tokenizer = _sentencepiece("legacy")
    tokenizer.backend_tokenizer.decoder = TOKENIZERS["llama"]().backend_tokenizer.decoder
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=2, **SIZES)).eval()
    word = tokenizer.convert_tokens_to_ids("▁the")
    prompts = [tokenizer("a b").input_ids, tokenizer("the", add_special_tokens=False).input_ids]
    body = {"model": "m", "echo": True, "temperature": 0, "max_tokens": 2, "logit_bias": {word: 100}, "stream": stream}
    with served(Pipeline(TransformersTarget(model), Processor(tokenizer), name="m")) as running:
        for prompt in ("a b", " the", "<s> b"):  # typed, it is text
            assert texts(running.post({**body, "prompt": prompt}, "completions")) == [f"{prompt} the the"]
        found = texts(running.post({**body, "prompt": prompts, "n": 2}, "completions"))
    wholes = [tokenizer.decode([*prompt, word, word]) for prompt in prompts]
    assert wholes == ["<s> a b the the", "the the the"]
    assert found == [whole for whole in wholes for _ in range(2)]


def test_tokens_of_one_text():
    """SentencePiece: letters are tokens twice. Offsets after a stop string are at the end."""
    io = Processor(_TOKENIZERS["first"]())
    named = io.tokenizer.convert_tokens_to_ids
    asked = CompletionRequest(model="m", prompt="x", logprobs=2)
    form = TextFormat("m", io, asked, [""])
    ids = [named("▁the"), named("▁a"), named("</s>")]
    top = [(named("a"), -1.0), (named("<0x61>"), -2.0)]
    logprobs = [TokenLogprob(token, -1.0, top, 4 * at) for at, token in enumerate(ids)]
    form.add(0, mmspec.Piece(" the a", ids, "stop", logprobs=logprobs))
    logprobs = form.whole()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" the", " a", "</s>"]
    assert logprobs["text_offset"] == [0, 4, 6]
    assert logprobs["top_logprobs"][0] == {"a": -1.0, f"token_id:{named('<0x61>')}": -2.0}
