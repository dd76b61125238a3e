"""Thoughts before an answer, end to end: grammars and stop strings begin after them, at every node of a tree.

The reference looks for the markers in the whole output each time, as text, and decodes plainly.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation import logits_process as hf

pytest.importorskip("llguidance")

import mmspec
from mmspec import Pipeline, SamplingParams, UserError
from mmspec.eval.decoding.oracle import Oracle
from mmspec.sampling.thoughts import FORMATS, NAMES, thought_format
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.mmspec.sampling.plain import allowed_tokens, decode_plainly, masking, source
from tests.tiny import byte_model

pytestmark = pytest.mark.usefixtures("one_thread")

END, BLANKS, NEW = 2, 8, 60
MARKERS = {"text": ("<think>", "</think>"), "added": ("<think>", "</think>"), "special": ("[THINK]", "[/THINK]")}
"""How the markers are spelt: by several tokens, or as a token each."""

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}{{ '(' + m.reasoning_content + ')' if m.reasoning_content }}: "
    "{{ m.content }}</s>{% endfor %}<s>assistant: "
    "{% if mode == 'begun' %}START\n{% elif mode == 'closed' %}START\n\nEND\n\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
KINDS: dict[str, Any] = {"json_schema": SCHEMA, "regex": "(yes|no), [a-c]{2,5}", "grammar": 'start: "{" /[0-9]{2,3}/ "}"'}
PROMPT: Any = [{"role": "user", "content": "Which?"}]


@cache
def tokenizer(spelling: str) -> PreTrainedTokenizerFast:
    """A token per byte, and some whose first byte ends a marker."""
    merges = [(">", "{"), (">", "Ċ"), (">Ċ", "Ċ"), ("Ċ", "Ċ"), ("k", ">"), ("y", "e")]
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": END, **{symbol: i for i, symbol in enumerate(symbols, start=3)}}
    plain = Tokenizer(BPE(vocab=vocab, merges=merges))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    if spelling == "added":
        made.add_tokens([AddedToken(one, normalized=False) for one in MARKERS["added"]])
    if spelling == "special":
        made.add_special_tokens({"additional_special_tokens": list(MARKERS["special"])})
    start, end = MARKERS[spelling]
    made.chat_template = TEMPLATE.replace("START", start).replace("END", end)
    return made


@cache
def target(spelling: str) -> TransformersTarget:
    torch.manual_seed(0)
    changed = {"vocab_size": len(tokenizer(spelling)), "max_position_embeddings": 4096}
    return TransformersTarget(LlamaForCausalLM(LlamaConfig(**{**byte_model().config.to_dict(), **changed})).eval())


def pipeline(spelling: str, drafter: Any = None) -> Pipeline:
    return Pipeline(target(spelling), Processor(tokenizer(spelling)), drafter)


def ids_of(spelling: str, text: str) -> list[int]:
    found: list[int] = tokenizer(spelling)(text, add_special_tokens=False).input_ids
    return found


def script(spelling: str, mode: str, wanted: list[int]) -> None:
    """Bias the model towards an output."""
    prompt = prompt_of(spelling, mode)
    whole = [*prompt[-20:], *wanted, END]
    keys = [tuple(whole[at - 20 : at + 1]) for at in range(20, len(whole))]
    target(spelling).model.generation_config.sequence_bias = dict.fromkeys(keys, 60.0)


def prompt_of(spelling: str, mode: str) -> list[int]:
    encoded = pipeline(spelling).encode([{"prompt": PROMPT}], chat_template_kwargs={"mode": mode})
    return encoded.input_ids[0].tolist()


@cache
def byte_by_symbol() -> dict[str, int]:
    """Bytes of texts by the characters that stand for them in a byte-level vocabulary; others, in no text, lack."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    codes = (code for code in (*range(0x800), *range(0x800, 0x110000, 0x400)) if not 0xD800 <= code < 0xE000)
    return {symbol: byte for code in codes for symbol, byte in zip(split(chr(code))[0][0], chr(code).encode(), strict=True)}


@cache
def bytes_of(spelling: str, token: int) -> bytes:
    text: str = tokenizer(spelling).convert_ids_to_tokens(token)
    if token in tokenizer(spelling).added_tokens_decoder:
        return text.encode()
    return bytes(byte_by_symbol().get(symbol, 0xFF) for symbol in text)


def parts(spelling: str, mode: str, said: list[int]) -> tuple[str | None, list[int]]:
    """Thoughts, None if there are none, and the tokens after them; the text of a special token is a byte of its own."""
    start, end = (one.encode() for one in MARKERS[spelling])
    if mode == "closed":
        return None, said
    thoughts, begun = b"", mode == "begun"
    thought = begun
    for n in range(len(said) + 1):
        text = b"".join(bytes_of(spelling, token) for token in said[:n])
        if not begun and not re.match(rb"\s*" + re.escape(start), text):
            continue
        thought = True
        thoughts = re.sub(rb"<s>|</s>|<pad>|\[THINK\]", b"", text.strip().removeprefix(b"" if begun else start))
        if end in thoughts:
            return thoughts.partition(end)[0].decode(errors="replace").strip(), said[n:]
    return (thoughts.decode(errors="replace").strip(), []) if thought else (None, said)


