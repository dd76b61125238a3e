"""Interleaved timing of decoding methods on the same prompts, and of plain calls; peak memory.

All speed results are measured here: every round runs all methods in one process, in rotating order.
"""

from __future__ import annotations

import contextlib
import copy
import re
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter as clock
from typing import Any, TypeVar

import torch

from mmspec.core.drafter import Drafter
from mmspec.engine.engine import MAX_NUM_SEQS
from mmspec.engine.policy import DraftPolicy
from mmspec.engine.stats import Stats
from mmspec.eval.harness.drafters import ProfiledDrafter, tree_sizes
from mmspec.eval.harness.peers import Peer
from mmspec.ops import cpu
from mmspec.pipeline import Pipeline
from mmspec.targets.transformers_target import TransformersTarget

T = TypeVar("T")
TRANSFORMERS, PLAIN = "transformers generate", "mmspec, no drafter"

PHASES = ("prefill", "draft", "verify", "commit")
"""Timed phases of a request; the rest is preprocessing, stopping rules and detokenisation."""

UNFILTERED: dict[str, Any] = {"top_p": 1.0, "top_k": 0}
"""Sampling keywords that keep all tokens, whatever a model's generation config says."""


def wait_for_huge_pages() -> None:
    """Wait until loaded weights are in huge pages: until then, the kernel thread takes a fifth of a processor."""
    for thread in threading.enumerate():
        if thread.name == cpu.MOVER:
            thread.join()


