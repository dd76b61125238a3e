"""What the trainer needs to know of the embedded hybrid model: its examples, its loss, how it is measured and kept."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from mmspec.training.export import export
from mmspec.training.optimisers import Optimisers, Rates, is_inside
from mmspec.training.order import MIXED, TEXT
from mmspec.training.plan import Plan
from ssm.texts import KINDS, example
from ssm.training.architecture import Architecture, new_model
from ssm.training.encoding import Encoded, encode, make_tokenizer
from ssm.training.layers import CHUNK, fast_layers

IGNORE = -100
MERGES_FROM = 6000
"""Examples that the tokenizer's merges are learned from."""

FIRST_KIND = "sums"
"""What is taught alone at first: a calculation is learned sooner without a story around it."""


@dataclass(frozen=True)
class Lessons(Plan):
    """A plan in which everything follows soon on what is taught first."""

    text_share: float = 0.04
    mixed_from: float = 0.08
    """Share of the run from which on examples are of all kinds."""

    def share(self, progress: float, lengths: Mapping[str, Sequence[int]]) -> float:
        """Probability that an example is of any kind, and not of the first."""
        return min(1.0, max(0.0, (progress - self.text_share) / (self.mixed_from - self.text_share)))

    def optimisers(self, network: nn.Module) -> Optimisers:
        """Muon for the matrices of layers, AdamW for the rest."""
        return Optimisers([(network, 1.0)], Rates(matrix=self.rate, other=self.rate / 2), is_inside)


@dataclass
class Batch:
    """Examples padded on the right, which what looks only backwards does not notice.

    `tokens`, `labels`: (batch, length); a label is the token that follows, `IGNORE` where nothing is to be predicted.
    """

    tokens: Tensor
    labels: Tensor


@dataclass
class Losses:
    """Mean cross-entropy of a batch and the share of next tokens guessed right."""

    total: Tensor
    right: float

    @property
    def figures(self) -> dict[str, float]:
        return {"right": self.right}


@dataclass
class HybridTask:
    """The hybrid model and its texts, for `mmspec.training.trainer.Trainer`.

    Args:
        folder: of the run; its tokenizer is kept there and used again.
        examples: how many to train on; an eighth as many calculations for the beginning.
        architecture: sizes of the model.
        watched: held-out examples of each kind to report on.
    """

    folder: Path
    examples: int
    architecture: Architecture = field(default_factory=Architecture)
    watched: int = 32

    def __post_init__(self) -> None:
        self.tokenizer = self._tokenizer()
        self.data = {
            TEXT: encode([example(k, kind=FIRST_KIND) for k in range(max(self.examples // 8, 1))], self.tokenizer),
            MIXED: encode([example(k) for k in range(self.examples)], self.tokenizer),
        }
        self.lengths = {kind: [len(ids) for ids, _ in rows] for kind, rows in self.data.items()}
        torch.manual_seed(0)
        self.network: Any = new_model(self.architecture)
        # Fused CPU attention is slow to differentiate at few tokens.
        self.network.set_attn_implementation("eager")

    def batch(self, examples: list[tuple[str, int]]) -> Batch:
        """The tensors of these examples."""
        return collate([self.data[kind][index] for kind, index in examples])

    def weight(self, batch: Batch) -> int:
        """Tokens that are predicted."""
        return int((batch.labels != IGNORE).sum())

    def loss(self, network: nn.Module, batch: Batch, generator: torch.Generator, progress: float) -> Losses:
        """Cross-entropy of the answers' tokens; logits are computed for these alone."""
        with torch.autocast("cpu", torch.bfloat16):
            return next_token_loss(network, batch)

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Loss and share of next tokens right on held-out examples: in the mean and for each kind."""
        report = {"loss": 0.0}
        for kind in KINDS:
            rows = encode([example(k, "heldout", kind) for k in range(self.watched)], self.tokenizer)
            losses = self.loss(self.network, collate(rows), torch.Generator(), 1.0)
            report["loss"] += losses.total.item() / len(KINDS)
            report |= {f"{kind} loss": losses.total.item(), f"{kind} right": losses.right}
        return report

    def save(self, folder: Path) -> None:
        """Writes the folder that transformers loads."""
        export(self.network, self.tokenizer, folder)

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        path = self.folder / "tokenizer"
        if not path.exists():
            trained = make_tokenizer((example(k) for k in range(MERGES_FROM)), self.architecture.vocabulary)
            part = path.with_name("tokenizer.part")
            trained.save_pretrained(part)
            os.replace(part, path)
        return PreTrainedTokenizerFast.from_pretrained(path)


def next_token_loss(network: Any, batch: Batch) -> Losses:
    """Mean cross-entropy over the labels of a batch."""
    with fast_layers():
        hidden = network.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
    wanted = batch.labels != IGNORE
    truth = batch.labels[wanted]
    logits = network.lm_head(hidden[wanted]).float()  # (labels, vocab)
    right = (logits.detach().argmax(-1) == truth).float().mean().item()
    return Losses(F.cross_entropy(logits, truth), right)


def collate(rows: Sequence[Encoded]) -> Batch:
    """Pads examples to one length, a multiple of the scan's chunk."""
    longest = max(len(ids) for ids, _ in rows) - 1
    length = -(-longest // CHUNK) * CHUNK
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORE)
    for index, (ids, prompt) in enumerate(rows):
        row = torch.from_numpy(ids.astype("int64"))
        tokens[index, : len(row) - 1] = row[:-1]
        labels[index, prompt - 1 : len(row) - 1] = row[prompt:]
    return Batch(tokens, labels)
