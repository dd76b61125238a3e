"""Logits processors of transformers that look at what was said, for all nodes of a tree at once.

Each does to every node what the processor of the same settings does to a row with that node's history. None looks at a
value on the host: where transformers' own take a rectangle of tokens, and some take them as Python lists, these take
``NodeHistories``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from mmspec.errors import UserError
from mmspec.histories import NOTHING, NodeHistories
from mmspec.transfer import on_device

_SCORES_ALONE = tuple(
    getattr(hf, name)
    for name in [
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "TopHLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    ]
    if hasattr(hf, name)
)
"""These do not look at what was said, so that one call serves all nodes."""

OnTrees = Callable[[NodeHistories, Tensor], Tensor]
"""From histories and float32 scores, (batch, nodes, vocab), to scores."""


def known(processor: LogitsProcessor) -> bool:
    """Whether a processor can be had for trees. A subclass of one that can may look at more than its base does."""
    return type(processor) in _SCORES_ALONE or type(processor) in _WITH_HISTORY


def on_trees(processor: LogitsProcessor, scores: Tensor) -> OnTrees:
    """The processor, which must be a known one, for scores of this vocabulary and device."""
    if type(processor) in _WITH_HISTORY:
        return _WITH_HISTORY[type(processor)](processor, scores)

    def process(_: NodeHistories, scores: Tensor) -> Tensor:
        flat = scores.flatten(0, 1)
        return processor(flat.new_empty(len(flat), 1, dtype=torch.long), flat).view(scores.shape)

    return process


def _repetition(processor: Any, scores: Tensor) -> OnTrees:
    penalty, vocab, ignored = processor.penalty, scores.shape[-1], processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        ignored = ignored.to(scores.device)[:, None]

    def penalise(history: NodeHistories, scores: Tensor) -> Tensor:
        said = history.whole
        if ignored is not None:
            # From the first token of each row; those before it are nothing anyway.
            place = torch.arange(said.shape[2], device=said.device) - (history.prefix.shape[1] - history.prefix_lengths)
            said = said.where((place >= ignored)[:, None], NOTHING)
        said = _within(said, vocab)
        scores = torch.nn.functional.pad(scores, (0, 1))
        found = scores.gather(2, said)
        return scores.scatter_(2, said, torch.where(found < 0, found * penalty, found / penalty))[:, :, :vocab]

    return penalise


def _no_repeat(processor: Any, scores: Tensor) -> OnTrees:
    size, vocab = processor.ngram_size, scores.shape[-1]

    def ban(history: NodeHistories, scores: Tensor) -> Tensor:
        tokens = history.whole
        windows = tokens.shape[2] - size + 1
        if windows < 1:
            return scores
        begins = history.last(size - 1)
        # The window that begins with the latest tokens has nothing behind them.
        ended = tokens[:, :, size - 1 :]
        for place in range(size - 1):
            ended = ended.where(tokens[:, :, place : place + windows] == begins[:, :, place, None], NOTHING)
        return scores.masked_fill(_marked(ended, vocab), -torch.inf)

    return ban


def _bias(processor: Any, scores: Tensor) -> OnTrees:
    vocab, device = scores.shape[-1], scores.device
    if (greatest := max(token for ids in processor.sequence_bias for token in ids)) >= vocab:
        raise UserError(f"biased tokens must be below the vocabulary's size {vocab}: got {greatest}")
    singles = [(ids[0], bias) for ids, bias in processor.sequence_bias.items() if len(ids) == 1]
    always = torch.zeros(vocab, device=device)
    if singles:
        always[on_device([token for token, _ in singles], device)] = on_device([bias for _, bias in singles], device)
    by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ids, bias in processor.sequence_bias.items():
        if len(ids) > 1:
            by_length.setdefault(len(ids), []).append((ids, bias))
    groups = [
        (
            on_device([ids[:-1] for ids, _ in group], device),  # (sequences, length - 1)
            on_device([ids[-1] for ids, _ in group], device),
            on_device([bias for _, bias in group], device),
        )
        for group in by_length.values()
    ]

    def add(history: NodeHistories, scores: Tensor) -> Tensor:
        bias = torch.zeros_like(scores) + always
        for begins, ends, biases in groups:
            begun = (history.last(begins.shape[1])[:, :, None] == begins).all(-1)  # (batch, nodes, sequences)
            bias.index_add_(2, ends, torch.where(begun, biases, 0.0))
        return scores + bias

    return add


def _min_length(processor: Any, scores: Tensor) -> OnTrees:
    return _until(processor.min_length, processor, scores)


def _min_new_tokens(processor: Any, scores: Tensor) -> OnTrees:
    return _until(processor.prompt_length_to_skip + processor.min_new_tokens, processor, scores)


def _until(length: int, processor: Any, scores: Tensor) -> OnTrees:
    """No end before a history has so many tokens."""
    ends = _mask(processor.eos_token_id, scores)
    return lambda history, scores: scores.masked_fill(ends & (history.lengths < length)[:, :, None], -torch.inf)


def _suppress(processor: Any, scores: Tensor) -> OnTrees:
    suppressed = _mask(processor.suppress_tokens, scores)
    return lambda history, scores: scores.masked_fill(suppressed, -torch.inf)


def _mask(tokens: Tensor, scores: Tensor) -> Tensor:
    """(vocab,) bool, which of the vocabulary are among ``tokens``."""
    return torch.isin(torch.arange(scores.shape[-1], device=scores.device), tokens.to(scores.device))


def _marked(tokens: Tensor, vocab: int) -> Tensor:
    """(..., n) int64 -> (..., vocab) bool: which tokens there are."""
    marks = torch.zeros(*tokens.shape[:-1], vocab + 1, dtype=torch.bool, device=tokens.device)
    return marks.scatter_(-1, _within(tokens, vocab), True)[..., :vocab]


def _within(tokens: Tensor, vocab: int) -> Tensor:
    """Tokens of the vocabulary as they are, others as the one behind its last."""
    return tokens.where((tokens >= 0) & (tokens < vocab), vocab)


_WITH_HISTORY: dict[type, Callable[[Any, Tensor], OnTrees]] = {
    hf.RepetitionPenaltyLogitsProcessor: _repetition,
    hf.NoRepeatNGramLogitsProcessor: _no_repeat,
    hf.SequenceBiasLogitsProcessor: _bias,
    hf.NoBadWordsLogitsProcessor: _bias,
    hf.MinLengthLogitsProcessor: _min_length,
    hf.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    hf.SuppressTokensLogitsProcessor: _suppress,
}
