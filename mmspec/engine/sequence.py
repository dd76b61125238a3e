"""One answer in the making, from its submission to its end.

A client submits a request with a sink. After a step, the worker thread calls the sink with the new tokens; clients
convert the tokens to text in their own threads, so that decoding text delays no step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter as clock

import torch
from torch import Tensor

from mmspec.core.target import Prompt
from mmspec.engine.policy import Speculation
from mmspec.engine.request import Request
from mmspec.engine.stats import Stats, TokenLogprob, TreeRecord, token_logprobs
from mmspec.engine.stopping import FinishReason, Stopper
from mmspec.errors import UserError
from mmspec.sampling.sampler import RejectedError, Sampler, SamplingState


@dataclass(frozen=True)
class DecodeRequest:
    """A request in the engine's terms.

    Attributes:
        prompt: one row.
        num_draft_tokens: draft tokens per step; None chooses adaptively, and 0 decodes plainly, possibly in a batch
            with drafted sequences.
        index, generator: as for ``SamplingState``.
        streams: call the sink after every step that emits tokens, not only at the end.
        logits: record the logits of each token.
        source: the validated request, whose options choose the records; None for bare encoded prompts, which record
            neither trees nor log probabilities.
        token_bytes: bytes of a token, for the texts of recorded trees; None without a tokenizer.
    """

    prompt: Prompt
    sampler: Sampler
    stopper: Stopper
    num_draft_tokens: int | None = None
    index: int = 0
    generator: torch.Generator | None = None
    streams: bool = False
    logits: bool = False
    source: Request | None = None
    token_bytes: Callable[[int], bytes] | None = None


@dataclass(frozen=True)
class BatchKey:
    """Settings that sequences must share to decode in one batch.

    Attributes:
        num_draft_tokens: drafted nodes per step; None is adaptive, and also the value of sequences without drafts.
        prompt: the target's ``batch_key`` of the prompt.
    """

    speculation: Speculation
    num_draft_tokens: int | None
    prompt: Hashable


@dataclass(frozen=True)
class Delta:
    """New tokens and records of a sequence since the last call of its sink.

    Attributes:
        seconds: the engine's time for the sequence so far, including waiting and prefill.
        num_prompt_tokens: prompt tokens of the sequence.
        finish_reason: None before the end, and if the sequence failed.
        stats: None before the end.
        error: exception that ended the sequence.
    """

    token_ids: list[int]
    trees: list[TreeRecord]
    logprobs: list[TokenLogprob]
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    error: Exception | None = None


Sink = Callable[[Delta], object]


class Sequence(SamplingState):
    """One sequence of a batch: tokens, sampler and grammar state, stopping, statistics and records.

    Args:
        sink: called in the worker thread with each delta; the last delta has ``stats`` or ``error``.

    Attributes:
        finish_reason: set when the sequence has finished.
        error: exception that ended the sequence.
        cancelled: whether the client has dropped the sequence.
        added: time of submission, ``perf_counter`` seconds.
        trees: verified trees, one per step; empty if not recorded.
        logprobs: log probabilities of all generated tokens, and possibly of some after a stop; empty if not recorded.
        logits: (vocab,) float32 each, raw logits of the same tokens; empty if not recorded.
        rejected: whether the output was rejected and must be restarted.
    """

    def __init__(self, request: DecodeRequest, sink: Sink, key: BatchKey) -> None:
        prompt = request.prompt
        history = (prompt.input_ids if prompt.history is None else prompt.history)[0].tolist()
        generator = request.generator or request.sampler.generators(1)[0]
        super().__init__(history, request.sampler, request.index, generator)
        self.request, self.prompt, self.sink, self.key = request, prompt, sink, key
        self.stopper, self.drafts = request.stopper, request.num_draft_tokens != 0
        options = request.source.options if request.source else None
        self._top_logprobs, self.traced = (options.logprobs, options.trace) if options else (None, False)
        self.added = clock()
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.cancelled = self._closed = False
        self._start(Stats(num_prompt_tokens=len(history), lossless=not self.sampler.lossy))

    def _start(self, stats: Stats) -> None:
        """Reset everything that belongs to the output."""
        self.stats, self.rejected = stats, False
        self.trees: list[TreeRecord] = []
        self.logprobs: list[TokenLogprob] = []
        self.logits: list[Tensor] = []
        self._readers = [read(self.history) for read in self.stopper.readers]
        self._sent = self._sent_trees = 0  # tokens and trees passed to the sink

    @property
    def token_ids(self) -> list[int]:
        return self.history[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens left to generate."""
        return self.stopper.limit(self.prompt_length) - (len(self.history) - self.prompt_length)

    def ends(self, token: int, length: int) -> bool:
        limit = self.prompt_length + self.stopper.limit(self.prompt_length)
        return token in self.stopper.eos_token_ids or length >= limit

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.cancelled

    @property
    def ended(self) -> bool:
        """Whether the output has ended: the sequence is done or will restart."""
        return self.done or self.rejected

    def cancel(self) -> None:
        """End the sequence before its next step."""
        self.cancelled = True

    def fail(self, error: Exception) -> None:
        """End the sequence with an error, unless it has ended."""
        if not self.done:
            self.error = error

    def accept(self, logits: Tensor, path: list[int], tokens: list[int], failures: dict[int, Exception]) -> int:
        """Append accepted tokens up to a stop or a failed logits processor, and return their number.

        Args:
            logits: (nodes, vocab), raw logits of the target.
            path: nodes of the accepted path.
            tokens: the target's token after each node of the path.
            failures: processor exceptions by node.
        """
        # Records come first, so that every token that another thread reads has them.
        if self._top_logprobs is not None:
            self.logprobs += token_logprobs(logits[path], tokens, self._top_logprobs)
        if self.request.logits:
            self.logits += logits[path].float()  # a copy: the next pass may overwrite the logits
        failed = next((number for number, node in enumerate(path) if node in failures), len(path))
        try:
            emitted, self.finish_reason = self.stopper.append(
                self.history, self.prompt_length, tokens[:failed], self._readers
            )
        except Exception as error:  # raised by a custom stopping criterion
            self.error = error
            return 0
        if failed < len(path) and self.finish_reason is None:
            self._reject(failures[path[failed]])
        return len(emitted)

    def _reject(self, error: Exception) -> None:
        """Reject the output if its grammar does, else end the sequence with the error."""
        if self.alignment is None or not isinstance(error, RejectedError):
            self.error = error
            return
        try:
            self.alignment.reject()
            self.rejected = True
        except UserError as hopeless:
            self.error = hopeless

    def restart(self) -> None:
        super().restart()
        self._start(
            Stats(num_prompt_tokens=self.prompt_length, num_rejected_outputs=self.stats.num_rejected_outputs + 1)
        )

    def emit(self) -> None:
        """Call the sink at the end, and for streams with new tokens that can no longer be rejected."""
        sent, count = self._sent, len(self.history) - self.prompt_length
        streams = self.request.streams and self.alignment is None and count > sent
        if self._closed or not (self.done or streams):
            return
        trees, self._sent, self._sent_trees = self.trees[self._sent_trees :], count, len(self.trees)
        self._closed = self.done
        reason = (self.finish_reason or "length") if self.done and self.error is None else None
        delta = Delta(
            self.token_ids[sent:],
            trees,
            self.logprobs[sent:count],
            self.stats.wall_seconds,
            self.prompt_length,
            reason,
            self.stats if reason else None,
            self.error,
        )
        self.sink(delta)
