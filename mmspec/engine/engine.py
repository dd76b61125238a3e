"""Continuous batching of speculative decoding: sequences join and leave between decode steps.

A step drafts a tree per sequence, verifies all trees in one pass of the target, and keeps what the target itself would
have generated. A sequence's tokens do not depend on what decodes beside it.
"""

from __future__ import annotations

import threading
from collections import abc, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter as clock

import torch

from mmspec.cache.rows import row_index
from mmspec.drafters.drafter import Drafter, features
from mmspec.engine.leases import Lease
from mmspec.engine.stats import Stats
from mmspec.engine.stopping import FinishReason, Stopper
from mmspec.engine.timing import mark, seconds
from mmspec.errors import UserError
from mmspec.sampling.sampler import BatchSampler, Sampled, Sampler
from mmspec.speculation.budget import Budget
from mmspec.speculation.trace import JudgedTree, judge
from mmspec.speculation.tree import TokenTree
from mmspec.speculation.verify import verify_greedy
from mmspec.targets.target import Prompt, Step, Target

SLOTS = 32
"""Sequences that decode at the same time by default."""

CHUNK = 512
"""Tokens of waiting prompts that one step absorbs by default while others decode."""


_AT_ONCE = 4
"""Chunks that one pass absorbs while nothing decodes."""


