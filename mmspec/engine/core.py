"""Single-threaded engine core: request queue, prefill, and decode steps (draft, verify, commit).

A step drafts a tree per sequence, verifies all trees in one forward pass of the target and emits the accepted tokens.
A sequence's tokens do not depend on the other sequences of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition
from time import perf_counter as clock

import torch
from torch import Tensor

from mmspec.cache.prefix_cache import PrefixReuse
from mmspec.cache.rows import row_index
from mmspec.core.drafter import Guard
from mmspec.core.plan import StepPlan, StepTimes
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.engine.constrain import constrain
from mmspec.engine.policy import DraftPolicy
from mmspec.engine.request_state import RequestState
from mmspec.engine.speculation import Speculation
from mmspec.engine.stats import mark, record_tree, seconds
from mmspec.sampling.batch_sampler import BatchSampler

_IDLE_CHUNKS = 4
"""Prefill chunks per step while no sequence decodes."""


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


@dataclass
class PromptBatch:
    """Prompts that are waiting for prefill or being prefilled.

    Attributes:
        seconds: prefill time so far.
        passes: remaining prefill chunks; None before the first.
        parts: the batches that were stacked into this one.
        alone: whether stacking is ruled out because a stacked prefill failed.
    """

    prompt: Prompt
    sequences: list[RequestState]
    key: BatchKey
    seconds: float = 0.0
    passes: Iterator[TargetOutput | None] | None = None
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
    """First-come-first-served queue that stacks compatible prompts at its head.

    Args:
        resumes: whether a prompt has a cached prefix and therefore needs a prefill of its own.
    """

    def __init__(self, max_num_seqs: int, resumes: Callable[[Prompt, list[Prompt]], bool]) -> None:
        self.max_num_seqs = max_num_seqs
        self._resumes = resumes
        self._waiting: deque[PromptBatch] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PromptBatch]:
        return iter(self._waiting)

    def add(self, batch: PromptBatch) -> None:
        self._waiting.append(batch)

    def add_rejected(self, sequences: Iterable[RequestState], key: BatchKey) -> None:
        """Restart rejected sequences and queue their prompts again."""
        for sequence in sequences:
            sequence.restart()
            assert sequence.prompt is not None
            self.add(PromptBatch(sequence.prompt, [sequence], key))

    def unstack(self, batch: PromptBatch) -> None:
        """Put stacked prompts back at the head of the queue, to be prefilled one by one."""
        for part in reversed(batch.parts):
            part.alone = True
            self._waiting.appendleft(part)

    def clear(self) -> None:
        self._waiting.clear()

    def next(self, running: int, key: BatchKey | None, tokens: int) -> PromptBatch | None:
        """Remove the next prompts from the queue; None if none can join the running sequences.

        Args:
            running: number of running sequences.
            key: batch key of the running sequences.
            tokens: maximum tokens of stacked prompts, padding included.
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
                joins = batch.key == key and fits and rows <= self.max_num_seqs
                if not joins or (chosen and self._resumes(batch.prompt, [earlier.prompt for earlier in chosen])):
                    break
            key = batch.key
            chosen.append(self._waiting.popleft())
        if len(chosen) > 1:
            prompt = Prompt.stack([batch.prompt for batch in chosen])
            if prompt is None:
                self._waiting.extendleft(reversed(chosen[1:]))
            else:
                sequences = [sequence for batch in chosen for sequence in batch.sequences]
                return PromptBatch(prompt, sequences, chosen[0].key, parts=chosen)
        return chosen[0] if chosen else None


@dataclass(frozen=True)
class Draft:
    """A drafter's proposal for one step.

    Attributes:
        rows: sequences this draft was made for.
        seconds: returns the draft time spent before the step; call it after synchronising.
    """

    rows: list[RequestState]
    policy: DraftPolicy
    plan: StepPlan
    tree: TokenTree
    seconds: Callable[[], float] = float


