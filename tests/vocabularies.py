"""Tokenizers that share some tokens, and a draft model of the smaller vocabulary."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.tiny.configs import TEXT_CONFIGS


def words(names, space):
    """A tokenizer of whole words and single letters."""
    vocab = {name: number for number, name in enumerate(["<unk>", *names])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def pair():
    """Of the target with 101 tokens, and a draft model with 49: in another order, with another sign of spaces."""
    doubled = [one + one for one in LETTERS]
    target = words([*LETTERS, "▁", *(f"▁{one}" for one in LETTERS), *doubled], "▁")
    draft = words([*reversed(LETTERS), "_", *(f"_{one}" for one in LETTERS[:16]), *"12345"], "_")
    return target, draft


def smaller(vocab=49):
    config = TEXT_CONFIGS["llama"]()
    config.vocab_size = vocab
    torch.manual_seed(1)
    return LlamaForCausalLM(config).eval()
