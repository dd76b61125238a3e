"""Interleaved timing of decoding methods on the same prompts, of verify passes and of plain calls; peak memory.

All speed results are measured here: every round runs all methods in one process, in rotating order.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter as clock
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmspec.core.drafter import Drafter, Wrapper
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.engine.engine import MAX_NUM_SEQS
from mmspec.engine.policy import DraftPolicy
from mmspec.engine.stats import Stats
from mmspec.eval.harness.peers import Peer
from mmspec.ops import cpu, cpu_library
from mmspec.pipeline import Pipeline
from mmspec.quantisation.blocks import BlockLinear
from mmspec.targets.support import towers_of
from mmspec.targets.transformers_target import TransformersTarget

T = TypeVar("T")

PHASES = ("tower", "prefill", "draft", "verify", "commit")
"""Timed phases of a request: vision towers, the rest of the prefill, parts of steps; the remainder is preprocessing,
stopping rules and detokenisation."""

READ = "read"  # in place of a number of nodes: a loop that only reads the packed weights
_BEFORE = 4  # untimed passes of the same size before each timed pass
_COSTS = (1, 2, 4, 8, 16, 33)  # nodes

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
        stats: statistics of each row. For transformers, acceptance lengths only; empty for its batches and for other
            engines.
        seconds: ``total``; ``decoding`` (after the first token); ``PHASES`` where known; ``tree`` and ``pass``, the
            mean times to draft one tree and to verify it.
        memory: peak memory in bytes, see ``peak_memory``; None for other engines.
    """

    answers: list[list[int]]
    stats: list[Stats]
    seconds: dict[str, float]
    memory: int | None = None

    @property
    def request_seconds(self) -> list[dict[str, float]]:
        """Times of each row: ``total`` (from the start of the batch to its last token), ``decoding`` (after its first).
        Rows without individual times (transformers, other engines) get the batch's times."""
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
        return self.stats[0].mean_acceptance_length if self.stats else 1.0


def results_of(rounds: Sequence[TimedBatch]) -> dict[str, Any]:
    """The rounds of a batch as JSON values: ``answers`` and ``stats`` of the first, ``seconds`` and ``request_seconds``
    of each, and the peak of ``memory``."""
    return {
        "answers": rounds[0].answers,
        "stats": [dict(vars(stats)) for stats in rounds[0].stats],
        "seconds": [batch.seconds for batch in rounds],
        "request_seconds": [batch.request_seconds for batch in rounds],
        "memory": max((batch.memory for batch in rounds if batch.memory is not None), default=None),
    }


@dataclass
class Method:
    """A decoding method.

    Attributes:
        drafter, nodes: the drafter and its draft tokens per step; None adapts their number.
        target: target for verification; None is the pipeline's target.
        max_num_seqs: batch size, unless another pipeline over this target has a larger batch size.
        generate_options: options of transformers' ``generate``, which then decodes; None decodes with our engine.
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

    def fork(self, target: TransformersTarget) -> Method:
        """A copy with its own copy of the learned state of drafter and policy."""
        return replace(self, drafter=self.drafter and self.drafter.lend(target), policy=copy.deepcopy(self.policy))


class ProfiledDrafter(Wrapper):
    """A drafter wrapper that counts drafted trees (``proposals``) and times them (``seconds``), without ``begin``."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.proposals = 0
        self.seconds = 0.0

    @property
    def learns(self) -> bool:
        return self.drafter.learns

    @property
    def drafts_ahead(self) -> bool:
        return self.drafter.drafts_ahead

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        start = clock()
        try:
            return self.drafter.propose(token, plan)
        finally:
            self.seconds += clock() - start
            self.proposals += 1


def run_interleaved(
    pipe: Pipeline, requests: Sequence[dict[str, Any]], methods: Sequence[Method], rounds: int, options: DecodingOptions
) -> dict[str, list[TimedBatch]]:
    """Results of several rounds of a batch of requests by each method's name, interleaved. Drafters and policies start
    every round in the same state, and keep the state learned in the last round."""
    batches: dict[str, list[TimedBatch]] = {method.name: [] for method in methods}
    for turn in range(rounds):
        for method in rotated(methods, turn):
            batches[method.name].append(decode(pipe, method, requests, options, turn == rounds - 1))
    return batches


