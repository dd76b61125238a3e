"""Logits processors on token trees.

Three modes:

- batched over all nodes of a tree (``OnTrees``): transformers' own processors, reimplemented below on
  ``NodeHistories`` without host syncs.
- ``TreeProcessor``: walked depth first over the tree.
- path by path, for all others: called along the accepted path only, once per emitted token.

Every node has a token history: the row's tokens and the node's path. A device copy of each row's token list is extended
every step by the new tokens, without host syncs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase
from transformers.generation import logits_process as hf

from mmspec import plugins
from mmspec.core.tree import TokenTree
from mmspec.errors import UserError
from mmspec.ops.transfer import on_device

_SCORES_ALONE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.TopHLogitsWarper,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
)
"""Processors that ignore the history: one call serves all nodes."""

_SHARED = (torch.nn.Module, PreTrainedTokenizerBase)  # attributes that copies of a processor share

NOTHING = -1
"""Padding token."""


class Histories:
    """Device copy of append-only token lists."""

    def __init__(self) -> None:
        self._tokens = torch.empty(0, 0, dtype=torch.long)  # (batch, capacity) int64, right-padded with NOTHING
        self._known: list[int] = []
        self._rows: list[list[int]] = []

    def follow(self, history: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows, (batch, longest) int64, left-padded with ``NOTHING``, and their lengths, (batch, 1)."""
        if len(self._rows) != len(history) or any(a is not b for a, b in zip(self._rows, history, strict=True)):
            self._rows, self._known = list(history), [0] * len(history)  # rows were added or removed
            self._tokens = torch.empty(len(history), 0, dtype=torch.long, device=device)
        new = [row[known:] for row, known in zip(history, self._known, strict=True)]
        widest = max(map(len, new))
        room = max(self._known) + widest
        if room > self._tokens.shape[1]:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, 2 * room - self._tokens.shape[1]), value=NOTHING)
        # One transfer per step: length, known length and new tokens of each row.
        update = on_device(
            [
                [len(row), known, *tokens, *[NOTHING] * (widest - len(tokens))]
                for row, known, tokens in zip(history, self._known, new, strict=True)
            ],
            device,
        )
        lengths, known = update[:, :1], update[:, 1:2]
        self._tokens.scatter_(1, known + torch.arange(widest, device=device), update[:, 2:])
        self._known = [len(row) for row in history]
        longest = max(self._known)
        place = torch.arange(longest, device=device) - (longest - lengths)
        return self._tokens.gather(1, place.clamp(min=0)).where(place >= 0, NOTHING), lengths


class NodeHistories:
    """Token histories of all nodes of a tree, computed lazily.

    Args:
        rows: device copy of ``history``.
        history: tokens of each row, up to the root.
        tree: (batch, nodes).
        index: each row's number in its request.
    """

    def __init__(self, rows: Histories, history: Sequence[list[int]], tree: TokenTree, index: Sequence[int]) -> None:
        self._rows, self._history, self._tree, self._index = rows, history, tree, index

    @cached_property
    def _followed(self) -> tuple[Tensor, Tensor]:
        return self._rows.follow(self._history, self._tree.tokens.device)

    @property
    def prefix(self) -> Tensor:
        """(batch, longest) int64, each row's tokens up to the root, left-padded with ``NOTHING``."""
        return self._followed[0]

    @property
    def prefix_lengths(self) -> Tensor:
        """(batch, 1) int64, length of each row, root included."""
        return self._followed[1]

    @cached_property
    def index(self) -> Tensor:
        """(batch,) int64, each row's number in its request."""
        return on_device(list(self._index), self._tree.tokens.device)

    @cached_property
    def lengths(self) -> Tensor:
        """(batch, nodes) int64, length of each node's history."""
        return self.prefix_lengths + (self._tree.depth if self._tree.max_depth else torch.zeros_like(self._tree.tokens))

    @cached_property
    def path(self) -> Tensor:
        """(batch, nodes, max_depth) int64, path from below the root to each node, right-padded with ``NOTHING``."""
        tree, deepest = self._tree, self._tree.max_depth
        if deepest == 0:
            return tree.tokens[:, :, None][:, :, :0]
        # Scatter ancestors' tokens by depth; other nodes and the root go to an extra column.
        place = torch.where(tree.ancestors & (tree.depth > 0)[:, None], tree.depth[:, None] - 1, deepest)
        path = torch.full((*tree.tokens.shape, deepest + 1), NOTHING, dtype=torch.long, device=place.device)
        return path.scatter(2, place, tree.tokens[:, None].expand_as(place))[:, :, :-1]

    @cached_property
    def whole(self) -> Tensor:
        """(batch, nodes, longest + max_depth) int64, prefix and path, padded with ``NOTHING`` on both sides."""
        return torch.cat([self.prefix[:, None].expand(-1, self._tree.nodes, -1), self.path], dim=2)

    def after(self, first: int | Tensor) -> Tensor:
        """``whole`` without the first tokens of each row, whose number is ``first``: an int or (batch, 1) int64."""
        # Positions count from each row's first token after the padding.
        place = torch.arange(self.whole.shape[2], device=self.whole.device)
        place = place - (self.prefix.shape[1] - self.prefix_lengths)
        return self.whole.where((place >= first)[:, None], NOTHING)

    def last(self, count: int) -> Tensor:
        """(batch, nodes, count) int64, the last ``count`` tokens, left-padded with ``NOTHING``."""
        ends = self.lengths - self.prefix_lengths + self.prefix.shape[1]
        place = ends[:, :, None] - count + torch.arange(count, device=ends.device)
        return self.whole.gather(2, place.clamp(min=0)).where(place >= 0, NOTHING)


