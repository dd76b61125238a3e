"""State of a sequence in the engine: its tokens, stopping, statistics and unread output."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter as clock

import torch
from torch import Tensor

from mmspec.core.target import Prompt
from mmspec.engine.request import Request
from mmspec.engine.stats import Stats, TreeRecord
from mmspec.engine.stopping import FinishReason, Stopper
from mmspec.errors import UserError
from mmspec.sampling.aligned import RejectedError
from mmspec.sampling.logprobs import TokenLogprob, token_logprobs
from mmspec.sampling.sampler import Sampled, Sampler


class RequestState(Sampled):
    """One sequence of a batch: history, stopping, statistics and unread output.

    Args:
        history, index, generator: as for ``Sampled``.
        prompt: used to restart rejected outputs.
        request: the request of this sequence; None for bare encoded prompts, whose trees and log probabilities are not
            recorded.
        logits: record the logits of each token.
        drafts: whether to draft; False decodes plainly, possibly in a batch with drafted sequences.
        on_change: called in the worker thread after a step in which the sequence got tokens or ended.
        token_bytes: bytes of a token, for the texts of recorded trees; None without a tokenizer.

    Attributes:
        finish_reason: set when the sequence has finished.
        cancelled: whether the client has dropped the sequence.
        added: time of queueing, ``perf_counter`` seconds.
        trees: verified trees, one per step; None if not recorded.
        logprobs: log probabilities of all generated tokens, and possibly of some after a stop; empty if not recorded.
        logits: (vocab,) float32 each, raw logits of all generated tokens and possibly of some after a stop; None if not
            recorded.
        rejected: whether the output was rejected and must be restarted.
    """

    def __init__(
        self,
        history: list[int],
        sampler: Sampler,
        stopper: Stopper,
        index: int = 0,
        generator: torch.Generator | None = None,
        *,
        prompt: Prompt | None = None,
        request: Request | None = None,
        logits: bool = False,
        drafts: bool = True,
        on_change: Callable[[], None] = lambda: None,
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        super().__init__(history, sampler, index, generator)
        self.stopper = stopper
        self.stats = Stats(num_prompt_tokens=len(history), lossless=not sampler.lossy)
        self.finish_reason: FinishReason | None = None
        self.cancelled = False
        self.added = clock()
        self.prompt, self.request, self.drafts, self.on_change = prompt, request, drafts, on_change
        self.token_bytes = token_bytes
        self.trees: list[TreeRecord] | None = [] if request and request.options.trace else None
        self.logprobs: list[TokenLogprob] = []
        self._top_logprobs = request.options.logprobs if request else None
        self.logits: list[Tensor] | None = [] if logits else None
        self.rejected = False
        self._read = len(history)
        self._readers = [read(history) for read in stopper.readers]

    @property
    def token_ids(self) -> list[int]:
        return self.history[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens left to generate."""
        return self.stopper.limit(self.prompt_length) - (len(self.history) - self.prompt_length)

    def ends(self, token: int, length: int) -> bool:
        return token in self.stopper.eos_token_ids or length >= self.prompt_length + self.stopper.limit(
            self.prompt_length
        )

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.cancelled

    @property
    def ended(self) -> bool:
        """Whether the output has ended: the sequence is done or will restart."""
        return self.done or self.rejected

    @property
    def has_output(self) -> bool:
        """Whether the sequence is done or has unread tokens that can no longer be rejected."""
        return self.done or (self.alignment is None and len(self.history) > self._read)

    def take(self) -> list[int]:
        """Tokens since the last call."""
        new = self.history[self._read :]
        self._read += len(new)
        return new

    def record(self, logits: Tensor, path: list[int], tokens: list[int]) -> None:
        """Record logits and log probabilities; called before ``append``, so that every token has them.

        Args:
            logits: (nodes, vocab), raw logits of the target.
            path, tokens: as for ``append``.
        """
        if self._top_logprobs is not None:
            self.logprobs += token_logprobs(logits[path], tokens, self._top_logprobs)
        if self.logits is not None:
            self.logits += logits[path].float()  # a copy: the next pass may overwrite the logits

    def append(self, path: list[int], tokens: list[int]) -> int:
        """Append accepted tokens up to a stop or a failed logits processor, and return their number.

        Args:
            path: nodes of the accepted path.
            tokens: the target's token after each node of the path.
        """
        failed = next((number for number, node in enumerate(path) if node in self.failures), len(path))
        try:
            emitted, self.finish_reason = self.stopper.append(
                self.history, self.prompt_length, tokens[:failed], self._readers
            )
        except Exception as error:  # raised by a custom stopping criterion
            self.error = error
            return 0
        if failed < len(path) and self.finish_reason is None:
            self._fail(self.failures[path[failed]])
        return len(emitted)

    def _fail(self, error: Exception) -> None:
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
        self.rejected, self.logprobs = False, []
        self._readers = [read(self.history) for read in self.stopper.readers]
        self.trees = None if self.trees is None else []
        self.logits = None if self.logits is None else []
        count = self.stats.num_rejected_outputs + 1
        self.stats = Stats(num_prompt_tokens=self.prompt_length, num_rejected_outputs=count)


class Wakeup:
    """Callback for ``on_change`` that wakes a waiting thread when its sequences reach some state.

    The worker thread tests the state, so that the waiting thread does not compete with it for the GIL.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._ready: Callable[[], bool] = lambda: True

    def __call__(self) -> None:
        if self._ready():
            self._event.set()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()``; the worker thread also calls it after every change."""
        self._ready = ready
        while True:
            self._event.clear()
            if ready():
                return
            self._event.wait()