def decode(
    pipe: Pipeline, method: Method, requests: Sequence[dict[str, Any]], options: DecodingOptions, learn: bool = True
) -> TimedBatch:
    """Decode a batch of requests; if ``learn``, drafter and policy of the method keep their new state."""
    reset_peak_memory(pipe.target.device)
    if method.generate_options is not None:
        return _generate(pipe, method.generate_options, requests, options)
    if method.peer is not None:
        start = clock()
        (prompt,) = pipe.encode(requests).input_ids.tolist()
        answer = method.peer.complete(prompt, options.max_new_tokens)
        seconds = {"total": clock() - start, "decoding": answer.seconds}
        tokens = answer.token_ids(pipe.processor.tokenizer, min(pipe.target.eos_token_ids, default=0))
        return TimedBatch([tokens], [], seconds)
    target = pipe.target if method.target is None else method.target
    method = method if learn else method.fork(target)
    profiled = None if method.drafter is None else ProfiledDrafter(method.drafter)
    own = Pipeline(target, pipe.processor, profiled, max_num_seqs=method.max_num_seqs, policy=method.policy)
    start, towers = clock(), list[float]()
    with contextlib.ExitStack() as hooks:
        for tower in towers_of(target.model):  # on a GPU, these are the times of launches
            hooks.enter_context(tower.register_forward_pre_hook(lambda *_: towers.append(-clock())))
            hooks.enter_context(tower.register_forward_hook(lambda *_: towers.append(clock())))
        results = own.generate_batch(requests, **vars(options), nodes=method.nodes, lossy=method.lossy)
    total = clock() - start
    method.policy = own.policy
    stats = [result.stats for result in results]
    longest = max(stats, key=lambda row: row.num_spec_steps)  # its steps cover the batch
    seconds = {
        "total": total,
        "decoding": max(row.wall_seconds for row in stats) - longest.time_to_first_token,
        "tower": sum(towers),
        "prefill": longest.prefill_seconds - sum(towers),
        **{phase: getattr(longest, f"{phase}_seconds") for phase in PHASES[2:]},
        "tree": 0.0 if profiled is None else profiled.seconds / max(profiled.proposals, 1),
        "pass": longest.verify_seconds / max(longest.num_spec_steps, 1),
    }
    return TimedBatch([result.token_ids for result in results], stats, seconds, peak_memory(target.device))


def _generate(
    pipe: Pipeline, generate_options: dict[str, Any], requests: Sequence[dict[str, Any]], options: DecodingOptions
) -> TimedBatch:
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
    answers = out[:, ids.shape[1] :].tolist()
    for row in answers:  # up to the first end-of-sequence token; then padding
        ends = [place for place, token in enumerate(row) if token in pipe.target.eos_token_ids]
        del row[ends[0] + 1 if ends else len(row) :]
    stats = [streamer.stats] if len(answers) == 1 else []
    seconds = {"total": end - start, "decoding": end - streamer.first_token_at}
    return TimedBatch(answers, stats, seconds, peak_memory(ids.device))


class _TimingStreamer:
    """A transformers streamer that records when the first new tokens came and how many tokens each step gave."""

    def __init__(self) -> None:
        self.first_token_at = 0.0
        self.stats = Stats()
        self._calls = 0

    def put(self, value: Tensor) -> None:
        self._calls += 1
        if self._calls == 2:  # the first call is for the prompt
            self.first_token_at = clock()
        elif self._calls > 2:
            self.stats.record_step(0, 0, value.numel() - 1, value.numel())

    def end(self) -> None:
        """Part of the streamer interface."""


def pass_seconds(target: TransformersTarget, depth: int, nodes: Sequence[int]) -> dict[Any, float]:
    """Seconds of a prefill, of a pass over each number of nodes after it, and of a read of the weights."""
    begun = clock()
    list(target.prefill([Prompt(torch.zeros(1, depth, dtype=torch.long, device=target.device))], [max(nodes)]))
    seconds: dict[Any, float] = {"prefill": clock() - begun}
    seconds |= {count: time_pass(target, count) for count in nodes}
    if (read := read_weights(target)) is not None:
        seconds[READ] = read
    target.keep([])
    return seconds


def time_pass(target: TransformersTarget, nodes: int) -> float:
    """Seconds of a verify pass over a chain of ``nodes`` nodes, including the host's read of the choices. As in
    decoding, other passes precede it, so that the caches hold the same part of the weights."""
    parents = torch.arange(-1, nodes - 1, device=target.device)[None]
    tree = TokenTree(torch.zeros_like(parents), parents)
    for _ in range(_BEFORE):
        target.verify(tree)
    begun = clock()
    target.verify(tree).logits.max(-1).indices.tolist()
    return clock() - begun


def pass_costs(target: TransformersTarget) -> dict[str, list[float]]:
    """Medians of three passes over chains: ``seconds`` by total number of ``tokens``."""
    spent = [pass_seconds(target, 8, _COSTS) for _ in range(3)]
    return {"tokens": [*_COSTS], "seconds": [median(one[count] for one in spent) for count in _COSTS]}


def read_weights(target: TransformersTarget) -> float | None:
    """Seconds of a read of the packed weights of a target's layers; None without packed weights."""
    layers = [layer for layer in target.model.modules() if isinstance(layer, BlockLinear)]
    blocks = [max(layer.buffers(), key=Tensor.numel) for layer in layers]
    begun = clock()
    for part in blocks:
        cpu_library.functions().read_bytes(part.data_ptr(), part.numel(), cpu.kernel_threads())
    return clock() - begun if blocks else None


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
    """Peak memory in bytes since ``reset_peak_memory``; None on a CPU without Linux's /proc. On a GPU it counts torch's
    allocations; on a CPU the resident set of the process, weights and libraries included."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory_of("self", "VmHWM")


def reset_peak_memory_of(process: int | str) -> None:
    """Start a new peak of a process's resident set, by its id; Linux only."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/clear_refs").write_text("5")


def memory_of(process: int | str, name: str) -> int | None:
    """Resident set (``VmRSS``) of a process in bytes, or its peak (``VmHWM``); None without Linux's /proc."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(match[1]) if match else None
