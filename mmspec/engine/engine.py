"""Continuous batching of speculative decoding: sequences join and leave between decode steps.

A step drafts a tree per sequence, verifies all trees in one forward pass of the target and emits the accepted tokens.
A sequence's tokens do not depend on the other sequences of the batch.
"""

from __future__ import annotations

import atexit
import threading
from collections import abc
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter as clock
from typing import Any, TypeGuard
from weakref import WeakSet, WeakValueDictionary

import torch

from mmspec.cache.rows import row_index
from mmspec.core.budget import Budget
from mmspec.core.drafter import Drafter, features
from mmspec.core.target import KeepsPrefixes, Prompt, Step, Target
from mmspec.core.tree import TokenTree
from mmspec.core.verify import verify_greedy
from mmspec.engine.constrain import constrain
from mmspec.engine.scheduler import Mode, PromptBatch, Scheduler
from mmspec.engine.sequence import Sequence
from mmspec.engine.speculation import Speculation
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

_ENGINES: WeakValueDictionary[int, Engine] = WeakValueDictionary()  # by id of the target, which the engine keeps alive
_ALL: WeakSet[Engine] = WeakSet()
_LOCK = threading.Lock()
_LOCAL = threading.local()  # the engine whose worker this thread is


class Engine:
    """Continuous-batching engine of one target.

    A worker thread runs steps while there are sequences. Clients add sequences, and wait for their own.

    Args:
        target: the target model.
        slots: maximum batch size.
        chunk: prompt tokens prefilled per step while other sequences decode.

    Attributes:
        running: decoding sequences; their indices are the rows of target and drafter.
    """

    def __init__(self, target: Target, *, slots: int = SLOTS, chunk: int = CHUNK) -> None:
        self.target, self.chunk = target, chunk
        self.running: list[Sequence] = []
        self._scheduler = Scheduler(slots, self._resumes)
        self._prefilling: PromptBatch | None = None
        self._prefilled: list[tuple[Prompt, Step, list[Sequence]]] = []  # not yet passed to the drafter
        self._mode: Mode | None = None  # of the running sequences
        self._token = torch.empty(0, dtype=torch.long)  # (rows,) last emitted tokens
        self._sampler = BatchSampler()
        self._changed = threading.Condition()  # re-entrant: a stream may be garbage collected anywhere
        self._worker: threading.Thread | None = None
        self._stepping = self._closed = False
        self._pauses = 0  # threads that wait for the end of a step
        self._touched: dict[Sequence, None] = {}  # that may have changed in this step
        _ALL.add(self)

    @classmethod
    def of(cls, target: Target, slots: int = SLOTS) -> Engine:
        """Return the engine of a target, which all pipelines over it share, with at least so many slots."""
        with _LOCK:
            engine = _ENGINES.get(id(target))
            if engine is None:
                engine = _ENGINES[id(target)] = cls(target, slots=slots)
            engine._scheduler.slots = max(engine.slots, slots)
            return engine

    @property
    def slots(self) -> int:
        return self._scheduler.slots

    # ------------------------------------------------------------------ clients

    def add(
        self,
        prompt: Prompt,
        sampler: Sampler,
        stopper: Stopper,
        speculation: Speculation,
        nodes: int | None = None,
        *,
        trace: bool = False,
        logprobs: int | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> list[Sequence]:
        """Queue prompts for decoding; those of one call start together.

        Args:
            prompt: one or several rows.
            sampler, stopper: sampling and stopping criteria.
            speculation: drafter and budgets on this target. Sequences with different ones are not batched together.
            nodes: drafted nodes per step; None chooses adaptively. Sequences with different values are not batched
                together.
            trace: record the verified trees.
            logprobs: record each token's log probability and those of so many alternatives; None records none.
            on_change: called in the worker thread after a step in which one of the sequences got tokens or ended.

        Raises:
            UserError: called by a logits processor or a stopping criterion of this engine.
        """
        caller: Engine | None = getattr(_LOCAL, "engine", None)
        if caller is self or (caller and caller._mode and caller._mode.speculation.shares(speculation)):
            raise UserError("a logits processor or stopping criterion cannot call its own pipeline")
        speculation.calibrate(adaptive=nodes is None)
        histories = prompt.histories()
        generators = sampler.generators(len(histories))
        sequences = [
            Sequence(history, sampler, stopper, index, generator)
            for index, (history, generator) in enumerate(zip(histories, generators, strict=True))
        ]
        for sequence in sequences:
            sequence.trees = [] if trace else None
            sequence.top_logprobs = logprobs
            sequence.on_change = on_change
        batch = PromptBatch(prompt, sequences, Mode(speculation, nodes, self.target.kind(prompt)))
        with self._changed:
            if self._closed:
                raise RuntimeError("the interpreter is shutting down")
            self._scheduler.add(batch)
            self._wake()
        return sequences

    def together(self) -> AbstractContextManager[Any]:
        """A block whose sequences are scheduled together: the next step begins after it."""
        return self._changed

    def remove(self, sequences: abc.Iterable[Sequence]) -> None:
        """Cancel sequences; their rows are freed before the next step. No effect on finished ones."""
        for sequence in sequences:
            sequence.cancelled = True

    def drain(self) -> None:
        """Wait until all sequences have ended and their rows are free."""
        with self._changed:
            self._changed.wait_for(lambda: self._worker is None)

    def close(self) -> None:
        """Cancel all sequences and accept no others."""
        with self._changed:
            self._closed = True
            self.remove([*self.running, *(one for batch in self._queued for one in batch.sequences)])
        self.drain()

    # ------------------------------------------------------------------ worker

    def _wake(self) -> None:
        """Start the worker, unless it runs."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._run, name="mmspec engine", daemon=True)
            self._worker.start()

    def _run(self) -> None:
        """Run steps until no sequence is left."""
        _LOCAL.engine, device = self, self.target.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            while self._has_work():
                self._turn()

    def _has_work(self) -> bool:
        """Whether to run another step; otherwise the worker has ended."""
        with self._changed:
            self._stepping = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pauses)
            if self.running or not all(batch.done for batch in self._queued):
                self._stepping = True
                return True
            self._scheduler.clear()
            self._prefilling = self._worker = None
            self._hold(None)
            self._changed.notify_all()
            return False

    def _turn(self) -> None:
        """Run a step and notify the clients of its sequences."""
        self._touched = dict.fromkeys(self.running)
        try:
            self.step()
        except Exception as error:
            self._abort(error)
        except BaseException as error:  # SystemExit of a processor must not end the worker
            self._abort(RuntimeError(f"decoding was interrupted by {type(error).__name__}"))
        for sequence in self._touched:
            if sequence.has_output:
                sequence.on_change()

    @property
    def _queued(self) -> list[PromptBatch]:
        return [*self._scheduler, *([self._prefilling] if self._prefilling else [])]

    def _hold(self, mode: Mode | None) -> None:
        """Use the drafter of a mode from now on, exclusively, and free the one before."""
        held = self._mode.speculation if self._mode else None
        new = mode.speculation if mode else None
        self._mode = mode
        if held is not new:
            if held is not None:
                held.__exit__()
            if new is not None:
                try:
                    new.__enter__()
                except BaseException:
                    self._mode = None
                    raise
        self.target.features = features(new.drafter if new else None)

    @property
    def _drafter(self) -> Drafter | None:
        return self._mode.speculation.drafter if self._mode else None

    @contextmanager
    def paused(self) -> abc.Iterator[None]:
        """Run a block between two steps: the worker changes neither target nor drafter meanwhile."""
        with self._changed:
            self._pauses += 1
            try:
                self._changed.wait_for(lambda: not self._stepping or self._worker is threading.current_thread())
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
            self._remove_finished()
            return
        self._remove_finished()
        if self.running:
            self._decode()
            self._remove_finished()
        for sequence in running:
            sequence.stats.wall_seconds += clock() - start

    def _decode(self) -> None:
        """One decode step: draft, verify, commit."""
        start, rows, drafter, device = clock(), self.running, self._drafter, self._token.device
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
        assert self._mode is not None
        budget = self._mode.speculation.budget_of(len(self.running), self._mode.nodes)
        if new := sum(len(sequences) for _, _, sequences in self._prefilled):
            budget.begin(new / len(self.running))
        for prompt, step, sequences in self._prefilled:
            if self._drafter is not None:
                self._drafter.begin(prompt, step, [sequence.history for sequence in sequences])
        self._prefilled = []
        return budget

    # ------------------------------------------------------------------ scheduling

    def _prefill(self) -> bool:
        """Prefill waiting prompts while rows are free, at most ``chunk`` tokens if others decode.

        Returns:
            Whether the prefill of any prompt is complete.
        """
        if not len(self._scheduler) and self._prefilling is None:
            return False
        busy, tokens, complete = bool(self.running), 0, False
        while not busy or tokens < self.chunk:
            batch = self._prefilling or self._schedule(self.chunk - tokens if busy else _IDLE_CHUNKS * self.chunk)
            if batch is None or (busy and tokens and tokens + batch.size > self.chunk):
                break  # delay decode steps by at most one chunk
            if batch.done:
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

    def _schedule(self, tokens: int) -> PromptBatch | None:
        """Take the next prompts to prefill from the queue, at most ``tokens`` tokens if they are stacked."""
        if self.running and self._mode and self._mode.speculation.wanted:
            return None  # another engine waits for the drafter
        with self._changed:
            batch = self._prefilling = self._scheduler.next(len(self.running), self._mode, tokens)
        if batch is not None:
            self._touched |= dict.fromkeys(batch.sequences)
            self._hold(batch.mode)
        return batch

    def _resumes(self, prompt: Prompt, earlier: list[Prompt]) -> bool:
        """Whether a prompt or the first of those before it has a known prefix, which takes a prefill of its own."""
        if not _keeps_prefixes(self.target):
            return False
        return self.target.resumes(prompt, earlier) or self.target.resumes(earlier[0], [])

    def _start(self, batch: PromptBatch, step: Step) -> None:
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
        if self._drafter is not None:
            self._drafter.select(order)

    def _abort(self, error: Exception) -> None:
        """Fail all sequences of a broken step and reset target and drafter."""
        for sequence in [*self.running, *(self._prefilling.sequences if self._prefilling else [])]:
            self._touched[sequence] = None
            if not sequence.done:
                sequence.error = error
        self.running, self._prefilled, self._prefilling = [], [], None
        self._token = self._token[:0]
        self.target.select([])
        if self._drafter is not None:
            self._drafter.select([])


def _keeps_prefixes(target: Any) -> TypeGuard[KeepsPrefixes]:
    return isinstance(target, KeepsPrefixes) and target.prefix_cache is not None


@atexit.register
def _close_all() -> None:
    """Stop the workers before the interpreter does: a thread inside a kernel would crash it."""
    for engine in list(_ALL):
        engine.close()