@dataclass(frozen=True)
class DecodingOptions:
    """Decoding options of a comparison, named as for ``Pipeline.generate``."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    top_p: float = UNFILTERED["top_p"]
    top_k: int = UNFILTERED["top_k"]


@dataclass(frozen=True)
class TimedBatch:
    """Answers to one batch of requests, with times.

    Attributes:
        answers: new tokens of each row.
        stats: statistics of each row. For transformers, acceptance lengths only; None for its batches and for other
            engines.
        seconds: ``total``; ``decoding`` (after the first token); ``PHASES`` where known; ``tree`` and ``pass``, the
            mean times to draft one tree and to verify it.
        memory: peak memory in bytes, see ``mmspec.eval.harness.timing``; None for other engines.
    """

    answers: list[list[int]]
    stats: list[Stats]
    seconds: dict[str, float]
    memory: int | None = None

    @property
    def request_seconds(self) -> list[dict[str, float]]:
        """Times of each row: ``total`` (from the start of the batch to its last token), ``decoding`` (after its first).

        Rows without individual times (transformers, other engines) get the batch's times.
        """
        last = max((stats.wall_seconds for stats in self.stats), default=0.0)
        if not last:
            return [{name: self.seconds[name] for name in ("total", "decoding")} for _ in self.answers]
        before = self.seconds["total"] - last
        return [
            {"total": before + row.wall_seconds, "decoding": row.wall_seconds - row.time_to_first_token}
            for row in self.stats
        ]

    @property
    def mean_acceptance_length(self) -> float:
        """Mean acceptance length of the first row."""
        return self.stats[0].mean_acceptance_length if self.stats else 1.0


@dataclass
class Method:
    """A decoding method and its measurements.

    Attributes:
        name: name in tables and results.
        drafter, nodes: the drafter and its draft tokens per step; None adapts their number.
        target: target for verification; None is the pipeline's target.
        max_num_seqs: batch size, unless another pipeline over this target has a larger batch size.
        generate_options: options of transformers' ``generate``, which then decodes; None decodes with our engine.
        peer: another engine that decodes instead.
        policy: drafting policy with its learned state.
        lossy: as for ``SamplingParams``.
        seconds: by prompt, medians over the rounds, with the keys of ``TimedBatch.seconds``.
        lengths: by prompt, mean acceptance length.
        answers: by prompt, new tokens.
        tokens: by prompt, number of new tokens.
        equal: number of prompts whose answer equals the reference method's.
    """

    name: str
    drafter: Drafter | None = None
    nodes: int | None = 0
    target: TransformersTarget | None = None
    max_num_seqs: int = MAX_NUM_SEQS
    generate_options: dict[str, Any] | None = None
    peer: Peer | None = None
    policy: DraftPolicy | None = None
    lossy: float = 0.0
    seconds: list[dict[str, float]] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    equal: int = 0

    def __post_init__(self) -> None:
        if self.name == TRANSFORMERS and self.generate_options is None:
            self.generate_options = {}

    def fork(self, target: TransformersTarget) -> Method:
        """An unmeasured copy with its own copy of the learned state of drafter and policy."""
        drafter, policy = self.drafter and self.drafter.lend(target), copy.deepcopy(self.policy)
        own = replace(self, drafter=drafter, policy=policy)
        own.clear()
        return own

    def clear(self) -> None:
        """Drop the measurements; drafter and policy keep their learned state."""
        self.seconds, self.lengths, self.answers, self.tokens, self.equal = [], [], [], [], 0

    def column(self, name: str) -> list[float]:
        """One of the times, by prompt."""
        return [seconds[name] for seconds in self.seconds]


def drafter_methods(drafters: Mapping[str, Drafter], nodes: str, target: TransformersTarget) -> list[Method]:
    """For each drafter, a method per fixed tree size of a ``--nodes`` option and an adaptive one."""
    methods = []
    for label, drafter in drafters.items():
        for size in dict.fromkeys(tree_sizes(drafter, nodes).values()):
            methods.append(Method(f"{label}, {size} nodes", drafter.fork(target), size))
        methods.append(Method(f"{label}, adaptive", drafter, None))
    return methods


def time_ratios(slow: Method, fast: Method, name: str) -> list[float]:
    """Speedup of ``fast`` over ``slow`` in seconds per token, by prompt.

    Args:
        name: ``total`` for all new tokens, or ``decoding`` for tokens after the first. Prompts whose answers have no
            such tokens are left out.
    """
    first = 0 if name == "total" else 1
    spent = [zip(method.column(name), (n - first for n in method.tokens), strict=True) for method in (slow, fast)]
    return [a * n / (b * m) for (a, m), (b, n) in zip(*spent, strict=True) if min(m, n) > 0]


def warm_up_methods(
    pipe: Pipeline,
    requests: Sequence[dict[str, Any]],
    methods: Sequence[Method],
    max_new_tokens: int,
    temperature: float = 0.0,
) -> None:
    """Decode other prompts once, unmeasured, to train drafters and policies and to compile everything."""
    compare_methods(pipe, requests, methods, 1, max_new_tokens, temperature)
    for method in methods:
        method.clear()


def compare_methods(
    pipe: Pipeline,
    requests: Sequence[dict[str, Any]],
    methods: Sequence[Method],
    rounds: int,
    max_new_tokens: int,
    temperature: float = 0.0,
) -> None:
    """Decode every request with every method, interleaved, and append medians over the rounds to ``methods``.

    Answers are compared with the first method's; sampled answers with our engine's first method, since transformers
    draws other random numbers from the same seed.
    """
    options = DecodingOptions(max_new_tokens, temperature)
    reference = methods[0] if temperature == 0 else next(m for m in methods if m.generate_options is None)
    for request in requests:
        batches = run_interleaved(pipe, [request], methods, rounds, options)
        expected = batches[reference.name][0].answers[0]
        for method in methods:
            first = batches[method.name][0]
            method.equal += first.answers[0] == expected
            method.lengths.append(first.mean_acceptance_length)
            method.answers.append(first.answers[0])
            method.tokens.append(len(first.answers[0]))
            each = [batch.seconds for batch in batches[method.name]]
            method.seconds.append({name: statistics.median(s[name] for s in each) for name in each[0]})


def run_interleaved(
    pipe: Pipeline, requests: Sequence[dict[str, Any]], methods: Sequence[Method], rounds: int, options: DecodingOptions
) -> dict[str, list[TimedBatch]]:
    """Decode a batch of requests with every method, interleaved, for several rounds.

    Drafters and policies start every round in the same state, and keep the state learned in the last round.

    Returns:
        The results of each method by its name, one per round.
    """
    batches: dict[str, list[TimedBatch]] = {method.name: [] for method in methods}
    for turn in range(rounds):
        for method in rotated(methods, turn):
            batches[method.name].append(_decode(pipe, method, requests, options, turn == rounds - 1))
    return batches


def _decode(
    pipe: Pipeline, method: Method, requests: Sequence[dict[str, Any]], options: DecodingOptions, learn: bool
) -> TimedBatch:
    reset_peak_memory(pipe.target.device)
    if method.generate_options is not None:
        return _generate(pipe, method.generate_options, requests, options)
    if method.peer is not None:
        return _complete(pipe, method.peer, requests, options)
    target = pipe.target if method.target is None else method.target
    drafter = method.drafter if learn or method.drafter is None else method.drafter.lend(target)
    profiled = None if drafter is None else ProfiledDrafter(drafter)
    policy = method.policy if learn else copy.deepcopy(method.policy)
    own = Pipeline(target, pipe.processor, profiled, max_num_seqs=method.max_num_seqs, policy=policy)
    start = clock()
    results = own.generate_batch(requests, **vars(options), nodes=method.nodes, lossy=method.lossy)
    total = clock() - start
    if learn:
        method.policy = own.policy
    longest, decoding = shared_times([result.stats for result in results])
    seconds = {
        "total": total,
        "decoding": decoding,
        **{phase: getattr(longest, f"{phase}_seconds") for phase in PHASES},
        "tree": 0.0 if profiled is None else profiled.seconds / max(profiled.proposals, 1),
        "pass": longest.verify_seconds / max(longest.num_spec_steps, 1),
    }
    answers = [result.token_ids for result in results]
    return TimedBatch(answers, [result.stats for result in results], seconds, peak_memory(target.device))


def shared_times(rows: Sequence[Stats]) -> tuple[Stats, float]:
    """Statistics of the row with most steps, which cover the batch, and the seconds after the first tokens."""
    longest = max(rows, key=lambda stats: stats.num_spec_steps)
    return longest, max(stats.wall_seconds for stats in rows) - longest.time_to_first_token


def _generate(
    pipe: Pipeline, generate_options: dict[str, Any], requests: Sequence[dict[str, Any]], options: DecodingOptions
) -> TimedBatch:
    """Decode a batch by transformers' ``generate``."""
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        torch.manual_seed(options.seed)
        sampling = {"do_sample": True, "temperature": options.temperature, **UNFILTERED, "top_p": options.top_p}
    start = clock()
    prompt = pipe.encode(requests)
    ids = prompt.input_ids
    mask = torch.ones_like(ids) if prompt.attention_mask is None else prompt.attention_mask
    streamer = _TimingStreamer()
    inputs = {"input_ids": ids, "attention_mask": mask, **prompt.inputs, **sampling, **generate_options}
    out = pipe.model.generate(**inputs, max_new_tokens=options.max_new_tokens, streamer=streamer)
    end = clock()
    answers = [_without_padding(row, pipe.target.eos_token_ids) for row in out[:, ids.shape[1] :].tolist()]
    stats = [streamer.stats] if len(answers) == 1 else []
    seconds = {"total": end - start, "decoding": end - streamer.first_token_at}
    return TimedBatch(answers, stats, seconds, peak_memory(ids.device))


