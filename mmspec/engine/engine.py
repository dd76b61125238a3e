"""Continuous batching of speculative decoding: sequences join and leave between decode steps.

A step drafts a tree per sequence, verifies all trees in one forward pass of the target and emits the accepted tokens.
A sequence's tokens do not depend on the other sequences of the batch.
"""

from __future__ import annotations

import threading
from collections import abc, deque
from collections.abc import Callable, Hashable
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter as clock
from typing import Any, TypeGuard

import torch

from mmspec.cache.rows import row_index
from mmspec.core.budget import Budget
from mmspec.core.drafter import Drafter, features
from mmspec.core.target import KeepsPrefixes, Prompt, Step, Target
from mmspec.core.tree import TokenTree
from mmspec.core.verify import verify_greedy
from mmspec.engine.constrain import constrain
from mmspec.engine.leases import Lease
from mmspec.engine.sequence import Sequence
from mmspec.engine.stopping import Stopper
from mmspec.engine.timing import mark, seconds
from mmspec.engine.trace import judge
from mmspec.errors import UserError
from mmspec.sampling.sampler import BatchSampler, Sampler

SLOTS = 32
"""Default maximum batch size."""

CHUNK = 512
"""Default prefill chunk while other sequences decode, in tokens per step."""

_IDLE_CHUNKS = 4
"""Chunks that one prefill pass takes while nothing decodes."""


@dataclass
class _PromptBatch:
    """Prompts that wait for prefill, or are in it."""

    prompt: Prompt
    sequences: list[Sequence]
    nodes: int | None
    kind: Hashable
    seconds: float = 0.0  # prefill time so far
    passes: abc.Iterator[Step | None] | None = None  # prefill chunks

    @property
    def size(self) -> int:
        """Number of prompt tokens, padding included."""
        return self.prompt.input_ids.numel()


