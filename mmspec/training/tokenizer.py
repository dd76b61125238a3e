"""A tokenizer built from nothing, for the models that travel with the package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>")
"""The first tokens of every vocabulary."""


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, alone: str, roles: Sequence[str], special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that encodes any text and begins it with `<s>`.

    Args:
        texts: what merges are learned from.
        vocabulary: number of tokens, all others included.
        alone: regular expression of what is never merged with anything before or behind it.
        roles: words that are a token each, whatever stands around them.
        special: tokens left out of decoded text, besides `SPECIAL`.
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
        vocab_size=vocabulary - len(roles),
        special_tokens=[*SPECIAL, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(role, normalized=False) for role in roles])
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