OnTrees = Callable[[NodeHistories, Tensor], Tensor]
"""Function of histories and float32 scores, (batch, nodes, vocab), that returns scores."""


@runtime_checkable
class TreeProcessor(Protocol):
    """Logits processor that masks tokens by a state machine over the output, such as a grammar.

    Each sequence has its own state, which advances by the emitted tokens and is walked depth first over every drafted
    tree. An exception ends the sequence with an error only if plain decoding would have raised it too; exceptions at
    rejected drafts are ignored. A method that raises must leave the state unchanged.
    """

    def start(self, history: list[int]) -> Any:
        """Initial state of a sequence with prompt ``history``."""

    def advance(self, state: Any, token: int) -> Any:
        """Advance the state by a token that ``mask`` allows.

        Returns:
            None if ``state`` was changed in place, else the new state; the old ``state`` is then kept for undo.
        """

    def undo(self, state: Any, n: int) -> None:
        """Undo the last ``n`` in-place advances."""

    def mask(self, state: Any) -> Tensor | None:
        """(vocab,) bool on the CPU, allowed next tokens, at least one; None allows all, a short mask none beyond it."""


def tree_form(processor: Any) -> OnTrees | TreeProcessor | None:
    """Tree implementation of a processor: itself, a built-in or a plug-in; None means path by path.

    Built-ins match exact classes only, as a subclass may use more than its base class.
    """
    if isinstance(processor, TreeProcessor):
        return processor
    if type(processor) in _SCORES_ALONE:
        return Warper(processor)
    if type(processor) in _WITH_HISTORY:
        return _lazy(_WITH_HISTORY[type(processor)], processor)
    return plugins.tree_form(processor)


def copy_for_row(processor: Any, index: int) -> Any:
    """Copy a processor for one sequence, row ``index`` of its request, called with a batch of one.

    Models, tokenizers and the function of a ``PrefixConstrained...`` are shared. Raises ``UserError``: it cannot be
    copied.
    """
    allowed = getattr(processor, "_prefix_allowed_tokens_fn", None)
    held = [allowed, *(value for value in getattr(processor, "__dict__", {}).values() if isinstance(value, _SHARED))]
    try:
        copied = deepcopy(processor, {id(value): value for value in held})
    except Exception as error:
        name = type(processor).__name__
        raise UserError(f"logits processors must be copyable, once per sequence: {name} is not ({error})") from error
    if allowed is not None:
        copied._prefix_allowed_tokens_fn = lambda _, ids: allowed(index, ids)
    if isinstance(ignored := getattr(copied, "prompt_ignore_length", None), Tensor):  # left padding of each row
        copied.prompt_ignore_length = ignored[index : index + 1]
    return copied


