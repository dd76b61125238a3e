"""Shared by the training of embedded models: tokenizer, chat template, and export as folders for transformers."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from mmspec.files import make_folder, settle, temporary

SPECIAL = ("<pad>", "<s>", "</s>")
"""The first tokens of every vocabulary."""

ROLES = ("USER:", "ASSISTANT:")


def chat_template(media: str = "") -> str:
    """Returns the chat template; the tokenizer adds `<s>`. System messages are rendered as a user's.

    Args:
        media: template of the parts of `message['content']` that are not text. They come before the message's text.
    """
    return (
        "{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}ASSISTANT: {% else %}USER: {% endif %}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}" + media + "{% for part in "
        "message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{% endif %}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %} {% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, alone: str, special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer that encodes any text and prepends `<s>`.

    Args:
        texts: training corpus of the merges.
        vocabulary: number of tokens, special ones and `ROLES` included.
        alone: regular expression whose matches are never merged with their neighbours.
        special: special tokens (left out of decoded text) besides `SPECIAL`.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(alone), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(ROLES),
        special_tokens=[*SPECIAL, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    pad, begin, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=begin,
        eos_token=end,
        pad_token=pad,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def folder_tokenizer(folder: Path, train: Callable[[], PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """Loads the tokenizer in `folder/tokenizer`; if there is none, trains it and saves it there first."""
    path = folder / "tokenizer"
    if not path.exists():
        make_folder(path, train().save_pretrained, hint="")
    return PreTrainedTokenizerFast.from_pretrained(path)


MAX_NEW_TOKENS = 256


def export(model: PreTrainedModel, processor: Any, folder: Path) -> None:
    """Saves bfloat16 weights, configuration and processor; each file is replaced atomically.

    Args:
        model: of any dtype; left unchanged.
        folder: created if missing; other files in it are kept.
    """
    small: Any = copy.deepcopy(model)
    small.to(torch.bfloat16)
    text: Any = model.config.get_text_config()
    small.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    with replacing(folder) as part:
        small.save_pretrained(part)
        processor.save_pretrained(part)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, whose files then replace those of the same names in `folder`, each atomically."""
    with temporary(folder) as part:
        part.mkdir()
        yield part
        settle(part)
        folder.mkdir(exist_ok=True)
        for path in sorted(part.iterdir()):
            os.replace(path, folder / path.name)
