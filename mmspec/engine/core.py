"""Single-threaded engine core: request queue, prefill, and decode steps (draft, verify, commit).

A step drafts a tree per sequence, verifies all trees in one forward pass of the target and emits the accepted tokens.
A sequence's tokens do not depend on the other sequences of the batch.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from threading import Condition
from time import perf_counter as clock

import torch
from torch import Tensor

from mmspec.cache.prefix_cache import PrefixCache, PrefixReuse
from mmspec.cache.rows import row_index
from mmspec.core.drafter import Guard
from mmspec.core.plan import StepPlan, StepTimes
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict, accept_path
from mmspec.engine.constrain import constrain
from mmspec.engine.policy import DraftPolicy
from mmspec.engine.sequence import BatchKey, Sequence
from mmspec.engine.stats import StepTimer, record_tree
from mmspec.sampling.batch_sampler import BatchSampler

_IDLE_CHUNKS = 4  # prefill chunks per step while no sequence decodes


class Scheduler:
    """First-come-first-served queue that stacks compatible prompts at its head.

    Args:
        resumes: whether a prompt has a cached prefix and therefore needs a prefill of its own.

    Attributes:
        waiting: the queue.
    """

    def __init__(self, max_num_seqs: int, resumes: Callable[[Prompt, list[Prompt]], bool]) -> None:
        self.max_num_seqs = max_num_seqs
        self._resumes = resumes
        self.waiting: deque[Sequence] = deque()
        self._alone: set[Sequence] = set()  # not to be stacked again, as a stacked prefill failed

    def allow(self, max_num_seqs: int) -> None:
        """Let at least this many sequences run."""
        self.max_num_seqs = max(self.max_num_seqs, max_num_seqs)

    def retry_alone(self, sequences: abc.Sequence[Sequence]) -> None:
        """Put stacked sequences back at the head of the queue, to be prefilled one by one."""
        self._alone.update(sequences)
        self.waiting.extendleft(reversed(sequences))

    def clear(self) -> None:
        self.waiting.clear()
        self._alone.clear()

    def next(self, running: int, key: BatchKey | None, tokens: int) -> list[Sequence]:
        """Remove the next sequences to prefill together; none if none can join the running sequences.

        Args:
            key: batch key of the running sequences.
            tokens: maximum tokens of stacked prompts, padding included.
        """
        chosen: list[Sequence] = []
        longest = 0
        while self.waiting:
            first = self.waiting[0]
            rows = self._head()
            if not all(one.done for one in rows):
                longest = max(longest, first.prompt.input_ids.shape[1])
                new = len(chosen) + len(rows)
                if (running or chosen) and (first.key != key or running + new > self.max_num_seqs):
                    break
                if chosen and (longest * new > tokens or not self._stacks(chosen, first)):
                    break
                key = first.key
                chosen += rows
            for _ in rows:
                self.waiting.popleft()
        self._alone.difference_update(chosen)
        return chosen

    def _head(self) -> list[Sequence]:
        """The first sequence, with the rows that must be prefilled with it."""
        first = self.waiting[0]
        if first.prompt.batch is None:
            return [first]
        return list(takewhile(lambda one: one.prompt.batch is first.prompt.batch, self.waiting))

    def _stacks(self, chosen: list[Sequence], new: Sequence) -> bool:
        """Whether a sequence may be prefilled together with others."""
        prompts, key = [one.prompt for one in chosen], new.prompt.stack_key
        if key is None or key != prompts[0].stack_key or not self._alone.isdisjoint((chosen[0], new)):
            return False
        return not self._resumes(new.prompt, prompts)


@dataclass
class Prefill:
    """Sequences being prefilled.

    Attributes:
        passes: remaining chunks; None before the first.
        seconds: prefill time so far.
    """

    sequences: list[Sequence]
    passes: Iterator[TargetOutput | None] | None = None
    seconds: float = 0.0

    @property
    def size(self) -> int:
        """Number of prompt tokens, padding included."""
        return len(self.sequences) * max(sequence.prompt.input_ids.shape[1] for sequence in self.sequences)


@dataclass(frozen=True)
class Draft:
    """A drafter's proposal for one step. ``seconds`` returns the earlier draft time, after synchronising."""

    plan: StepPlan
    tree: TokenTree
    seconds: Callable[[], float] = float


