"""Queue of prompts: which of them are prefilled next, and with which others."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from mmspec.core.target import Prompt, TargetOutput
from mmspec.engine.request_state import RequestState
from mmspec.engine.speculation import Speculation


@dataclass(frozen=True)
class BatchKey:
    """Settings that sequences must share to decode in one batch.

    Attributes:
        num_draft_tokens: drafted nodes per step; None chooses adaptively.
        prompt: the target's key of the prompt.
    """

    speculation: Speculation
    num_draft_tokens: int | None
    prompt: Hashable


@dataclass
class PromptBatch:
    """Prompts that wait for prefill, or are in it.

    Attributes:
        seconds: prefill time so far.
        passes: prefill chunks, once begun.
        parts: of stacked prompts, each of them.
        alone: whether they may not be stacked, as that has failed.
    """

    prompt: Prompt
    sequences: list[RequestState]
    mode: BatchKey
    seconds: float = 0.0
    passes: abc.Iterator[TargetOutput | None] | None = None
    parts: list[PromptBatch] = field(default_factory=list)
    alone: bool = False

    @property
    def size(self) -> int:
        """Number of prompt tokens, padding included."""
        return self.prompt.input_ids.numel()

    @property
    def done(self) -> bool:
        return all(sequence.done for sequence in self.sequences)


class Scheduler:
    """First come, first served; prompts at the head of the queue that are compatible are stacked.

    Args:
        resumes: whether a prompt after others has a known prefix, and takes a prefill of its own.
    """

    def __init__(self, max_num_seqs: int, resumes: Callable[[Prompt, list[Prompt]], bool]) -> None:
        self.max_num_seqs = max_num_seqs
        self._resumes = resumes
        self._waiting: deque[PromptBatch] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> abc.Iterator[PromptBatch]:
        return iter(self._waiting)

    def add(self, batch: PromptBatch) -> None:
        self._waiting.append(batch)

    def add_rejected(self, sequences: abc.Iterable[RequestState], mode: BatchKey) -> None:
        """Append the prompts of rejected outputs, which begin anew."""
        for sequence in sequences:
            sequence.restart()
            assert sequence.prompt is not None
            self.add(PromptBatch(sequence.prompt, [sequence], mode))

    def unstack(self, batch: PromptBatch) -> None:
        """Queue stacked prompts again, before all others, to be prefilled one by one."""
        for part in reversed(batch.parts):
            part.alone = True
            self._waiting.appendleft(part)

    def clear(self) -> None:
        self._waiting.clear()

    def next(self, running: int, mode: BatchKey | None, tokens: int) -> PromptBatch | None:
        """Remove the next prompts from the queue; None if none of them can join.

        Args:
            mode: theirs.
            tokens: stacked prompts have at most so many, padding included.
        """
        chosen: list[PromptBatch] = []
        longest, rows = 0, running
        while self._waiting:
            batch = self._waiting[0]
            if batch.done:
                self._waiting.popleft()
                continue
            rows += len(batch.sequences)
            longest = max(longest, batch.prompt.input_ids.shape[1])
            if running or chosen:
                fits = not chosen or (longest * (rows - running) <= tokens and not (batch.alone or chosen[0].alone))
                joins = batch.mode == mode and fits and rows <= self.max_num_seqs
                if not joins or (chosen and self._resumes(batch.prompt, [earlier.prompt for earlier in chosen])):
                    break
            mode = batch.mode
            chosen.append(self._waiting.popleft())
        if len(chosen) > 1:
            prompt = Prompt.stack([batch.prompt for batch in chosen])
            if prompt is None:
                self._waiting.extendleft(reversed(chosen[1:]))
            else:
                sequences = [sequence for batch in chosen for sequence in batch.sequences]
                return PromptBatch(prompt, sequences, chosen[0].mode, parts=chosen)
        return chosen[0] if chosen else None
