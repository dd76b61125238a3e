"""Tokenizer and encoding of the hybrid model's examples. The prompt format is a plain chat:

<s>USER: Work out: 3 + 4; 6 x 7 ASSISTANT: 3 + 4 = 7 ... </s>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerFast

from mmspec.ssm.texts import TextExample
from mmspec.training.tokenizer import chat_template, train_tokenizer

EncodedText = tuple[np.ndarray, int]
"""Token ids of prompt and answer, and the number of prompt tokens."""


def make_tokenizer(examples: Iterable[TextExample], vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer on these examples; every digit is a token of its own."""
    texts = (f"{example.prompt} {example.answer}" for example in examples)
    tokenizer = train_tokenizer(texts, vocabulary, r"[0-9]")
    tokenizer.chat_template = chat_template()
    return tokenizer


def encode(examples: Sequence[TextExample], tokenizer: PreTrainedTokenizerFast) -> list[EncodedText]:
    """Returns the token ids of single-turn conversations, `</s>` at the end."""
    backend = tokenizer.backend_tokenizer
    prompts = [f"USER: {example.prompt} ASSISTANT:" for example in examples]
    answers = [f" {example.answer}</s>" for example in examples]
    encoded = []
    for prompt, answer in zip(
        backend.encode_batch(prompts, add_special_tokens=True),
        backend.encode_batch(answers, add_special_tokens=False),
        strict=True,
    ):
        encoded.append((np.array(prompt.ids + answer.ids, dtype=np.int16), len(prompt.ids)))
    return encoded