class Sequence(Sampled):
    """One sequence under generation.

    Attributes:
        stats: its figures.
        finish_reason: set when it has ended.
        cancelled: nobody wants the rest of it.
        added: when it was queued, in seconds of the clock that ``stats`` uses.
        trees: its verified trees, one per step; None if they are not recorded.
    """

    def __init__(
        self,
        history: list[int],
        sampler: Sampler,
        stopper: Stopper,
        index: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(history, sampler, index, generator)
        self.stopper = stopper
        self.stats = Stats()
        self.finish_reason: FinishReason | None = None
        self.cancelled = False
        self.added = clock()
        self.trees: list[JudgedTree] | None = None
        self._taken = len(history)

    @property
    def token_ids(self) -> list[int]:
        """All new tokens."""
        return self.history[self.prompt_length :]

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self.stopper.room(self.prompt_length) - (len(self.history) - self.prompt_length)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.cancelled

    @property
    def has_news(self) -> bool:
        return self.done or len(self.history) > self._taken

    def take(self) -> list[int]:
        """The tokens since the last call."""
        new = self.history[self._taken :]
        self._taken += len(new)
        return new

    def keep(self, path: list[int], tokens: list[int]) -> int:
        """Append the part of ``tokens``, those chosen at the nodes of ``path``, up to a stop or a failure of a
        processor; how many that are."""
        failed = next((number for number, node in enumerate(path) if node in self.failures), len(path))
        try:
            kept, self.finish_reason = self.stopper.keep(self.history, self.prompt_length, tokens[:failed])
        except Exception as error:  # of a criterion of the user's
            self.error = error
            return 0
        if failed < len(path) and self.finish_reason is None:
            self.error = self.failures[path[failed]]
        return len(kept)


@dataclass
class _Arrival:
    """Prompts that wait for slots, or are being absorbed."""

    prompt: Prompt
    sequences: list[Sequence]
    nodes: int | None
    kind: Hashable
    seconds: float = 0.0  # spent on absorbing them
    passes: abc.Iterator[Step | None] | None = None

    @property
    def size(self) -> int:
        """Tokens of the prompts, padding included."""
        return self.prompt.input_ids.numel()


class Engine:
    """Decodes the sequences that are added to it, together.

    Any thread may add and remove sequences and wait for them: one that waits drives the engine for all, the others
    sleep until the step has ended.

    Args:
        target: the model whose output this is.
        drafter: proposes the trees; None decodes plainly.
        budget: given the sizes of the batch and (None: adaptive) of the trees, the budget of a step.
        slots: sequences that decode at the same time.
        chunk: tokens of waiting prompts that one step absorbs while others decode.

    Attributes:
        running: the sequences that decode; their indices are the rows of target and drafter.
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
        self._waiting: deque[_Arrival] = deque()
        self._arriving: _Arrival | None = None  # whose prompts are being absorbed
        self._joined: list[tuple[Prompt, Step, list[Sequence]]] = []  # of which the drafter does not know yet
        self._nodes: int | None = None  # of the running sequences
        self._kind: Hashable = None
        self._token = torch.empty(0, dtype=torch.long)  # (rows,) the last emitted ones
        self._sampler = BatchSampler()
        self._changed = threading.Condition()
        self._stepping: threading.Thread | None = None
        self._lease = Lease(target, drafter)

    # ------------------------------------------------------------------ clients

    def attach(self) -> None:
        """Attach the drafter to the target; raises ``UserError`` where they do not fit."""
        lease = Lease(self.target, self.drafter, drafter_only=True)
        lease.acquire()
        lease.release()

    def add(
        self, prompt: Prompt, sampler: Sampler, stopper: Stopper, nodes: int | None = None, *, trace: bool = False
    ) -> list[Sequence]:
        """Queue prompts for decoding; those of one call join at the same time.

        Args:
            prompt: one or several rows.
            sampler, stopper: how their tokens are chosen, and when they end.
            nodes: drafted nodes per step; None takes as many as are expected to be fastest. Sequences that differ in it
                do not decode together.
            trace: record the verified trees.

        Raises:
            UserError: another engine decodes with this target or drafter, and may never end.
        """
        histories = prompt.histories()
        generators = sampler.generators(len(histories))
        sequences = [
            Sequence(history, sampler, stopper, index, generator)
            for index, (history, generator) in enumerate(zip(histories, generators, strict=True))
        ]
        for sequence in sequences:
            sequence.trees = [] if trace else None
        with self._changed:
            self._lease.acquire()
            self._waiting.append(_Arrival(prompt, sequences, nodes, self.target.kind(prompt)))
        return sequences

    def remove(self, sequences: abc.Iterable[Sequence]) -> None:
        """Cancel sequences: their slots are free at the next step. Those that have ended are left as they are."""
        for sequence in sequences:
            sequence.cancelled = True
        with self._changed:
            if not self._stepping:
                self._release()
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Decode until ``ready()``, or wait while another thread does.

        Raises:
            UserError: called from within a step, by a logits processor or a stopping criterion.
        """
        while True:
            with self._changed:
                if self._stepping is threading.current_thread():
                    raise UserError("a request cannot be made from within a step of the same pipeline")
                while self._stepping and not ready():
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

    # ------------------------------------------------------------------ one step

    def step(self) -> None:
        """Absorb waiting prompts as far as slots are free; unless some have joined, emit tokens for every sequence."""
        start = clock()
        running = list(self.running)
        self._leave()
        # Those who wait for their first token have it before the first decode step.
        if self._admit() and not running:
            return
        self._leave()
        if self.running:
            self._decode()
            self._leave()
        for sequence in running:
            sequence.stats.wall_seconds += clock() - start

    def _decode(self) -> None:
        """Draft, verify, commit."""
        start, rows, drafter, device = clock(), self.running, self.drafter, self._token.device
        begun = mark(device)
        budget = self._begin()
        joined = mark(device)
        budget.remaining = max(row.room for row in rows) - 1
        drafting = drafter is not None and budget.drafts()
        tree = TokenTree.root(self._token)
        if drafter is not None and drafting:
            tree = budget.prune(drafter.propose(self._token, budget))
        drafted = mark(device)
        step = self.target.forward_tree(tree)
        verdict = verify_greedy(tree, self._sampler.choose(rows, tree, step.logits))
        verified = mark(device)
        accepted = verdict.host  # synchronises
        draft_seconds, verify_seconds = seconds(begun, drafted), seconds(drafted, verified)
        for number, row in enumerate(rows):
            if row.trees is not None:
                row.trees.append(judge(tree, number, verdict, step))
        self.target.commit(verdict)
        for row, drafts, (path, tokens) in zip(rows, tree.drafted, accepted, strict=True):
            emitted = row.keep(path, tokens)
            # Tokens after a stop are not emitted, and not counted as accepted either.
            row.stats.record_step(drafts, tree.max_depth, min(len(path) - 1, emitted), emitted)
        if drafter is not None:
            drafter.observe(tree, verdict, step)
        self._token = verdict.bonus
        paths = [path for path, _ in accepted]
        budget.observe(tree.nodes, paths, seconds(joined, drafted) if drafting else 0.0, verify_seconds)
        wall = clock() - start
        for row in rows:
            row.stats.draft_seconds += draft_seconds
            row.stats.verify_seconds += verify_seconds
            row.stats.commit_seconds += wall - draft_seconds - verify_seconds

    def _begin(self) -> Budget:
        """The step's budget; the drafter learns of the sequences that have joined."""
        budget = self._budget(len(self.running), self._nodes)
        if joined := sum(len(sequences) for _, _, sequences in self._joined):
            budget.begin(joined / len(self.running))
        for prompt, step, sequences in self._joined:
            if self.drafter is not None:
                self.drafter.begin(prompt, step, [sequence.history for sequence in sequences])
        self._joined = []
        return budget

    # ------------------------------------------------------------------ sequences join and leave

    def _admit(self) -> bool:
        """Absorb waiting prompts: as many as there are slots for, but no more than ``chunk`` tokens while others
        decode. Whether any have joined."""
        if not self._waiting and self._arriving is None:
            return False
        busy, tokens, joined = bool(self.running), 0, False
        while not busy or tokens < self.chunk:
            arrival = self._arriving or self._next(self.chunk - tokens if busy else _AT_ONCE * self.chunk)
            if arrival is None or (busy and tokens and tokens + arrival.size > self.chunk):
                break  # a step of those that decode is delayed by one chunk at most
            if all(sequence.done for sequence in arrival.sequences):
                self._arriving = None
                continue
            started, step = clock(), None
            try:
                if arrival.passes is None:
                    room = [sequence.room for sequence in arrival.sequences]
                    arrival.passes = self.target.prefill_chunks(arrival.prompt, room, self.chunk if busy else None)
                step = next(arrival.passes)
            except Exception as error:
                for sequence in arrival.sequences:
                    sequence.error = error
                self._arriving = None
                continue
            tokens += min(arrival.size, self.chunk)
            arrival.seconds += clock() - started
            if step is not None:
                self._arriving, joined = None, True
                self._join(arrival, step)
        return joined

    def _next(self, tokens: int) -> _Arrival | None:
        """The next prompts, if they may join now; together with those after them that one pass over ``tokens`` tokens
        can absorb as well."""
        found: list[_Arrival] = []
        longest, rows = 0, len(self.running)
        with self._changed:
            while self._waiting:
                one = self._waiting[0]
                rows += len(one.sequences)
                longest = max(longest, one.prompt.input_ids.shape[1])
                if all(sequence.done for sequence in one.sequences):
                    rows -= len(one.sequences)
                elif not self.running and not found:
                    self._nodes, self._kind = one.nodes, one.kind
                    found.append(one)
                else:
                    alike = (one.nodes, one.kind) == (self._nodes, self._kind)
                    small = not found or longest * (rows - len(self.running)) <= tokens
                    if not (alike and small and rows <= self.slots):
                        break
                    found.append(one)
                self._waiting.popleft()
            if len(found) > 1:
                prompt = Prompt.stack([one.prompt for one in found])
                if prompt is None:
                    self._waiting.extendleft(reversed(found[1:]))
                else:
                    sequences = [sequence for one in found for sequence in one.sequences]
                    found = [_Arrival(prompt, sequences, self._nodes, self._kind)]
            self._arriving = found[0] if found else None
        self.target.features = features(self.drafter)
        return self._arriving

    def _join(self, arrival: _Arrival, step: Step) -> None:
        """Prompts were absorbed: emit the first token of each."""
        sequences = arrival.sequences
        root = TokenTree.root(torch.zeros(len(sequences), dtype=torch.long, device=step.logits.device))
        first = BatchSampler().choose(sequences, root, step.logits)[:, 0]
        self._token = torch.cat([self._token, first]) if self.running else first
        self.running = [*self.running, *sequences]
        self._joined.append((arrival.prompt, step, sequences))
        now = clock()
        for sequence, token in zip(sequences, first.tolist(), strict=True):
            sequence.stats.num_generated_tokens = sequence.keep([0], [token])
            sequence.stats.prefill_seconds = arrival.seconds
            sequence.stats.time_to_first_token = sequence.stats.wall_seconds = now - sequence.added

    def _leave(self) -> None:
        """Free the slots of sequences that have ended: the last ones move there."""
        kept = [row for row, sequence in enumerate(self.running) if not sequence.done]
        if len(kept) == len(self.running):
            return
        if kept and self._joined:
            self._begin()  # the drafter's rows are those of the target
        self._joined = []
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
        """Free what ended or was cancelled meanwhile; called while no step runs."""
        if not self._joined or all(sequence.done for sequence in self.running):
            self._leave()
        arrivals = [*self._waiting, *([self._arriving] if self._arriving else [])]
        if not self.running and all(sequence.done for arrival in arrivals for sequence in arrival.sequences):
            self._waiting.clear()
            self._arriving = None
            self._lease.release()

    def _abort(self, error: Exception) -> None:
        """A step failed: its sequences end with the error, and target and drafter begin anew."""
        for sequence in self.running + (self._arriving.sequences if self._arriving else []):
            if not sequence.done:
                sequence.error = error
        self.running, self._joined, self._arriving = [], [], None
        self._token = self._token[:0]
        self.target.select([])
        if self.drafter is not None:
            self.drafter.select([])