def in_thoughts(spelling: str, mode: str, said: list[int]) -> bool:
    thoughts, _ = parts(spelling, mode, said)
    text = b"".join(bytes_of(spelling, token) for token in said)
    return thoughts is not None and MARKERS[spelling][1].encode() not in text


def allowed(spelling: str, mode: str, form: str, said: list[int]) -> list[int] | None:
    """What may come after some tokens: a grammar that does not begin with white space."""
    start, end = (one.encode() for one in MARKERS[spelling])
    vocab = {token: bytes_of(spelling, token) for token in range(3, len(tokenizer(spelling)))}
    text = b"".join(bytes_of(spelling, token) for token in said)
    if in_thoughts(spelling, mode, said):
        return [END, 0, 1, *(t for t, more in vocab.items() if not re.search(re.escape(end) + rb"\s*\S", text + more))]
    thoughts, rest = parts(spelling, mode, said)
    blank = [bytes_of(spelling, token) for token in rest]
    blanks = next((n for n, one in enumerate(blank) if one.strip()), len(rest)) if mode != "closed" else 0
    found = set(allowed_tokens(tokenizer(spelling), [END], form, rest[blanks:]) or ())
    after = b"".join(blank)
    if thoughts is not None:
        after = text.partition(end)[2]
    for token, more in vocab.items():
        one = after + more
        if mode != "closed" and not one.strip() and len(one) <= BLANKS:
            found.add(token)
        if mode == "open" and thoughts is None and len(one) - len(one.lstrip()) <= BLANKS:
            marker = one.lstrip()
            begins = start.startswith(marker) or marker.startswith(start)
            if marker == start if spelling == "special" else begins:
                found.add(token)
    return sorted(found)


def plainly(spelling: str, mode: str, kind: str, wanted: list[int], seed: int | None) -> list[int]:
    prompt, model = prompt_of(spelling, mode), target(spelling).model
    form = source(kind, KINDS[kind])
    chain: list[Any] = [masking(lambda said, _: allowed(spelling, mode, form, said), len(prompt))]
    chain.append(hf.SequenceBiasLogitsProcessor(model.generation_config.sequence_bias))
    return decode_plainly(model, {"input_ids": torch.tensor([prompt])}, chain, NEW, seed, [END])


OUTPUTS = {
    "begun": ["So {1}, no.{end}\n\n{answer}", "{{{end}{answer}", "a < b </th{end} x", "only thoughts"],
    "open": ["{start}\nSo {1}.{end}\n\n{answer}", "\n{start}x{end}{answer}", "{answer}", "No.", "\n\n{answer}", "{start}never"],
    "closed": ["{answer}", "{start}x{end}{answer}"],
}
ANSWERS = {"json_schema": json.dumps({"a": "y"}), "regex": "yes, abc", "grammar": "{42}"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", OUTPUTS)
@pytest.mark.parametrize("spelling", MARKERS)
def test_grammars_begin_after_thoughts(spelling: str, mode: str, kind: str) -> None:
    """Whatever is drafted across the markers, and where the model wants to leave the grammar."""
    start, end = MARKERS[spelling]
    tree_sizes = []
    for number, form in enumerate(OUTPUTS[mode]):
        text = form.replace("{start}", start).replace("{end}", end).replace("{answer}", ANSWERS[kind])
        wanted = ids_of(spelling, text)
        script(spelling, mode, wanted)
        for seed in (None, 4):
            expected = plainly(spelling, mode, kind, wanted, seed)
            sampling = {} if seed is None else {"temperature": 1.0, "seed": seed}
            pipe = pipeline(spelling, Oracle([[*expected, *wanted]], vocab=len(tokenizer(spelling)), seed=number))
            options = {"chat_template_kwargs": {"mode": mode}, "reasoning": "auto", kind: KINDS[kind], **sampling}
            answer = pipe.generate(PROMPT, nodes=12, max_new_tokens=NEW, **options)
            assert answer.token_ids == expected, text
            thoughts, rest = parts(spelling, mode, expected)
            assert answer.reasoning == (thoughts or "")
            assert answer.num_reasoning_tokens == (0 if thoughts is None else len(expected) - len(rest))
            after = tokenizer(spelling).decode([token for token in rest if token != END], skip_special_tokens=True)
            assert answer.text == (after if mode == "closed" else after.lstrip())
            if answer.finish_reason == "stop" and answer.text:
                assert valid(kind, answer.text)
            pieces = list(pipe.stream(PROMPT, nodes=12, max_new_tokens=NEW, **options))
            assert "".join(piece.text for piece in pieces) == answer.text
            assert "".join(piece.reasoning for piece in pieces) == answer.reasoning
            assert sum(piece.num_reasoning_tokens for piece in pieces) == answer.num_reasoning_tokens
            tree_sizes.append(answer.stats.mean_acceptance_length)
    assert max(tree_sizes) > 2


def valid(kind: str, text: str) -> bool:
    if kind == "json_schema":
        return json.loads(text)["a"] in ("x", "y")
    return re.fullmatch(KINDS["regex"] if kind == "regex" else r"\{[0-9]{2,3}\}", text) is not None