class Warper:
    """An ``OnTrees`` that ignores histories and may be applied to the scores of a subset of nodes. ``sorts``: whether
    it sorts scores, which takes most of the sampling time on a GPU."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor
        self.sorts = isinstance(processor, hf.TopPLogitsWarper | hf.TypicalLogitsWarper)

    def __call__(self, _: NodeHistories | None, scores: Tensor) -> Tensor:
        """Warp scores, (..., vocab)."""
        flat = scores.reshape(-1, scores.shape[-1])
        return self._processor(flat.new_empty(len(flat), 1, dtype=torch.long), flat).view(scores.shape)


def _lazy(build: Callable[[Any, Tensor], OnTrees], processor: LogitsProcessor) -> OnTrees:
    """Defer ``build`` to the first call, when vocabulary size and device are known."""
    form: OnTrees | None = None

    def process(history: NodeHistories, scores: Tensor) -> Tensor:
        nonlocal form
        form = form or build(processor, scores)
        return form(history, scores)

    return process


def _repetition(processor: Any, scores: Tensor) -> OnTrees:
    penalty, vocab, ignored = processor.penalty, scores.shape[-1], processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        ignored = ignored.to(scores.device)

    def penalise(history: NodeHistories, scores: Tensor) -> Tensor:
        seen = history.whole
        if ignored is not None:
            first = ignored[history.index][:, None] if isinstance(ignored, Tensor) else ignored
            seen = history.after(first)
        seen = _within(seen, vocab)
        scores = torch.nn.functional.pad(scores, (0, 1))
        found = scores.gather(2, seen)
        return scores.scatter_(2, seen, torch.where(found < 0, found * penalty, found / penalty))[:, :, :vocab]

    return penalise


class AdditiveTerms(LogitsProcessor):
    """Add ``bias[t] - frequency * n[t] - presence * (n[t] > 0)`` to the logit of token t; n[t] counts t in the output.

    The formula of OpenAI's API ("Frequency and presence penalties"); as in vLLM, only output tokens are counted.

    Args:
        bias: pairs of token id and bias.
        prompt_length: tokens before the output.
    """

    def __init__(
        self, bias: Sequence[tuple[int, float]], presence: float, frequency: float, prompt_length: int
    ) -> None:
        self.bias, self.presence, self.frequency = tuple(bias), presence, frequency
        # Without counts, prompts of all lengths share one batch.
        self.prompt_length = prompt_length if self.counts else 0

    @property
    def counts(self) -> bool:
        """Whether the terms depend on the output."""
        return bool(self.presence or self.frequency)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process scores, (batch, vocab), given (batch, length) int64 ids, as transformers' processors do."""
        scores = scores + self.vector(scores) if self.bias else scores
        return self.penalised(input_ids[:, self.prompt_length :], scores) if self.counts else scores

    def vector(self, scores: Tensor) -> Tensor:
        """The biases of all tokens, (vocab,). Raises ``UserError``: a token is outside the vocabulary."""
        vocab, greatest = scores.shape[-1], max(token for token, _ in self.bias)
        if greatest >= vocab:
            raise UserError(f"biased tokens must be below the vocabulary's size {vocab}: got {greatest}")
        tokens, biases = zip(*self.bias, strict=True)
        found = torch.zeros(vocab, dtype=torch.float32, device=scores.device)
        found[on_device(list(tokens), scores.device)] = on_device(list(biases), scores.device, torch.float32)
        return found

    def penalised(self, output: Tensor, scores: Tensor) -> Tensor:
        """Subtract the penalties.

        Args:
            output: (..., length) int64; ids outside the vocabulary are padding.
            scores: (..., vocab).
        """
        vocab = scores.shape[-1]
        tokens = _within(output, vocab)
        counts = scores.new_zeros(*scores.shape[:-1], vocab + 1)
        counts = counts.scatter_add_(-1, tokens, torch.ones_like(tokens, dtype=scores.dtype))[..., :vocab]
        return scores - self.frequency * counts - self.presence * (counts > 0)


def _additive(processor: AdditiveTerms, scores: Tensor) -> OnTrees:
    always = processor.vector(scores) if processor.bias else None

    def add(history: NodeHistories, scores: Tensor) -> Tensor:
        scores = scores if always is None else scores + always
        return processor.penalised(history.after(processor.prompt_length), scores) if processor.counts else scores

    return add


def _no_repeat(processor: Any, scores: Tensor) -> OnTrees:
    size, vocab = processor.ngram_size, scores.shape[-1]

    def ban(history: NodeHistories, scores: Tensor) -> Tensor:
        tokens = history.whole
        windows = tokens.shape[2] - size + 1
        if windows < 1:
            return scores
        begins = history.last(size - 1)
        # The last window is the current suffix itself, followed by padding.
        ended = tokens[:, :, size - 1 :]
        for place in range(size - 1):
            ended = ended.where(tokens[:, :, place : place + windows] == begins[:, :, place, None], NOTHING)
        return scores.masked_fill(_marked(ended, vocab), -torch.inf)

    return ban