def _complete(pipe: Pipeline, peer: Peer, requests: Sequence[dict[str, Any]], options: DecodingOptions) -> TimedBatch:
    """Decode one request greedily by another engine, from the same prompt tokens."""
    start = clock()
    (prompt,) = pipe.encode(requests).input_ids.tolist()
    answer = peer.complete(prompt, options.max_new_tokens)
    return TimedBatch([answer.tokens], [], {"total": clock() - start, "decoding": answer.seconds})


def _without_padding(tokens: list[int], eos: Sequence[int]) -> list[int]:
    """A row up to its first end-of-sequence token, included."""
    return next((tokens[: index + 1] for index, token in enumerate(tokens) if token in eos), tokens)


class _TimingStreamer:
    """A transformers streamer that records when the first new tokens came and how many tokens each step gave."""

    def __init__(self) -> None:
        self.first_token_at = 0.0
        self.stats = Stats()
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:  # the first call is for the prompt
            self.first_token_at = clock()
        elif self._calls > 2:
            self.stats.record_step(0, 0, value.numel() - 1, value.numel())

    def end(self) -> None:
        """Part of the streamer interface."""


def interleaved(calls: Mapping[T, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[T, list[float]]:
    """Run calls interleaved for several rounds; returns each call's results by round.

    Args:
        calls: functions that return their seconds.
        warm_up: number of initial unmeasured rounds.
    """
    seconds: dict[T, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + warm_up):
        for name, call in rotated(list(calls.items()), turn):
            spent = call()
            if turn >= warm_up:
                seconds[name].append(spent)
    return seconds


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Rotate the items, starting from a different item in each turn, to vary their order."""
    shift = turn % max(len(items), 1)
    return [*items[shift:], *items[:shift]]


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak; on a CPU this needs Linux and write access to /proc."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak_memory_of("self")


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes since ``reset_peak_memory``; None on a CPU without Linux's /proc.

    On a GPU it counts torch's allocations; on a CPU the resident set of the process, weights and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory_of("self")


def reset_peak_memory_of(process: int | str) -> None:
    """Start a new peak of a process's resident set, by its id; Linux only."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/clear_refs").write_text("5")


def peak_memory_of(process: int | str) -> int | None:
    """Peak resident set of a process in bytes; None without Linux's /proc."""
    return _status(process, "VmHWM")


def resident_memory_of(process: int | str) -> int | None:
    """Resident set of a process in bytes; None without Linux's /proc."""
    return _status(process, "VmRSS")


def _status(process: int | str, name: str) -> int | None:
    try:
        status = Path(f"/proc/{process}/status").read_text()
        match = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(match.group(1)) if match else None
