"""A tiny model that thinks: its chat template begins reasoning, or an empty block of them, or leaves that to the model.

The model is biased towards a script, token by token, at the nodes of trees, too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mmspec.pipeline import Pipeline
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model

END = 2
MARKERS = {"text": ("<think>", "</think>"), "added": ("<think>", "</think>"), "special": ("[THINK]", "[/THINK]")}
"""How the markers are spelt: by several tokens, or as a token each."""

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{'name', 'arguments'}</tool_call>{% endif %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}{% for m in messages %}<s>{{ m.role }}"
    "{{ '(' + m.reasoning_content + ')' if m.reasoning_content }}: {{ m.content }}</s>{% endfor %}<s>assistant: "
    "{% if mode == 'begun' %}START\n{% elif mode == 'closed' or enable_thinking == false %}START\n\nEND\n\n{% endif %}"
)
CONTEXT = 96
"""Tokens that a scripted token depends on: more than a call and its copy in reasoning have in common."""

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


def script(spelling: str, mode: str, wanted: list[int], **more: Any) -> None:
    """Bias the model towards an output after the prompt of ``prompt_of``."""
    prompt = prompt_of(spelling, mode, **more)[-CONTEXT:]
    whole = [*prompt, *wanted, END]
    keys = [tuple(whole[max(at - CONTEXT, 0) : at + 1]) for at in range(len(prompt), len(whole))]
    target(spelling).model.generation_config.sequence_bias = dict.fromkeys(keys, 60.0)


def prompt_of(spelling: str, mode: str, messages: Any = None, **options: Any) -> list[int]:
    variables = {"mode": mode, **options.pop("chat_template_kwargs", {})}
    encoded = pipeline(spelling).encode([{"prompt": messages or PROMPT}], chat_template_kwargs=variables, **options)
    found: list[int] = encoded.input_ids[0].tolist()
    return found
