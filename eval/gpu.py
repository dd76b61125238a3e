"""GPU benchmark: ``python -m mmspec.eval gpu --out FILE.json``, at most ten minutes.

Embedded models show whether tokens equal a CPU's. Everything else is timed on random weights in published shapes, with
drafters that run at their cost and drafts that are accepted at a set rate (``--acceptance``). Kernels are compared with
their torch references, and timed against their memory floor: the bytes that a kernel must read and write over the
bandwidth of a large copy. Kernels that wait for no memory are timed as parts of drafts and passes only.

Each part is a process of its own, the most important parts first: a part that fails or hangs costs that part only.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, product
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import perf_counter as clock
from typing import Any
from unittest import mock

import click
import torch
import transformers
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, BambaConfig, LlamaConfig

import mmspec
from mmspec import ops, plugins
from mmspec.cli.options import OUT_FILE
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.drafters.captured import CapturedDrafter, TrainedDrafter
from mmspec.drafters.dflash import DFlash, DFlashConfig, DFlashNetwork, default_layer_ids
from mmspec.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Network
from mmspec.engine.stats import StepTimer
from mmspec.errors import UserError, first_line
from mmspec.eval.harness.output import BenchmarkCommand, git_commit, make_table, print_result, wide_console
from mmspec.eval.harness.prompts import held_out_requests
from mmspec.eval.harness.small_configs import number_processor
from mmspec.eval.harness.timing import DecodingOptions, Method, TimedBatch, decode, peak_memory, reset_peak_memory
from mmspec.eval.suite.methods import SetAcceptance
from mmspec.files import write_text
from mmspec.ops import graphs, kernels
from mmspec.pipeline import Pipeline
from mmspec.ssm import ops as mamba_ops
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.vision.drafters.msd import MSD, Flash, MSDConfig, MSDNetwork

Row = dict[str, Any]
_ROW = "row: "  # begins a line of a part's output
GENERATE: dict[str, Row] = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
GENERATE |= {"compiled": {"cache_implementation": "static"}}
"""Options of transformers' ``generate``; on a GPU, a static cache alone compiles the forward."""

_BUFFER_BYTES = 6 << 30  # most memory of the inputs of a graph's calls