class EngineCore:
    """Sequences of one target and their decode steps. Only one thread at a time may run steps.

    Args:
        chunk: prompt tokens prefilled per step while other sequences decode.
        lock: held by other threads that add to the scheduler.

    Attributes:
        scheduler: queue of waiting prompts.
        running: decoding sequences; their indices are the rows of target and drafter.
        touched: sequences that may have changed in this step.
        prefixes: reuses states of earlier prompts; None computes every prompt in full.
    """

    def __init__(self, target: Target, max_num_seqs: int, chunk: int, lock: Condition) -> None:
        self.target, self.chunk = target, chunk
        self.scheduler = Scheduler(max_num_seqs, self._resumes)
        self.running: list[RequestState] = []
        self.key: BatchKey | None = None
        self.touched: dict[RequestState, None] = {}
        self.prefixes: PrefixReuse | None = None
        self._reads: tuple[Feature, ...] = ()  # hidden states that the drafter reads
        self._lock = lock
        self._prefilling: PromptBatch | None = None
        self._prefilled: list[tuple[Prompt, TargetOutput, list[RequestState]]] = []  # not yet passed to the drafter
        self._token = torch.empty(0, dtype=torch.long)  # (rows,) last emitted tokens
        self._ahead: Draft | None = None  # pre-launched for the next step; dropped if the batch changes
        self._sampler = BatchSampler()
        self._vocab = 0  # the target's vocabulary size, known after a prefill

    @property
    def queued(self) -> list[PromptBatch]:
        """Prompts that are waiting for prefill or being prefilled."""
        return [*self.scheduler, *([self._prefilling] if self._prefilling else [])]

    @property
    def sequences(self) -> list[RequestState]:
        """All sequences that are running or queued."""
        return [*self.running, *(sequence for batch in self.queued for sequence in batch.sequences)]

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.running) or not all(batch.done for batch in self.queued)

    def add(self, batch: PromptBatch) -> None:
        """Queue prompts; the caller holds the lock."""
        self.scheduler.add(batch)

    def cancel(self, sequences: Iterable[RequestState]) -> None:
        """Cancel sequences before the next step."""
        for sequence in sequences:
            sequence.cancelled = True

    def clear(self) -> None:
        """Clear the queue and release the drafter."""
        self.scheduler.clear()
        self._prefilling = self._ahead = None
        self._hold(None)

    def _hold(self, key: BatchKey | None) -> None:
        """Acquire the drafter of a batch key for exclusive use, and release the previous drafter."""
        held = self.key.speculation if self.key else None
        new = key.speculation if key else None
        if held is not new:
            self.key = None
            if held is not None:
                held.release()
            if new is not None:
                new.acquire()
        self.key = key
        self._reads = tuple(new.drafter.features) if new and new.drafter else ()

    @property
    def _drafter(self) -> Guard | None:
        return self.key.speculation.guard if self.key else None

    def step(self) -> None:
        """Prefill waiting prompts while rows are free, then run one decode step."""
        start = clock()
        running = list(self.running)
        self.remove_finished()
        # Clients get the first token before the first decode step.
        if self._prefill() and not running:
            self.remove_finished()
            return
        self.remove_finished()
        if self.running:
            self._decode()
            self.remove_finished()
        for sequence in running:
            sequence.stats.wall_seconds += clock() - start

    def _decode(self) -> None:
        """One decode step: draft, verify, commit.

        The commit, and the next draft if the drafter allows it, are launched before the host synchronises to read the
        accepted tokens.
        """
        start, rows, drafter, device = clock(), self.running, self._drafter, self._token.device
        ahead, self._ahead = self._ahead, None
        begun = mark(device)
        policy = self._prepare()
        prepared = mark(device)
        if ahead is not None and (ahead.rows is not rows or ahead.policy is not policy or self._remaining <= 0):
            ahead = None  # drafting again changes only the tree
        draft = ahead or self._propose(policy, self._token)
        tree = self._fitted(draft)
        drafted = mark(device)
        output = self.target.verify(tree, self._reads)
        verdict = accept_path(tree, self._sampler.choose(rows, tree, output.logits))
        verified = mark(device)
        began = clock()
        self.target.commit(verdict)
        if self.prefixes is not None:
            self.prefixes.commit(verdict, output.features)
        # Trace records read the tree, whose memory the next draft reuses.
        early = drafter is not None and drafter.drafts_ahead and all(row.trees is None for row in rows)
        if drafter is not None and early:
            drafter.observe(tree, verdict, output)
            before = mark(device)
            self._ahead = self._propose(policy, verdict.bonus)
            self._ahead = replace(self._ahead, seconds=partial(seconds, before, mark(device)))
        accepted = verdict.host  # synchronises
        earlier = draft.seconds()
        draft_seconds, verify_seconds = earlier + seconds(begun, drafted), seconds(drafted, verified)
        proposing = earlier + seconds(prepared, drafted) if draft.plan.nodes or tree.nodes > 1 else 0.0
        for number, row in enumerate(rows):
            if row.trees is not None:
                row.trees.append(record_tree(tree, number, verdict, output, row.token_bytes))
        for number, (row, drafts, (path, tokens)) in enumerate(zip(rows, tree.drafted, accepted, strict=True)):
            row.record(output.logits[number], path, tokens)
            emitted = row.append(path, tokens)
            # Tokens after a stop are neither emitted nor counted as accepted.
            depth = tree.max_depth if row.drafts else 0
            row.stats.record_step(drafts, depth, min(len(path) - 1, emitted), emitted)
        if drafter is not None:
            if not early:
                drafter.observe(tree, verdict, output)
            drafter.watch(tree, verdict)
        self._token = verdict.bonus
        paths = [path for path, _ in accepted]
        if any(row.drafts for row in rows):
            times = StepTimes(proposing, verify_seconds, clock() - began, draft.tree.levels)
            policy.observe(draft.plan, tree, paths, times)
        wall = clock() - start
        for row in rows:
            row.stats.draft_seconds += draft_seconds
            row.stats.verify_seconds += verify_seconds
            row.stats.commit_seconds += wall - draft_seconds - verify_seconds

    @property
    def _remaining(self) -> int:
        """Draft tokens that the longest unfinished row can still accept."""
        return max(row.remaining for row in self.running) - 1

    def _propose(self, policy: DraftPolicy, token: Tensor) -> Draft:
        """Draft after the given tokens, (rows,); root-only trees if the drafter is not used in this step."""
        rows, drafter, plan = self.running, self._drafter, StepPlan(0)
        if drafter is not None and any(row.drafts for row in rows) and not drafter.rests:
            plan = policy.plan(len(rows), self._remaining)
        tree = drafter.propose(token, plan) if drafter is not None and plan.nodes else TokenTree.root(token)
        return Draft(rows, policy, plan, tree)

    def _fitted(self, draft: Draft) -> TokenTree:
        """Trees to verify: apply grammars, prune, and drop drafts of rows without speculation."""
        rows, drafter, root = self.running, self._drafter, TokenTree.root(self._token)
        plain = [number for number, row in enumerate(rows) if not row.drafts]
        if drafter is None or len(plain) == len(rows):
            return root
        tree = constrain(rows, draft.tree, draft.plan, drafter)
        tree = draft.policy.prune(draft.plan, tree.without(plain) if plain and tree.nodes > 1 else tree)
        # Protect the target from a faulty drafter: clamp ids to the vocabulary and restore the root.
        if tree.nodes == 1:
            tree = root
        else:
            tree.tokens = torch.cat([root.tokens, tree.tokens[:, 1:].clamp(0, self._vocab - 1)], dim=1)
        for number, row in enumerate(rows):
            if row.drafts:
                row.stats.drafter_error = row.stats.drafter_error or drafter.failure(number)
        return tree

    def _prepare(self) -> DraftPolicy:
        """Pass prefilled sequences to the drafter and return the step's policy."""
        assert self.key is not None
        policy = self.key.speculation.policy(self.key.num_draft_tokens)
        if new := sum(len(sequences) for _, _, sequences in self._prefilled):
            policy.begin(new / len(self.running))
        for prompt, output, sequences in self._prefilled:
            if self._drafter is not None:
                self._drafter.begin(prompt, output, [sequence.history for sequence in sequences])
        self._prefilled = []
        return policy

    def _prefill(self) -> bool:
        """Prefill waiting prompts while rows are free, at most ``chunk`` tokens if others decode.

        Returns whether the prefill of any prompt is complete.
        """
        if not len(self.scheduler) and self._prefilling is None:
            return False
        busy, tokens, complete = bool(self.running), 0, False
        while not busy or tokens < self.chunk:
            batch = self._prefilling or self._schedule(self.chunk - tokens if busy else _IDLE_CHUNKS * self.chunk)
            if batch is None or (busy and tokens and tokens + batch.size > self.chunk):
                break  # delay decode steps by at most one chunk
            self.touched |= dict.fromkeys(batch.sequences)  # also batches scheduled in an earlier step
            if batch.done:
                self._prefilling = None
                continue
            started, output = clock(), None
            try:
                if batch.passes is None:
                    max_new_tokens = [sequence.remaining for sequence in batch.sequences]
                    settings = max_new_tokens, self._reads, self.chunk if busy else None
                    if self.prefixes is not None:
                        batch.passes = self.prefixes.prefill(batch.prompt, *settings)
                    else:
                        batch.passes = self.target.prefill([batch.prompt], *settings)
                output = next(batch.passes)
            except Exception as error:
                self._prefilling = None
                if batch.parts:  # a failure of one prompt must not end the others
                    with self._lock:
                        self.scheduler.unstack(batch)
                    continue
                for sequence in batch.sequences:
                    sequence.error = error
                continue
            tokens += min(batch.size, self.chunk)
            batch.seconds += clock() - started
            if output is not None:
                self._prefilling, complete = None, True
                self._start(batch, output)
        return complete

    def _schedule(self, tokens: int) -> PromptBatch | None:
        """Pop the next prompts to prefill; stacked prompts have at most ``tokens`` tokens."""
        if self.running and self.key and self.key.speculation.wanted:
            return None  # another engine waits for the drafter
        with self._lock:
            batch = self._prefilling = self.scheduler.next(len(self.running), self.key, tokens)
        if batch is not None:
            self._hold(batch.key)
        return batch

    def _start(self, batch: PromptBatch, output: TargetOutput) -> None:
        """Emit the first token of each prefilled sequence and add them to the batch."""
        sequences = batch.sequences
        if self.prefixes is not None:
            self.prefixes.start(batch.prompt.singles, output)
        root = TokenTree.root(torch.zeros(len(sequences), dtype=torch.long, device=output.logits.device))
        self._vocab = output.logits.shape[-1]
        first = BatchSampler().choose(sequences, root, output.logits)[:, 0]
        self._token = torch.cat([self._token, first]) if self.running else first
        self.running = [*self.running, *sequences]
        self._prefilled.append((batch.prompt, output, sequences))
        now = clock()
        for row, (sequence, token) in enumerate(zip(sequences, first.tolist(), strict=True)):
            sequence.record(output.logits[row], [0], [token])
            sequence.stats.num_cached_tokens = output.cached_tokens
            sequence.stats.num_generated_tokens = sequence.append([0], [token])
            sequence.stats.prefill_seconds = batch.seconds
            sequence.stats.time_to_first_token = sequence.stats.wall_seconds = now - sequence.added

    def remove_finished(self) -> None:
        """Remove finished sequences and requeue rejected sequences; the last rows move into the gaps."""
        kept = [row for row, sequence in enumerate(self.running) if not sequence.ended]
        if len(kept) == len(self.running):
            return
        if kept and self._prefilled:
            self._prepare()  # target and drafter must have the same rows
        self._prefilled = []
        if self.prefixes is not None:
            ended = [row for row, sequence in enumerate(self.running) if sequence.ended]
            self.prefixes.retain(ended, [self.running[row].history for row in ended])
        if rejected := [sequence for sequence in self.running if sequence.rejected and not sequence.done]:
            assert self.key is not None
            with self._lock:
                self.scheduler.add_rejected(rejected, self.key)
        order = [row for row in kept if row < len(kept)]
        movers = iter(kept[len(order) :])
        present = set(order)
        order = [row if row in present else next(movers) for row in range(len(kept))]
        self.running = [self.running[row] for row in order]
        self._token = self._token[row_index(order, self._token.device)]
        self._keep(order)

    def abort(self, error: Exception) -> None:
        """Fail all sequences of a broken step and reset target and drafter."""
        for sequence in [*self.running, *(self._prefilling.sequences if self._prefilling else [])]:
            self.touched[sequence] = None
            if not sequence.done:
                sequence.error = error
        self.running, self._prefilled, self._prefilling, self._ahead = [], [], None, None
        self._token = self._token[:0]
        self._keep([])

    def _keep(self, rows: list[int]) -> None:
        """Keep these rows, in this order, in target and drafter."""
        self.target.keep(rows)
        if self.prefixes is not None:
            self.prefixes.keep(rows)
        if self._drafter is not None:
            self._drafter.select(rows)

    def _resumes(self, prompt: Prompt, earlier: list[Prompt]) -> bool:
        """Whether a prompt, or the first of the earlier prompts, has a cached prefix and needs its own prefill."""
        prefixes = self.prefixes
        return prefixes is not None and (prefixes.resumes(prompt, earlier) or prefixes.resumes(earlier[0], []))