class Engine:
    """Continuous-batching engine.

    Any thread may add, remove and wait for sequences: one waiting thread runs the steps for all, the others sleep until
    a step has ended.

    Args:
        target: the target model.
        drafter: proposes the trees; None decodes plainly.
        budget: returns the budget of a step, given batch size and tree size (None: adaptive).
        slots: maximum batch size.
        chunk: prompt tokens prefilled per step while other sequences decode.

    Attributes:
        running: decoding sequences; their indices are the rows of target and drafter.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        budget: Callable[[int, int | None], Budget],
        *,
        slots: int = SLOTS,
        chunk: int = CHUNK,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.slots, self.chunk = slots, chunk
        self.running: list[Sequence] = []
        self._budget = budget
        self._waiting: deque[_PromptBatch] = deque()
        self._prefilling: _PromptBatch | None = None
        self._prefilled: list[tuple[Prompt, Step, list[Sequence]]] = []  # not yet passed to the drafter
        self._nodes: int | None = None  # tree size of the running sequences
        self._kind: Hashable = None
        self._token = torch.empty(0, dtype=torch.long)  # (rows,) last emitted tokens
        self._sampler = BatchSampler()
        self._changed = threading.Condition()
        self._stepping: threading.Thread | None = None
        self._pauses = 0  # threads that wait for the end of a step
        self._lease = Lease(target, drafter)

    # ------------------------------------------------------------------ clients

    def attach(self) -> None:
        """Attach the drafter to the target; raises ``UserError`` if they do not match."""
        lease = Lease(self.target, self.drafter, drafter_only=True)
        lease.acquire()
        lease.release()

    def add(
        self,
        prompt: Prompt,
        sampler: Sampler,
        stopper: Stopper,
        nodes: int | None = None,
        *,
        trace: bool = False,
        logprobs: int | None = None,
    ) -> list[Sequence]:
        """Queue prompts for decoding; those of one call start together.

        Args:
            prompt: one or several rows.
            sampler, stopper: sampling and stopping criteria.
            nodes: drafted nodes per step; None chooses adaptively. Sequences with different values are not batched
                together.
            trace: record the verified trees.
            logprobs: record each token's log probability and those of so many alternatives; None records none.

        Raises:
            UserError: another engine holds this target or drafter and may never release it.
        """
        histories = prompt.histories()
        generators = sampler.generators(len(histories))
        sequences = [
            Sequence(history, sampler, stopper, index, generator)
            for index, (history, generator) in enumerate(zip(histories, generators, strict=True))
        ]
        for sequence in sequences:
            sequence.trees = [] if trace else None
            sequence.top_logprobs = logprobs
        with self._changed:
            self._lease.acquire()
            self._waiting.append(_PromptBatch(prompt, sequences, nodes, self.target.kind(prompt)))
        return sequences

    def remove(self, sequences: abc.Iterable[Sequence]) -> None:
        """Cancel sequences and free their rows at the next step; no effect on finished ones."""
        for sequence in sequences:
            sequence.cancelled = True
        with self._changed:
            if not self._stepping:
                self._release()
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Run steps until ``ready()``, or wait while another thread runs them.

        Raises:
            UserError: called inside a step, by a logits processor or a stopping criterion.
        """
        while True:
            with self._changed:
                if self._stepping is threading.current_thread():
                    raise UserError("a logits processor or stopping criterion cannot call its own pipeline")
                while (self._stepping or self._pauses) and not ready():
                    self._changed.wait()
                if ready():
                    return
                self._stepping = threading.current_thread()
            try:
                with self._lease.used():
                    self.step()
            except Exception as error:
                self._abort(error)
            except BaseException:
                self._abort(RuntimeError("decoding was interrupted"))
                raise
            finally:
                with self._changed:
                    self._stepping = None
                    self._changed.notify_all()
                    self._release()

    @contextmanager
    def paused(self) -> abc.Iterator[None]:
        """Run a block between two steps: no thread changes target or drafter meanwhile."""
        with self._changed:
            self._pauses += 1
            try:
                while self._stepping not in (None, threading.current_thread()):
                    self._changed.wait()
                yield
            finally:
                self._pauses -= 1
                self._changed.notify_all()

    # ------------------------------------------------------------------ one step

    def step(self) -> None:
        """Prefill waiting prompts while rows are free, then run one decode step."""
        start = clock()
        running = list(self.running)
        self._remove_finished()
        # Clients get the first token before the first decode step.
        if self._prefill() and not running:
            return
        self._remove_finished()
        if self.running:
            self._decode()
            self._remove_finished()
        for sequence in running:
            sequence.stats.wall_seconds += clock() - start

    def _decode(self) -> None:
        """One decode step: draft, verify, commit."""
        start, rows, drafter, device = clock(), self.running, self.drafter, self._token.device
        begun = mark(device)
        budget = self._prepare()
        prepared = mark(device)
        budget.remaining = max(row.room for row in rows) - 1
        drafting = drafter is not None and budget.drafts()
        tree = TokenTree.root(self._token)
        if drafter is not None and drafting:
            tree = drafter.propose(self._token, budget)
        if drafter is not None:
            tree = budget.prune(constrain(rows, tree, budget, drafter))
        drafted = mark(device)
        step = self.target.forward_tree(tree)
        verdict = verify_greedy(tree, self._sampler.choose(rows, tree, step.logits))
        verified = mark(device)
        accepted = verdict.host  # synchronises
        draft_seconds, verify_seconds = seconds(begun, drafted), seconds(drafted, verified)
        for number, row in enumerate(rows):
            if row.trees is not None:
                row.trees.append(judge(tree, number, verdict, step))
        began = clock()
        self.target.commit(verdict)
        for number, (row, drafts, (path, tokens)) in enumerate(zip(rows, tree.drafted, accepted, strict=True)):
            row.record_logprobs(step.logits[number], path, tokens)
            emitted = row.append(path, tokens)
            # Tokens after a stop are neither emitted nor counted as accepted.
            row.stats.record_step(drafts, tree.max_depth, min(len(path) - 1, emitted), emitted)
        if drafter is not None:
            drafter.observe(tree, verdict, step)
        self._token = verdict.bonus
        paths = [path for path, _ in accepted]
        proposing = seconds(prepared, drafted) if drafting or tree.nodes > 1 else 0.0
        budget.observe(tree.nodes, paths, proposing, verify_seconds, clock() - began)
        wall = clock() - start
        for row in rows:
            row.stats.draft_seconds += draft_seconds
            row.stats.verify_seconds += verify_seconds
            row.stats.commit_seconds += wall - draft_seconds - verify_seconds

    def _prepare(self) -> Budget:
        """Begin prefilled sequences in the drafter, and return the step's budget."""
        budget = self._budget(len(self.running), self._nodes)
        if new := sum(len(sequences) for _, _, sequences in self._prefilled):
            budget.begin(new / len(self.running))
        for prompt, step, sequences in self._prefilled:
            if self.drafter is not None:
                self.drafter.begin(prompt, step, [sequence.history for sequence in sequences])
        self._prefilled = []
        return budget

    # ------------------------------------------------------------------ scheduling

    def _prefill(self) -> bool:
        """Prefill waiting prompts while rows are free, at most ``chunk`` tokens if others decode.

        Returns:
            Whether the prefill of any prompt is complete.
        """
        if not self._waiting and self._prefilling is None:
            return False
        busy, tokens, complete = bool(self.running), 0, False
        while not busy or tokens < self.chunk:
            batch = self._prefilling or self._schedule(self.chunk - tokens if busy else _IDLE_CHUNKS * self.chunk)
            if batch is None or (busy and tokens and tokens + batch.size > self.chunk):
                break  # delay decode steps by at most one chunk
            if all(sequence.done for sequence in batch.sequences):
                self._prefilling = None
                continue
            started, step = clock(), None
            try:
                if batch.passes is None:
                    room = [sequence.room for sequence in batch.sequences]
                    batch.passes = self.target.prefill_chunks(batch.prompt, room, self.chunk if busy else None)
                step = next(batch.passes)
            except Exception as error:
                for sequence in batch.sequences:
                    sequence.error = error
                self._prefilling = None
                continue
            tokens += min(batch.size, self.chunk)
            batch.seconds += clock() - started
            if step is not None:
                self._prefilling, complete = None, True
                self._start(batch, step)
        return complete

    def _schedule(self, tokens: int) -> _PromptBatch | None:
        """Next prompts to prefill: compatible ones are stacked up to ``tokens`` tokens, padding included."""
        found: list[_PromptBatch] = []
        longest, rows = 0, len(self.running)
        with self._changed:
            while self._waiting:
                batch = self._waiting[0]
                rows += len(batch.sequences)
                longest = max(longest, batch.prompt.input_ids.shape[1])
                if all(sequence.done for sequence in batch.sequences):
                    rows -= len(batch.sequences)
                elif not self.running and not found:
                    self._nodes, self._kind = batch.nodes, batch.kind
                    found.append(batch)
                else:
                    compatible = (batch.nodes, batch.kind) == (self._nodes, self._kind)
                    fits = not found or longest * (rows - len(self.running)) <= tokens
                    if not (compatible and fits and rows <= self.slots) or self._resumes(batch, found):
                        break
                    found.append(batch)
                self._waiting.popleft()
            if len(found) > 1:
                prompt = Prompt.stack([batch.prompt for batch in found])
                if prompt is None:
                    self._waiting.extendleft(reversed(found[1:]))
                else:
                    sequences = [sequence for batch in found for sequence in batch.sequences]
                    found = [_PromptBatch(prompt, sequences, self._nodes, self._kind)]
            self._prefilling = found[0] if found else None
        self.target.features = features(self.drafter)
        return self._prefilling

    def _resumes(self, batch: _PromptBatch, found: list[_PromptBatch]) -> bool:
        """Whether a prompt or the first of those before it has a known prefix, which takes a prefill of its own."""
        if not found or not _keeps_prefixes(self.target):
            return False
        earlier = [one.prompt for one in found]
        return self.target.resumes(batch.prompt, earlier) or self.target.resumes(earlier[0], [])

    def _start(self, batch: _PromptBatch, step: Step) -> None:
        """Emit the first token of each prefilled sequence and add them to the batch."""
        sequences = batch.sequences
        root = TokenTree.root(torch.zeros(len(sequences), dtype=torch.long, device=step.logits.device))
        first = BatchSampler().choose(sequences, root, step.logits)[:, 0]
        self._token = torch.cat([self._token, first]) if self.running else first
        self.running = [*self.running, *sequences]
        self._prefilled.append((batch.prompt, step, sequences))
        now = clock()
        for row, (sequence, token) in enumerate(zip(sequences, first.tolist(), strict=True)):
            sequence.record_logprobs(step.logits[row], [0], [token])
            sequence.stats.num_cached_tokens = step.cached_tokens
            sequence.stats.num_generated_tokens = sequence.append([0], [token])
            sequence.stats.prefill_seconds = batch.seconds
            sequence.stats.time_to_first_token = sequence.stats.wall_seconds = now - sequence.added

    def _remove_finished(self) -> None:
        """Remove finished sequences; the last rows move into the gaps."""
        kept = [row for row, sequence in enumerate(self.running) if not sequence.done]
        if len(kept) == len(self.running):
            return
        if kept and self._prefilled:
            self._prepare()  # the drafter must have the target's rows
        self._prefilled = []
        if _keeps_prefixes(self.target):
            ended = [row for row, sequence in enumerate(self.running) if sequence.done]
            self.target.retain(ended, [self.running[row].history for row in ended])
        order = [row for row in kept if row < len(kept)]
        movers = iter(kept[len(order) :])
        present = set(order)
        order = [row if row in present else next(movers) for row in range(len(kept))]
        self.running = [self.running[row] for row in order]
        self._token = self._token[row_index(order, self._token.device)]
        self.target.select(order)
        if self.drafter is not None:
            self.drafter.select(order)

    def _release(self) -> None:
        """Free finished and cancelled sequences, and the lease if none is left; called between steps."""
        if not self._prefilled or all(sequence.done for sequence in self.running):
            self._remove_finished()
        batches = [*self._waiting, *([self._prefilling] if self._prefilling else [])]
        if not self.running and all(sequence.done for batch in batches for sequence in batch.sequences):
            self._waiting.clear()
            self._prefilling = None
            self._lease.release()

    def _abort(self, error: Exception) -> None:
        """Fail all sequences of a broken step and reset target and drafter."""
        for sequence in self.running + (self._prefilling.sequences if self._prefilling else []):
            if not sequence.done:
                sequence.error = error
        self.running, self._prefilled, self._prefilling = [], [], None
        self._token = self._token[:0]
        self.target.select([])
        if self.drafter is not None:
            self.drafter.select([])


def _keeps_prefixes(target: Any) -> TypeGuard[KeepsPrefixes]:
    return isinstance(target, KeepsPrefixes) and target.prefix_cache is not None