@dataclass(frozen=True)
class Plan:
    """How to measure: ``acceptance`` is the probability that a draft is accepted after accepted drafts."""

    device: torch.device
    quick: bool
    acceptance: float

    def of(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.of((1, 8, 16, 32, 64), (1, 4, 8))

    def cases(self) -> list[tuple[int, int]]:
        """Batch sizes and prefixes."""
        return self.of([(1, 1000), (8, 1000), (1, 8000)], [(1, 20), (8, 20), (1, 40)])

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of a copy larger than all caches."""
        source = torch.ones(1 << (30 if self.device.type == "cuda" else 22), dtype=torch.uint8, device=self.device)
        copy = partial(torch.empty_like(source).copy_, source)
        return 2 * source.numel() / median(device_seconds(copy, self.device))

    def target(self, name: str) -> Any:
        """A model with random weights, made on the device. Its layers change embeddings little, and the output layer is
        the embedding moved by a row. It counts: no near ties make answers depend on the order of sums in bfloat16."""
        config = config_of(name, self.quick)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
        embedding = model.get_input_embeddings().weight.data.normal_()
        model.get_output_embeddings().weight.data.copy_(embedding.roll(1, 0))
        return plugins.target_class(config)(model)


def attempt(step: Callable[[], Row], **facts: Any) -> Iterator[Row]:
    """The row of a step, or one with its error (``failed``): the other steps still run."""
    try:
        yield {**facts, **step()}
    except Exception as error:
        traceback.print_exc()
        yield {**facts, "failed": f"{type(error).__name__}: {first_line(error)}"}


_COMMON: dict[str, Any] = dict(
    initializer_range=0.002, max_position_embeddings=16384, tie_word_embeddings=False, eos_token_id=None
)
_TINY: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=160)
_TINY |= dict(num_attention_heads=4, num_key_value_heads=4)
_TINY_BAMBA = _TINY | dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, attn_layer_indices=[1])
_BAMBA: dict[str, Any] = dict(vocab_size=128256, num_key_value_heads=8)
_BAMBA |= dict(mamba_d_state=128, attn_layer_indices=[9, 18, 27])


def config_of(name: str, tiny: bool) -> Any:
    """``7b``: the language model of LLaVA-1.5-7B; ``hybrid``: Bamba-9B; or a tiny one of the class. Fields that are not
    given here have these values by default."""
    if name == "7b":
        return LlamaConfig(**_COMMON | (_TINY if tiny else dict(vocab_size=32064)))
    return BambaConfig(**_COMMON | _BAMBA | (_TINY_BAMBA if tiny else {}))


def random_drafters(target: TransformersTarget) -> dict[str, TrainedDrafter]:
    """Drafters with random networks of published shapes for this target: what their drafts cost."""
    config, layers, head = target.config, target.config.num_hidden_layers, min(32_000, target.config.vocab_size)
    dflash = DFlashConfig.like(
        config, layers=min(5, layers), block_size=16, mask_token_id=0, target_layer_ids=default_layer_ids(layers)
    )
    with torch.device(target.device):
        return {
            "msd": MSD(MSDNetwork(MSDConfig.like(config)).to(target.dtype)),
            "flash": Flash(MSDNetwork(MSDConfig.like(config, slots=12)).to(target.dtype), top_k=4, depth=12),
            "eagle3": Eagle3(Eagle3Network(Eagle3Config.like(config, head=head)).to(target.dtype), torch.arange(head)),
            "dflash": DFlash(DFlashNetwork(dflash).to(target.dtype)),
        }


Kernel = tuple[str, Callable[..., Tensor], list[Any], int, float]
"""Name; call; sizes of its tensors: random numbers (tuples), or positive float32 numbers that nearly add up to 1 along
the last axis (lists); bytes that it must read and write; tolerance (``measure``)."""


def device_seconds(run: Callable[[], Any], device: torch.device, count: int = 20) -> list[float]:
    """Seconds of each of ``count`` calls in succession, after three that warm up."""
    for _ in range(3):
        run()
    timer, names = StepTimer(device), ["begin", *map(str, range(count))]
    for name in names[1:]:
        run()
        timer.mark(name)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [timer.seconds(start, end) for start, end in pairwise(names)]


def call_seconds(calls: list[Callable[[], Any]], device: torch.device) -> float:
    """Median time of a call: all are one CUDA graph, so that launches cost nothing and no call finds its inputs in the
    L2 cache."""
    run: Callable[[], Any] = lambda: [call() for call in calls]  # noqa: E731
    if device.type == "cuda":
        run()  # compiles
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    return median(device_seconds(run, device)) / len(calls)


def measure(kernel: Kernel, plan: Plan) -> Row:
    """Compare a kernel with its torch reference in float32, and time it. Raises ``AssertionError``: floats differ by
    more than the tolerance (norm of the difference over the reference's), or more than this share of tokens: where sums
    decide, their order may."""
    name, call, sizes, num_bytes, tolerance = kernel
    device, dtype = plan.device, plan.dtype

    def inputs(seed: int = 0, exact: bool = False) -> list[Tensor]:
        generator, made = torch.Generator(device).manual_seed(seed), []
        for size in sizes:
            x = torch.randn(size, dtype=torch.float32, generator=generator, device=device)
            numbers = x.to(dtype).float() if exact else x.to(dtype)
            made.append(numbers if isinstance(size, tuple) else x.pow_(8).div_(1.001 * x.sum(-1, keepdim=True)))
        return made

    output = call(*inputs())
    with mock.patch.dict(os.environ, {"MMSPEC_KERNELS": "reference"}):
        expected = call(*inputs(exact=True))
    if expected.is_floating_point():
        error = float((output.float() - expected.float()).norm() / expected.float().norm())
    else:
        error = float((output != expected).float().mean())
    assert error <= tolerance, f"{name} differs from its reference by {error:.2g}, more than {tolerance}"
    seeds = range(max(1, min(plan.of(32, 2), _BUFFER_BYTES // sum(x.nbytes for x in inputs()))))
    spent, floor = call_seconds([partial(call, *inputs(seed)) for seed in seeds], device), num_bytes / plan.bandwidth
    return {"kernel": name, "error": error, "us": 1e6 * spent, "floor_us": 1e6 * floor, "over_floor": spent / floor}


def step_kernels(config: Any, plan: Plan, batch: int, prefix: int, nodes: int) -> Iterator[Kernel]:
    """Kernels of a step over binary trees after a prefix; for a model with Mamba-2 layers, of attention and of these
    layers."""
    device, size = plan.device, plan.dtype.itemsize
    heads, kv_heads, vocab = config.num_attention_heads, config.num_key_value_heads, config.vocab_size
    head_dim, slots, count = config.hidden_size // heads, prefix + nodes, batch * nodes
    index = torch.arange(nodes, device=device).repeat(batch, 1)
    tree = TokenTree(index, (index - 1).div(2, rounding_mode="floor"), check=False)
    mask, lengths = tree.ancestors.contiguous(), torch.full((batch,), prefix, dtype=torch.long, device=device)
    longest = [nodes - 1]  # the path to the last node
    while longest[0]:
        longest.insert(0, (longest[0] - 1) // 2)
    path = torch.tensor(longest, dtype=torch.long, device=device).repeat(batch, 1)

    def attention(q: Tensor, kv: Tensor) -> Tensor:
        return ops.tree_attention(q, kv[0], kv[1], lengths, mask, start=lengths[:1])

    def compact_kv(storage: Tensor) -> Tensor:
        ops.compact_kv(storage, path, lengths[:1], lengths)
        return storage[..., :-1, :]  # the last slot is a write sink

    read = size * batch * head_dim * 2 * (kv_heads * slots + heads * nodes)
    kv = 2, batch, kv_heads, slots, head_dim
    yield "tree_attention", attention, [(batch, heads, nodes, head_dim), kv], read, 1e-2
    if config.model_type != "bamba":
        stored = 2 * config.num_hidden_layers, batch, kv_heads, slots + 1, head_dim
        moved = size * stored[0] * batch * kv_heads * head_dim * max(len(longest) - 1, 1)  # the root's slot stays
        yield "compact_kv", compact_kv, [stored], 2 * moved, 1e-2
        yield "quantile", ops.quantile, [[batch, nodes, vocab], [batch, nodes]], 4 * count * vocab, 5e-3
        top_log_probs = lambda x: ops.top_log_probs(x, 10)[1]  # noqa: E731
        yield "top_log_probs", top_log_probs, [(batch, 10, vocab)], size * batch * 10 * vocab, 1e-2
        return
    mamba, state = config.mamba_n_heads, (config.mamba_n_groups, config.mamba_d_state)
    inner, shared, taps = mamba * config.mamba_d_head, state[0] * state[1], config.mamba_d_conv
    channels, window = inner + 2 * shared, mamba_ops.conv_window(tree.parents, taps)
    a = -torch.linspace(0.5, 16, mamba, dtype=torch.float32, device=device)

    def scan(xbc: Tensor, dt: Tensor, before: Tensor, commits: bool = False) -> Tensor:
        x, b, c = xbc.split([inner, shared, shared], dim=-1)
        x, b, c = x.unflatten(2, (mamba, -1)), b.unflatten(2, state), c.unflatten(2, state)
        if not commits:
            return mamba_ops.tree_scan(x, dt, a, b, c, a, before, tree.ancestors)
        mamba_ops.commit_scan(x, dt, a, b, before, path)
        return before

    sizes: list[Any] = [(batch, nodes, channels), [batch, nodes, mamba], [batch, mamba, inner // mamba, state[1]]]
    states, read = 4 * batch * inner * state[1], size * count * channels
    yield "tree_scan", scan, sizes, states + read + 4 * count * inner, 1e-2
    yield "commit_scan", partial(scan, commits=True), sizes, 2 * states, 1e-2
    tree_conv = lambda x, before, weight, bias: mamba_ops.tree_conv(x, before, weight, bias, window)  # noqa: E731
    sizes = [(batch, nodes, channels), (batch, channels, taps - 1), (channels, taps), (channels,)]
    yield "tree_conv", tree_conv, sizes, 2 * read, 1e-2


def machine(plan: Plan) -> Iterator[Row]:
    """The device, software versions, and the bandwidth of the device's memory."""
    has: Any = torch.cuda.get_device_properties(plan.device) if plan.device.type == "cuda" else None
    facts = {"device": has.name, "memory_gb": has.total_memory / 1e9} if has else {"device": platform.machine()}
    facts |= {"torch": torch.__version__, "transformers": transformers.__version__, "commit": git_commit()}
    yield {**facts, "kernels": kernels.in_use(plan.device), "copy_gb_per_second": plan.bandwidth / 1e9}


def tokens(plan: Plan) -> Iterator[Row]:
    """Whether answers of the embedded models in float32 on the device equal plain decoding on a CPU."""

    def check(name: str, requests: Any, drafter: str | None) -> Row:
        got: list[Any] = []
        runs = [(None, "cpu"), *[(drafter, plan.device.type)] * 3]  # on a GPU, the second captures, the third replays
        for spec, device in runs:
            if len(got) < 2:
                pipe = mmspec.load(name, drafter=spec, dtype="float32", device=device)
            results = pipe.generate_batch(requests, max_new_tokens=plan.of(48, 8), temperature=0.0, nodes=15)
            got.append([result.token_ids for result in results])
        assert got == got[:1] * 4, f"answers must be the CPU's: expected {got[0]}, got {got[1:]}"
        return {"equal": len(got[0])}

    llava = "tiny-llava", held_out_requests("images", 1) + held_out_requests("clips", 1)
    hybrid = "tiny-hybrid", held_out_requests("prompts", 2)
    both = *product([llava], (None, "msd", "flash", "recycle")), *product([hybrid], (None, "flash", "mamba"))
    for (name, requests), drafter in both:
        yield from attempt(partial(check, name, requests, drafter), model=name, drafter=drafter)


def time_passes(plan: Plan, target: TransformersTarget, batch: int, prefix: int) -> Row:
    """Milliseconds of verify passes over chains after a prefix, of commits and of drafts, medians of calls in a row. A
    draft comes after a step that accepted three tokens, which the drafter reads."""
    config: Any = target.config
    device = target.device
    ids = torch.arange(prefix, device=device).repeat(batch, 1) % config.vocab_size

    def milliseconds(run: Callable[[], Any]) -> float:
        return 1000 * median(device_seconds(run, device, plan.of(64, 2)))

    def chain(count: int) -> TokenTree:
        place = torch.arange(count, device=device).repeat(batch, 1)
        return TokenTree(place, place - 1, check=False)

    drafts, size = {}, StepPlan(plan.nodes[-1] - 1)
    for name, drafter in random_drafters(target).items():
        drafter.attach(target)
        reads = tuple(drafter.features)
        *_, output = target.prefill([Prompt(ids)], [256] * batch, reads, 1024)
        assert output is not None
        drafter.begin(Prompt(ids), output, [[*row, 0] for row in ids.tolist()])
        tree = chain(7)
        step = tree, accept_path(tree, (tree.tokens + 1).where(tree.tokens < 3, 0)), target.verify(tree, reads)

        def draft(drafter: CapturedDrafter = drafter, step: Any = step) -> None:
            drafter.observe(*step)
            drafter.propose(step[1].bonus, size)

        drafts[name] = milliseconds(draft)
        target.keep([])
    list(target.prefill([Prompt(ids)], [256] * batch))
    passes = {str(count): milliseconds(partial(target.verify, chain(count))) for count in plan.nodes}
    nothing = ids.new_full((batch, 4), -1)
    commit = milliseconds(lambda: target.runner.commit_nodes(nothing, lambda: [[]] * batch))
    target.keep([])
    weights: Any = [*target.model.get_decoder().layers.parameters(), *target.model.get_output_embeddings().parameters()]
    attending, states = config.num_hidden_layers, 0  # layers, and bytes of a sequence's recurrent states
    if config.model_type == "bamba":
        attending, heads = len(config.attn_layer_indices), config.mamba_n_heads
        states = 4 * (config.num_hidden_layers - attending) * heads * config.mamba_d_head * config.mamba_d_state
    kv = 2 * prefix * config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    read = sum(x.nbytes for x in weights) + batch * (states + kv * attending * target.dtype.itemsize)
    floor = 1000 * read / plan.bandwidth
    facts = {"pass_ms": passes, "floor_ms": floor, "floor_of_plain": floor / passes["1"], "draft_ms": drafts}
    return {**facts, "commit_ms": commit}


def passes(name: str, plan: Plan) -> Iterator[Row]:
    """Verify passes, commits and drafts."""
    target = plan.target(name)
    for batch, prefix in plan.cases():
        # transformers' prefill of Mamba-2 layers takes 4 GB per 1,000 tokens.
        prefix = prefix // 4 if name == "hybrid" and batch > 1 else prefix
        reset_peak_memory(plan.device)
        for row in attempt(partial(time_passes, plan, target, batch, prefix), batch=batch, prefix=prefix):
            yield {**row, "peak_bytes": peak_memory(plan.device)}


def answers(name: str, plan: Plan, batch: int = 1, peers: bool = False, **sampling: Any) -> Iterator[Row]:
    """Whole answers, plain and of each drafter with trees, chains and adaptive trees; or of ``generate`` (``peers``).
    Results are of decoding after the first token, medians over groups of prompts after a warm-up group."""
    target, few = plan.target(name), batch > 1 or bool(sampling)
    known: dict[Any, list[int]] = {}
    processor, vocab = number_processor(target.config.vocab_size), target.config.vocab_size
    drawn, options = Random(0), DecodingOptions(plan.of(256, 8), seed=1, **sampling)
    length, new = plan.of(640, 12), options.max_new_tokens - 1  # a picture of LLaVA-1.5 and a question
    groups = [[{"prompt": drawn.choices(range(10, 150), k=length)} for _ in range(batch)] for _ in range(4)]

    def time(method: Method) -> Row:
        pipe, timed = Pipeline(target, processor, method.drafter, max_num_seqs=batch), list[TimedBatch]()
        captured = equal = 0
        if method.generate_options is None:
            pipe.warm_up(batch, plan.of(1024, 64), [method.nodes])
        for turn, group in enumerate(groups):
            captured = graphs.num_captures() if turn == 1 else captured
            timed.append(decode(pipe, method, group, options))
            for request, answer in zip(group, timed[-1].answers, strict=True):
                equal += known.setdefault(tuple(request["prompt"]), answer) == answer
        stats = [[s for s in one.stats if s.wall_seconds] for one in timed[1:]]  # empty of generate
        steps = [max((s.num_spec_steps for s in rows), default=new) for rows in stats]
        spent = [[one.seconds.get(phase, 0.0) for one in timed[1:]] for phase in ("decoding", "draft", "verify")]
        step, draft, verify = (median(1000 * s / n for s, n in zip(phase, steps, strict=True)) for phase in spent)
        return {
            "steps": sum(steps),
            "tokens_per_step": fmean([s.mean_acceptance_length for rows in stats for s in rows] or [1.0]),
            **{"step_ms": step, "draft_ms": draft, "verify_ms": verify, "rest_ms": step - draft - verify},
            "tokens_per_second": batch * new / median(spent[0]),
            "equal": f"{equal}/{4 * batch}",
            "captures": graphs.num_captures() - captured,
            "peak_bytes": max(one.memory or 0 for one in timed),
        }

    if peers:
        for mode, given in GENERATE.items():
            yield from attempt(partial(time, Method(mode, generate_options=given)), method=mode, batch=batch)
        return
    yield from attempt(partial(time, Method("plain", max_num_seqs=batch)), method="plain", batch=batch)
    trees, chains = plan.of((31,) if few else (15, 31, 59), (7,)), plan.of((5,) if few else (3, 5, 8), (3,))
    shapes = *product(("tree",), trees), ("adaptive", None), *product(("chain",), chains)
    for (label, drafter), (kind, size) in product(random_drafters(target).items(), shapes):
        own = drafter.renewed(drafter.network)
        if kind == "chain":
            own.draft_chains(size)
        drafts = SetAcceptance(own, known, plan.acceptance, vocab)
        method = Method(f"{label} {kind} {size or ''}", drafts, size, max_num_seqs=batch)
        yield from attempt(partial(time, method), method=method.name, batch=batch, set_acceptance=plan.acceptance)


def kernel_times(plan: Plan) -> Iterator[Row]:
    """Every kernel against its memory floor."""
    for name, (batch, prefix), nodes in product(("7b", "hybrid"), plan.cases(), (1, plan.nodes[-1])):
        for kernel in step_kernels(config_of(name, plan.quick), plan, batch, prefix, nodes):
            yield from attempt(
                partial(measure, kernel, plan), kernel=kernel[0], model=name, batch=batch, prefix=prefix, nodes=nodes
            )


PARTS: dict[str, tuple[float, Callable[[Plan], Iterator[Row]]]] = {
    "machine": (60, machine),
    "tokens": (90, tokens),
    "passes-7b": (120, partial(passes, "7b")),
    "answers-7b": (200, partial(answers, "7b")),
    "generate-7b": (150, partial(answers, "7b", peers=True)),
    "batch-7b": (120, partial(answers, "7b", batch=8)),
    "sampling-7b": (120, partial(answers, "7b", temperature=0.8, top_p=0.95)),
    "kernels": (120, kernel_times),
    "passes-hybrid": (120, partial(passes, "hybrid")),
    "answers-hybrid": (150, partial(answers, "hybrid")),
    "generate-batch-7b": (150, partial(answers, "7b", batch=8, peers=True)),
}
"""By name, in order: the limit in seconds, and the rows of a part."""


def run_part(command: list[str], seconds: float) -> Row:
    """Run a part's process: its ``rows``, and ``error`` with the end of its ``log`` if it failed."""
    try:
        # Errors of drafters and kernels are raised, in place of going on without.
        done = subprocess.run(command, capture_output=True, timeout=seconds, env={**os.environ, "MMSPEC_STRICT": "1"})
        out, log, error = done.stdout, done.stderr, f"exit status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        out, log, error = late.stdout or b"", late.stderr or b"", f"not finished after {seconds:.0f} s"
    part = {"rows": [json.loads(line[len(_ROW) :]) for line in out.decode().splitlines() if line.startswith(_ROW)]}
    return part | ({"error": error, "log": log.decode(errors="replace")[-4000:]} if error else {})


def part_command(name: str, plan: Plan) -> list[str]:
    options = ["--device", str(plan.device), "--acceptance", str(plan.acceptance), *["--quick"] * plan.quick]
    return [sys.executable, "-m", "mmspec.eval", "gpu", *options, "--only", name, "--rows"]


def part_table(name: str, part: Row) -> Table:
    """The rows of a part, a column per field."""
    fields = dict.fromkeys(field for row in part["rows"] for field in row)

    def cell(field: str, row: Any) -> str:
        value = row.get(field, "")
        if isinstance(value, dict):
            return ", ".join(f"{key}: {number:.4g}" for key, number in value.items())
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    note = "drafts are accepted at a set rate: acceptance is not measured" if "set_acceptance" in fields else None
    columns = [(field.replace("_", " "), partial(cell, field)) for field in fields]
    return make_table(columns, part["rows"], title=name, caption=note)


@click.command(cls=BenchmarkCommand)
@click.option("--out", type=OUT_FILE, help="Write the JSON result to this file after every part.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--minutes", default=10.0, show_default=True, help="End after this time.")
@click.option("--quick", is_flag=True, help="Tiny shapes, as a rehearsal.")
@click.option("--acceptance", type=click.FloatRange(0, 1, min_open=True), default=0.8, help="Set, per draft [0.8].")
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="Run this part; may be repeated.")
@click.option("--skip", multiple=True, type=click.Choice(list(PARTS)), help="Leave a part out; may be repeated.")
@click.option("--rows", is_flag=True, hidden=True, help="Run one part in this process, and print its rows.")
@torch.inference_mode()
def main(out: Path | None, device: str, minutes: float, only: Any, skip: Any, rows: bool, **settings: Any) -> None:
    """Measure a GPU: a table for each part, then one JSON line."""
    plan, deadline, failed = Plan(torch.device(device), **settings), clock() + 60 * minutes, False
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("expected a CUDA device, found none (--device cpu --quick rehearses without one)")
    if plan.device.type != "cuda" and not plan.quick:
        raise UserError(f"real shapes need a CUDA device: got {device!r} (--quick takes tiny ones)")
    if rows:
        for row in PARTS[only[0]][1](plan):
            failed |= "failed" in row
            print(_ROW + json.dumps(row), flush=True)
        click.echo(graphs.capture_failure() or "", err=True)
        sys.exit(failed or graphs.capture_failure() is not None)
    content: Row = {"acceptance": f"set to {plan.acceptance}, not measured", "quick": plan.quick, "parts": {}}
    for name in [name for name in PARTS if name in (only or PARTS) and name not in skip]:
        limit = min(PARTS[name][0], deadline - clock())
        part = run_part(part_command(name, plan), limit) if limit > 0 else {"rows": [], "error": "no time was left"}
        content["parts"][name] = part
        wide_console().print(part_table(name, part))
        click.echo(f"{name}: {part.get('error', 'done')}", err=True)
        if out is not None:
            write_text(out, json.dumps(content) + "\n")
    print_result(content, out)
    sys.exit(any("error" in part for part in content["parts"].values()))
