"""What several tests share: random trees, a plain-loop view of them, a byte tokenizer, cached tiny models."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast

from mmspec.core.tree import TokenTree
from tests.tiny.configs import VISION_CONFIGS
from tests.tiny.models import text_model, vision_model


@cache
def shared_model(name: str) -> PreTrainedModel:
    """One instance per test run; no test may change its weights."""
    return vision_model(name) if name in VISION_CONFIGS else text_model(name)


def random_tree(
    generator: torch.Generator, batch: int, nodes: int, vocab: int, *, ragged: bool = True, shape: str = "random"
) -> TokenTree:
    """A valid tree per row; ``shape``: random, chain or star. Ragged rows are padded behind a random length."""

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    tokens, parents, valid = [], [], []
    for _ in range(batch):
        row_tokens, row_parents, taken = [draw(vocab)], [-1], set()
        for i in range(1, nodes):
            parent = {"chain": i - 1, "star": 0}.get(shape, draw(i))
            token = draw(vocab)
            while (parent, token) in taken:
                token = (token + 1) % vocab
                if shape == "random" and sum(p == parent for p, _ in taken) >= vocab:
                    parent = draw(i)
            taken.add((parent, token))
            row_tokens.append(token)
            row_parents.append(parent)
        used = 1 + draw(nodes) if ragged else nodes
        tokens.append(row_tokens)
        parents.append([p if i < used else 0 for i, p in enumerate(row_parents)])
        valid.append([i < used for i in range(nodes)])
    mask = torch.tensor(valid)
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), None if bool(mask.all()) else mask)


def root_path(tree: TokenTree, row: int, node: int) -> list[int]:
    """Node indices from the root to ``node``, by following parents."""
    path = [node]
    while path[-1] != 0:
        path.append(int(tree.parents[row, path[-1]]))
    return path[::-1]


def valid_nodes(tree: TokenTree, row: int) -> list[int]:
    return [i for i in range(tree.nodes) if tree.valid is None or bool(tree.valid[row, i])]


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 3..258), so that a character of several bytes is split over tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{symbol: i for i, symbol in enumerate(symbols, start=3)}}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def byte_ids(text: str) -> list[int]:
    return list(byte_tokenizer()(text)["input_ids"])


@cache
def byte_model(layers: int = 1) -> LlamaForCausalLM:
    """A llama of the byte tokenizer's vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


class Script(LogitsProcessor):
    """Makes the model say a given text: after ``prompt_length`` tokens, the k-th new one is ``script[k]``, then EOS."""

    def __init__(self, script: list[int], prompt_length: int, eos: int = 2) -> None:
        self.script, self.prompt_length, self.eos = script, prompt_length, eos

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self.prompt_length
        wanted = self.script[place] if place < len(self.script) else self.eos
        forced = torch.full_like(scores, -1e4)
        forced[:, wanted] = 0.0
        return forced


def table_model(vocab: int, seed: int = 0, spread: float = 1.5) -> Any:
    """A stand-in for a language model: (vocab, vocab, vocab) logits of the next token after any two tokens."""
    return torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * spread