class EngineCore:
    """Sequences of one target and their decode steps. Only one thread at a time may run steps.

    Args:
        chunk: prompt tokens prefilled per step while other sequences decode.
        lock: held by other threads that add to the scheduler.

    Attributes:
        scheduler: queue of waiting sequences.
        running: decoding sequences; their indices are the rows of target and drafter.
        key: batch key of the running sequences.
        prefixes: reuses states of earlier prompts; None computes every prompt in full.
    """

    def __init__(self, target: Target, max_num_seqs: int, chunk: int, lock: Condition) -> None:
        self.target, self.chunk = target, chunk
        self.scheduler = Scheduler(max_num_seqs, self._resumes)
        self.running: list[Sequence] = []
        self.key: BatchKey | None = None
        self.prefixes: PrefixReuse | None = None
        self._reads: tuple[Feature, ...] = ()  # hidden states that the drafter reads
        self._lock = lock
        self._prefilling: Prefill | None = None
        self._prefilled: list[tuple[Prefill, TargetOutput]] = []  # not yet passed to the drafter
        self._token = torch.empty(0, dtype=torch.long)  # (rows,) last emitted tokens
        self._ahead: Draft | None = None  # pre-launched for the next step; dropped if the batch changes
        self._changed: dict[Sequence, None] = {}  # sequences that may have changed in this step
        self._sampler = BatchSampler()
        self._vocab = 0  # the target's vocabulary size, known after a prefill

    @property
    def queued(self) -> list[Sequence]:
        """Sequences that are waiting for prefill or being prefilled."""
        return [*self.scheduler.waiting, *(self._prefilling.sequences if self._prefilling else ())]

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that are running or queued."""
        return [*self.running, *self.queued]

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.running) or not all(sequence.done for sequence in self.queued)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller holds the lock."""
        self.scheduler.waiting.append(sequence)

    def use_prefixes(self, prefixes: PrefixCache | None) -> None:
        """Set the prefix cache while no sequence runs or waits."""
        self.prefixes = None if prefixes is None else PrefixReuse(self.target, prefixes)

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """Cancel sequences before the next step."""
        for sequence in sequences:
            sequence.cancel()

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

    def step(self) -> int:
        """Prefill waiting prompts while rows are free, run one decode step, and call the sinks.

        Returns:
            Number of tokens in the pass of the decode step; 0 without one, or after a prefill.
        """
        start, running, tokens = clock(), list(self.running), 0
        self._changed = dict.fromkeys(running)
        self.remove_finished()
        self._prefill()
        self.remove_finished()
        prefilled = len(self._changed) > len(running)
        if running and self.running:  # otherwise, clients get the first token before the first decode step
            tokens = self._decode()
            self.remove_finished()
        for sequence in running:
            sequence.stats.wall_seconds += clock() - start
        self._emit()
        return 0 if prefilled else tokens

    def _emit(self) -> None:
        for sequence in self._changed:
            sequence.emit()
        self._changed = {}

    def _decode(self) -> int:
        """One decode step: draft, verify, commit, append. Returns the number of tokens in the pass.

        The commit, and the next draft if the drafter allows it, are launched before the host reads the accepted tokens.
        """
        timer, policy = StepTimer(self._token.device), self._prepare()
        timer.mark("prepared")
        ahead, self._ahead = self._ahead, None
        draft = ahead if ahead and self._remaining > 0 else self._propose(policy, self._token)
        tree = self.fit(policy, draft)
        timer.mark("drafted")
        output = self.target.verify(tree, self._reads)
        tokens, failures = self._sampler.choose(self.running, tree, output.logits)
        verdict = accept_path(tree, tokens)
        timer.mark("verified")
        self.target.commit(verdict)
        if self.prefixes is not None:
            self.prefixes.commit(verdict, output.features)
        self._draft_ahead(policy, tree, verdict, output, timer)
        self._append(tree, verdict, output, failures)
        self._token = verdict.bonus
        self._record(policy, draft, tree, verdict, timer)
        return tree.tokens.numel()

    def _append(
        self, tree: TokenTree, verdict: Verdict, output: TargetOutput, failures: list[dict[int, Exception]]
    ) -> None:
        """Append the accepted tokens to the sequences, then pass the step to the drafter."""
        for number, (row, (path, tokens)) in enumerate(zip(self.running, verdict.host, strict=True)):  # synchronises
            if row.traced:
                row.trees.append(record_tree(tree, number, verdict, output, row.request.token_bytes))
            count = row.accept(output.logits[number], path, tokens, failures[number])
            # Tokens after a stop are neither emitted nor counted as accepted.
            depth = tree.max_depth if row.drafts else 0
            row.stats.record_step(tree.drafted[number], depth, min(len(path) - 1, count), count)
        if self._drafter is not None:
            if self._ahead is None:
                self._drafter.observe(tree, verdict, output)
            self._drafter.watch(tree, verdict)

    def _record(self, policy: DraftPolicy, draft: Draft, tree: TokenTree, verdict: Verdict, timer: StepTimer) -> None:
        """Pass the times of the step to the policy and the statistics."""
        earlier, verifying = draft.seconds(), timer.seconds("drafted", "verified")
        if any(row.drafts for row in self.running):
            drafts = draft.plan.nodes or tree.nodes > 1
            drafting = earlier + timer.seconds("prepared", "drafted") if drafts else 0.0
            times = StepTimes(drafting, verifying, timer.since("verified"), draft.tree.levels)
            policy.observe(draft.plan, tree, [path for path, _ in verdict.host], times)
        drafting, wall = earlier + timer.seconds("begin", "drafted"), timer.since("begin")
        for row in self.running:
            row.stats.record_times(drafting, verifying, wall)

    @property
    def _remaining(self) -> int:
        """Draft tokens that the longest unfinished row can still accept."""
        return max(row.remaining for row in self.running) - 1

    def _draft_ahead(
        self, policy: DraftPolicy, tree: TokenTree, verdict: Verdict, output: TargetOutput, timer: StepTimer
    ) -> None:
        """Launch the next step's draft before the host reads the verdict, if the drafter allows it."""
        drafter = self._drafter
        # Trace records read the tree, whose memory the next draft reuses.
        if drafter is None or not drafter.drafts_ahead or any(row.traced for row in self.running):
            return
        drafter.observe(tree, verdict, output)
        timer.mark("observed")
        draft = self._propose(policy, verdict.bonus)
        timer.mark("ahead")
        self._ahead = replace(draft, seconds=partial(timer.seconds, "observed", "ahead"))

    def _propose(self, policy: DraftPolicy, token: Tensor) -> Draft:
        """Draft after the given tokens, (rows,); root-only trees if the drafter is not used in this step."""
        rows, drafter, plan = self.running, self._drafter, StepPlan(0)
        if drafter is not None and any(row.drafts for row in rows) and not drafter.rests:
            plan = policy.plan(len(rows), self._remaining)
        tree = drafter.propose(token, plan) if drafter is not None and plan.nodes else TokenTree.root(token)
        return Draft(plan, tree)

    def fit(self, policy: DraftPolicy, draft: Draft) -> TokenTree:
        """Trees to verify: apply grammars, prune, and drop drafts of rows without speculation."""
        rows, drafter = self.running, self._drafter
        plain = [number for number, row in enumerate(rows) if not row.drafts]
        if drafter is None or len(plain) == len(rows):
            return draft.tree if draft.tree.nodes == 1 else TokenTree.root(self._token)
        tree = constrain(rows, draft.tree, draft.plan, drafter)
        tree = policy.prune(draft.plan, tree.without(plain) if plain and tree.nodes > 1 else tree)
        # Protect the target from a faulty drafter: clamp ids to the vocabulary and restore the root.
        if tree.nodes > 1:
            tree.tokens = torch.cat([self._token[:, None], tree.tokens[:, 1:].clamp(0, self._vocab - 1)], dim=1)
        elif draft.plan.nodes or tree is not draft.tree:
            tree = TokenTree.root(self._token)
        for number, row in enumerate(rows):
            if row.drafts:
                row.stats.drafter_error = row.stats.drafter_error or drafter.failure(number)
        return tree

    def _prepare(self) -> DraftPolicy:
        """Pass prefilled sequences to the drafter and return the step's policy."""
        assert self.key is not None
        policy = self.key.speculation.policy(self.key.num_draft_tokens)
        if new := sum(len(prefill.sequences) for prefill, _ in self._prefilled):
            policy.begin(new / len(self.running))
        for prefill, output in self._prefilled:
            if self._drafter is not None:
                prompt = output.prompt or Prompt.stack([sequence.prompt for sequence in prefill.sequences])
                self._drafter.begin(prompt, output, [sequence.history for sequence in prefill.sequences])
        self._prefilled = []
        return policy

    def _prefill(self) -> None:
        """Prefill waiting prompts while rows are free, at most ``chunk`` tokens if others decode."""
        busy, tokens = bool(self.running), 0
        while not busy or tokens < self.chunk:
            batch = self._prefilling or self._schedule(self.chunk - tokens if busy else _IDLE_CHUNKS * self.chunk)
            if batch is None or (busy and tokens and tokens + batch.size > self.chunk):
                break  # delay decode steps by at most one chunk
            self._changed |= dict.fromkeys(batch.sequences)  # also batches scheduled in an earlier step
            if all(sequence.done for sequence in batch.sequences):
                self._prefilling = None
                continue
            started = clock()
            try:
                if batch.passes is None:
                    new = [sequence.remaining for sequence in batch.sequences]
                    prompts, chunk = [sequence.prompt for sequence in batch.sequences], self.chunk if busy else None
                    batch.passes = (self.prefixes or self.target).prefill(prompts, new, self._reads, chunk)
                output = next(batch.passes)
            except Exception as error:
                self._prefilling = None
                if len(batch.sequences) > 1 and batch.sequences[0].prompt.batch is None:
                    with self._lock:  # a failure of one prompt must not end the others
                        self.scheduler.retry_alone(batch.sequences)
                    continue
                for sequence in batch.sequences:
                    sequence.fail(error)
                continue
            tokens += min(batch.size, self.chunk)
            batch.seconds += clock() - started
            if output is not None:
                self._prefilling = None
                self._join(batch, output)

    def _schedule(self, tokens: int) -> Prefill | None:
        """Pop the next prompts to prefill; stacked prompts have at most ``tokens`` tokens."""
        if self.running and self.key and self.key.speculation.wanted:
            return None  # another engine waits for the drafter
        with self._lock:
            sequences = self.scheduler.next(len(self.running), self.key, tokens)
            if not sequences:
                return None
            self._prefilling = Prefill(sequences)
        self._hold(sequences[0].key)
        return self._prefilling

    def _join(self, batch: Prefill, output: TargetOutput) -> None:
        """Append the first token of each prefilled sequence and add them to the batch."""
        sequences = batch.sequences
        if self.prefixes is not None:
            self.prefixes.start([sequence.prompt for sequence in sequences], output)
        root = TokenTree.root(torch.zeros(len(sequences), dtype=torch.long, device=output.logits.device))
        self._vocab = output.logits.shape[-1]
        tokens, failures = BatchSampler().choose(sequences, root, output.logits)
        first = tokens[:, 0]
        self._token = torch.cat([self._token, first]) if self.running else first
        self.running, self._ahead = [*self.running, *sequences], None
        self._prefilled.append((batch, output))
        now = clock()
        for row, (sequence, token) in enumerate(zip(sequences, first.tolist(), strict=True)):
            emitted = sequence.accept(output.logits[row], [0], [token], failures[row])
            sequence.stats.record_prefill(output.cached_tokens, emitted, batch.seconds, now - sequence.added)

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
        for sequence in self.running:
            if sequence.rejected and not sequence.done:
                sequence.restart()
                with self._lock:
                    self.scheduler.waiting.append(sequence)
        staying, movers = set(kept), (row for row in kept if row >= len(kept))
        order = [row if row in staying else next(movers) for row in range(len(kept))]
        self.running = [self.running[row] for row in order]
        self._token = self._token[row_index(order, self._token.device)]
        self._keep(order)

    def _keep(self, rows: list[int]) -> None:
        """Keep these rows of target and drafter, in this order."""
        self._ahead = None
        self.target.keep(rows)
        if self.prefixes is not None:
            self.prefixes.keep(rows)
        if self._drafter is not None:
            self._drafter.select(rows)

    def abort(self, error: Exception) -> None:
        """Fail all sequences of a broken step and reset target and drafter."""
        broken = [*self.running, *(self._prefilling.sequences if self._prefilling else [])]
        self._changed |= dict.fromkeys(broken)
        self.reset()
        for sequence in broken:
            sequence.fail(error)
        self._emit()

    def reset(self) -> None:
        """Drop the rows of all sequences."""
        self.running, self._prefilled, self._prefilling = [], [], None
        self._token = self._token[:0]
        self._keep([])

    def _resumes(self, prompt: Prompt, earlier: list[Prompt]) -> bool:
        """Whether a prompt, or the first of the earlier prompts, has a cached prefix and needs its own prefill."""
        prefixes = self.prefixes
        return prefixes is not None and (prefixes.resumes(prompt, earlier) or prefixes.resumes(earlier[0], []))
