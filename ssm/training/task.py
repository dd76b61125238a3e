"""Training task of the embedded hybrid language model: generated texts, next-token loss, export.

The prompt format is a plain chat:

<s>USER: Work out: 3 + 4; 6 x 7 ASSISTANT: 3 + 4 = 7 ... </s>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from mmspec.ssm.texts import KINDS, TextExample, example
from mmspec.ssm.training.architecture import Architecture, new_model
from mmspec.ssm.training.layers import CHUNK, fast_layers
from mmspec.training.embedded import chat_template, export, folder_tokenizer, train_tokenizer
from mmspec.training.loss import LossOutput, TokenBatch, next_token_loss, pad_tokens
from mmspec.training.optimisers import LearningRates, Optimisers
from mmspec.training.plan import MIXED, TEXT, CurriculumSampler, linear_ramp

TOKENIZER_EXAMPLES = 6000
"""Examples that the tokenizer is trained on."""

FIRST_KIND = "sums"
"""Kind of the examples that the training starts with: calculations are learned sooner without a story around them."""

FIRST_SHARE, MIXED_FROM = 0.04, 0.08
"""Share of the run on `FIRST_KIND` only, and progress from which examples are of all kinds."""


class HybridTask:
    """Trains the hybrid language model on generated texts. Implements `mmspec.training.plan.TrainingTask`.

    Args:
        folder: of the run; the tokenizer is saved there.
        examples: number of training examples; an eighth as many of `FIRST_KIND` are added.
        rate: learning rate of matrices; that of other parameters is half of it.
        held_out: held-out examples of each kind per evaluation.
        bfloat16: compute losses in bfloat16; on a CPU without AVX-512, float32 is several times faster.
    """

    def __init__(
        self,
        folder: Path,
        examples: int,
        batch: int = 16,
        rate: float = 3e-3,
        architecture: Architecture | None = None,
        held_out: int = 32,
        bfloat16: bool = True,
    ) -> None:
        size = architecture or Architecture()
        self.tokenizer = folder_tokenizer(
            folder, lambda: make_tokenizer((example(k) for k in range(TOKENIZER_EXAMPLES)), size.vocabulary)
        )
        self.data = {
            TEXT: encode([example(k, kind=FIRST_KIND) for k in range(max(examples // 8, 1))], self.tokenizer),
            MIXED: encode([example(k) for k in range(examples)], self.tokenizer),
        }
        self.held_out = held_out
        self.bfloat16 = bfloat16
        torch.manual_seed(0)
        self.network: Any = new_model(size)
        # Fused CPU attention has a slow backward pass for short sequences.
        self.network.set_attn_implementation("eager")
        lengths = {kind: [len(ids) for ids, _ in rows] for kind, rows in self.data.items()}
        self.sampler = CurriculumSampler(lengths, batch, 0, linear_ramp(FIRST_SHARE, MIXED_FROM))
        self.optimisers = Optimisers([(self.network, 1.0)], LearningRates(matrix=rate, other=rate / 2))

    def batch(self, examples: list[tuple[str, int]]) -> TokenBatch:
        """Returns the tensors of these examples."""
        return collate([self.data[kind][index] for kind, index in examples])

    def weight(self, batch: TokenBatch) -> int:
        return batch.label_count

    def loss(self, network: Any, batch: TokenBatch, generator: torch.Generator, progress: float) -> LossOutput:
        """Returns the next-token cross-entropy on the answers."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            return text_loss(network, batch)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns loss and next-token accuracy on held-out examples of each kind, and the mean loss of all kinds."""
        report = {"loss": 0.0}
        for kind in KINDS:
            rows = encode([example(k, "heldout", kind) for k in range(self.held_out)], self.tokenizer)
            output = self.loss(self.network, collate(rows), torch.Generator(), 1.0)
            report["loss"] += output.total.item() / len(KINDS)
            report |= {f"{kind} loss": output.total.item(), f"{kind} right": output.metrics["right"]}
        return report

    def save(self, folder: Path) -> None:
        """Exports the model as a folder that transformers loads."""
        export(self.network, self.tokenizer, folder)


def text_loss(network: nn.Module, batch: TokenBatch) -> LossOutput:
    """Returns the next-token cross-entropy of a batch and the accuracy "right"."""
    model: Any = network
    with fast_layers():
        hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
    loss, accuracy = next_token_loss(hidden, model.lm_head, batch.labels)
    return LossOutput(loss, {"right": accuracy})


def collate(rows: Sequence[EncodedText]) -> TokenBatch:
    """Pads examples to one length, a multiple of the scan's chunk."""
    return pad_tokens([(ids, np.arange(len(ids)) >= prompt) for ids, prompt in rows], 0, CHUNK)


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
