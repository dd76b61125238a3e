"""Stopping criteria, checked token by token along the accepted path, and scores as defined by ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter as clock
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from mmspec.errors import UserError
from mmspec.targets.detokenizer import AnswerReader

FinishReason = Literal["stop", "length"]


class Stopper:
    """Stopping criteria of one request, shared by its rows.

    Args:
        context_limit: maximum length of prompt plus output per row; None for no limit.
        eos_token_ids: tokens that end a row, and are emitted.
        readers: factories of output readers, called with a row's prompt; a stop string that a reader finds ends it.
        criteria: transformers' stopping criteria, called per token with a row's tokens, (1, length), and None.
        device: device of the tokens passed to ``criteria``.
        max_time: seconds after the first token, at which rows end; None for no limit.
    """

    def __init__(
        self,
        max_new_tokens: int,
        *,
        context_limit: int | None = None,
        eos_token_ids: Iterable[int] = (),
        readers: Sequence[Callable[[Sequence[int]], AnswerReader]] = (),
        criteria: Sequence[StoppingCriteria] = (),
        device: torch.device | None = None,
        max_time: float | None = None,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.context_limit = context_limit
        self.eos_token_ids = frozenset(eos_token_ids)
        self.readers = readers
        self.criteria, self._device = list(criteria), device
        self.max_time = max_time
        self._began: float | None = None  # time of the first token

    def limit(self, prompt_length: int) -> int:
        """Maximum new tokens after a prompt of ``prompt_length`` tokens, padding excluded."""
        if self.context_limit is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.context_limit - prompt_length)

    def append(
        self, history: list[int], prompt_length: int, tokens: list[int], readers: Sequence[AnswerReader] = ()
    ) -> tuple[list[int], FinishReason | None]:
        """Append ``tokens`` to ``history`` up to and including the first token that ends the row.

        Args:
            readers: output readers of this row.

        Returns:
            The appended tokens, and why the row ended, if it did.
        """
        end = prompt_length + self.limit(prompt_length)
        for count, token in enumerate(tokens, start=1):
            history.append(token)
            met = self._criterion(history)  # always called: criteria may count their calls
            for reader in readers:
                reader.append(token)
            if met or token in self.eos_token_ids or any(reader.answer.stopped for reader in readers):
                return tokens[:count], "stop"
            if len(history) >= end or self._is_late():
                return tokens[:count], "length"
        return tokens, None

    def _is_late(self) -> bool:
        if self.max_time is None:
            return False
        if self._began is None:
            self._began = clock()
        return clock() - self._began > self.max_time

    def _criterion(self, history: list[int]) -> bool:
        if not self.criteria:
            return False
        ids = torch.tensor([history], dtype=torch.long, device=self._device)
        met = [bool(torch.as_tensor(one(ids, None), dtype=torch.bool).all()) for one in self.criteria]  # calls all
        return any(met)


class JointCriteria:
    """Stopping criteria over all rows, called once per token with all rows' tokens and scores, as in ``generate``.

    Criteria may read all rows or count their calls. A row that has ended continues until all rows have ended, or is
    padded if an EOS criterion is among the criteria.

    Args:
        criteria: transformers' list of all criteria, called with (batch, length) int64 and ``scores``.
        input_ids: (batch, length) int64, the prompts.
        padding: padding token of ended rows; None continues them.
        processors: logits processors that compute scores; None passes no scores to the criteria.

    Attributes:
        ids: (batch, length) int64, prompts and new tokens so far.
        scores: (batch, vocab) float32 for each new token, zeros at rows that have ended; None without ``processors``.
        padding: padding token of ended rows; None if they continue.
        over: whether all rows have ended.
        ended: rows that are padded from now on.
        lengths: new tokens of each row, without padding.
    """

    def __init__(
        self,
        criteria: Callable[[Tensor, Any], Tensor],
        input_ids: Tensor,
        padding: int | None,
        processors: Sequence[Any] | None = None,
    ) -> None:
        self._criteria, self.padding, self._processors = criteria, padding, processors
        self.scores: tuple[Tensor, ...] | None = None if processors is None else ()
        self.ids = input_ids
        self.over = False
        self.ended: set[int] = set()
        self.lengths = [0] * len(input_ids)
        self._length = 0  # new tokens
        self._met = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def lacking(self, outputs: Sequence[Sequence[int]]) -> list[int]:
        """Rows whose next token is needed before the criteria can be called again."""
        short = (row for row, output in enumerate(outputs) if len(output) <= self._length)
        return [] if self.over else [row for row in short if row not in self.ended]

    def advance(self, outputs: Sequence[Sequence[int]], logits: Sequence[Sequence[Tensor] | None] = ()) -> None:
        """Call the criteria for each token position that all rows have reached, until all rows have ended.

        Args:
            outputs: new tokens of each row.
            logits: per row and token, (vocab,); needed for scores.

        Raises:
            UserError: rows are padded, and a criterion did not return one truth value per row.
        """
        while not self.over and not self.lacking(outputs):
            tokens = [self.padding if row in self.ended else output[self._length] for row, output in enumerate(outputs)]
            if self.scores is not None:
                own = [None if row in self.ended else one[self._length] for row, one in enumerate(logits) if one]
                self.scores += (scores_of(own, self.ids, self._processors or ()),)
            self._length += 1
            self.lengths = [end if row in self.ended else self._length for row, end in enumerate(self.lengths)]
            self.ids = torch.cat([self.ids, self.ids.new_tensor(tokens)[:, None]], dim=1)
            # Not one-dimensional if a criterion returns a column, as in transformers' documentation.
            self._met = self._met | self._criteria(self.ids, self.scores)
            self.over = bool(self._met.all())
            if self.padding is None:
                continue
            if self._met.ndim != 1:
                raise UserError(
                    f"stopping criteria must return a truth value per row, ({len(tokens)},), where an end of sequence "
                    f"pads rows: got shape {tuple(self._met.shape)} of all criteria together"
                )
            self.ended = {row for row, met in enumerate(self._met.tolist()) if met}


def stopping_of(
    criteria: Sequence[Any], input_ids: Tensor, padding: int, processors: Sequence[Any] | None = None
) -> tuple[Stopper, JointCriteria | None]:
    """Convert transformers' criteria to a stopper per row, and joint criteria of all rows or None.

    Joint criteria are needed for criteria other than length and EOS, with several rows or with scores.

    Args:
        criteria: criteria of a ``generate`` call, at least one of them ``MaxLengthCriteria``.
        input_ids: (batch, length) int64, the prompts.
        padding: padding token of ended rows.
        processors: logits processors that compute scores; None passes no scores to the criteria.
    """
    limits = [c.max_length - input_ids.shape[1] for c in criteria if type(c) is MaxLengthCriteria]
    eos = [int(t) for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.flatten()]
    others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
    if not others or (len(input_ids) == 1 and processors is None):
        return Stopper(min(limits), eos_token_ids=eos, criteria=others, device=input_ids.device), None
    pads = any(hasattr(c, "eos_token_id") for c in criteria)  # transformers' own rule
    joint = JointCriteria(StoppingCriteriaList(criteria), input_ids, padding if pads else None, processors)
    return Stopper(min(limits), eos_token_ids=eos), joint


def logits_by_step(rows: Sequence[Sequence[Tensor]], steps: int) -> tuple[Tensor, ...]:
    """Raw logits by step, (batch, vocab) each, zeros at ended rows, from ``rows``: by row and step, (vocab,) each."""
    return pad_sequence([torch.stack(list(row[:steps])) for row in rows]).unbind()


def scores_of(rows: Sequence[Tensor | None], ids: Tensor, processors: Sequence[Any]) -> Tensor:
    """Scores of a step, (batch, vocab): logits after all processors, called as in ``generate``.

    Args:
        rows: logits of each row, (vocab,); None at rows that have ended, whose logits are zeros.
        ids: (batch, length) int64, the tokens before the step.
    """
    empty = torch.zeros_like(next(row for row in rows if row is not None))
    scores = torch.stack([empty if row is None else row for row in rows])
    for processor in processors:
        scores = processor(ids, scores)
    return scores