def _bias(processor: Any, scores: Tensor) -> OnTrees:
    vocab, device = scores.shape[-1], scores.device
    if (greatest := max(token for ids in processor.sequence_bias for token in ids)) >= vocab:
        raise UserError(f"biased tokens must be below the vocabulary's size {vocab}: got {greatest}")
    by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ids, bias in processor.sequence_bias.items():
        by_length.setdefault(len(ids), []).append((ids, bias))
    groups = [
        (
            on_device([ids[:-1] for ids, _ in group], device).long(),  # (sequences, length - 1), without single tokens
            on_device([ids[-1] for ids, _ in group], device),
            on_device([bias for _, bias in group], device, torch.float32),
        )
        for group in by_length.values()
    ]

    def add(history: NodeHistories, scores: Tensor) -> Tensor:
        bias = torch.zeros_like(scores)
        for begins, ends, biases in groups:
            begun = (history.last(begins.shape[1])[:, :, None] == begins).all(-1)  # (batch, nodes, sequences)
            bias.index_add_(2, ends, torch.where(begun, biases, 0.0))
        return scores + bias

    return add


def _forbid(tokens: Tensor, scores: Tensor, holds: Callable[[Tensor], Tensor] | None = None) -> OnTrees:
    """Forbid tokens in histories whose lengths satisfy a condition; None forbids them in all."""
    mask = _mask(tokens, scores)
    if holds is None:
        return lambda history, scores: scores.masked_fill(mask, -torch.inf)
    return lambda history, scores: scores.masked_fill(mask & holds(history.lengths)[:, :, None], -torch.inf)


def _force(tokens: Tensor, scores: Tensor, length: int) -> OnTrees:
    """Force one of the given tokens at the given history length."""
    forced = scores.new_zeros(scores.shape[-1]).masked_fill(~_mask(tokens, scores), -torch.inf)
    return lambda history, scores: torch.where((history.lengths == length)[:, :, None], forced, scores)


def _mask(tokens: Tensor, scores: Tensor) -> Tensor:
    """Multi-hot mask of ``tokens``, (vocab,) bool."""
    return torch.isin(torch.arange(scores.shape[-1], device=scores.device), tokens.to(scores.device))


def _marked(tokens: Tensor, vocab: int) -> Tensor:
    """Multi-hot encoding: (..., n) int64 -> (..., vocab) bool."""
    marks = torch.zeros(*tokens.shape[:-1], vocab + 1, dtype=torch.bool, device=tokens.device)
    return marks.scatter_(-1, _within(tokens, vocab), True)[..., :vocab]


def _within(tokens: Tensor, vocab: int) -> Tensor:
    """Map tokens outside the vocabulary to index ``vocab``."""
    return tokens.where((tokens >= 0) & (tokens < vocab), vocab)


_WITH_HISTORY: dict[type, Callable[[Any, Tensor], OnTrees]] = {
    hf.RepetitionPenaltyLogitsProcessor: _repetition,
    AdditiveTerms: _additive,
    hf.NoRepeatNGramLogitsProcessor: _no_repeat,
    hf.SequenceBiasLogitsProcessor: _bias,
    hf.NoBadWordsLogitsProcessor: _bias,
    hf.MinLengthLogitsProcessor: lambda p, scores: _forbid(p.eos_token_id, scores, lambda n: n < p.min_length),
    hf.MinNewTokensLengthLogitsProcessor: lambda p, scores: _forbid(
        p.eos_token_id, scores, lambda n: n < p.prompt_length_to_skip + p.min_new_tokens
    ),
    hf.SuppressTokensLogitsProcessor: lambda p, scores: _forbid(p.suppress_tokens, scores),
    hf.SuppressTokensAtBeginLogitsProcessor: lambda p, scores: _forbid(
        p.begin_suppress_tokens, scores, lambda n: n == p.begin_index
    ),
    hf.ForcedBOSTokenLogitsProcessor: lambda p, scores: _force(on_device([p.bos_token_id], scores.device), scores, 1),
    hf.ForcedEOSTokenLogitsProcessor: lambda p, scores: _force(p.eos_token_id, scores, p.max_length - 1),
}
