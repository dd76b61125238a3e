"""Passes, drafts and whole answers of scaled-up models on the device, for ``mmspec.eval.gpu``.

Models and drafters are small trained ones, scaled up without changing their function (``mmspec.eval.scale_up``):
acceptance is the small model's, time is the big shape's. A prompt is a video of 16 frames, 576 visual tokens, as many
as an image has in LLaVA-1.5. Prefill uses the small model's vision tower, and is left out of all figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor

import mmspec
from mmspec.core.budget import Budget
from mmspec.core.drafter import Drafter, features, fork
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.drafters.dflash import DFlash, DFlashConfig, DFlashNetwork, default_layer_ids
from mmspec.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Network
from mmspec.engine.stats import Stats
from mmspec.eval.harness.prompts import held_out_requests, held_out_texts
from mmspec.eval.harness.timing import Method, peak_memory, reset_peak_memory, rotated, shared_times
from mmspec.eval.kernels.gpu_kernels import binary_tree, device_seconds
from mmspec.eval.scale_up.drafters import scaled_pipeline
from mmspec.eval.scale_up.models import Shape, Weights
from mmspec.ops import graphs
from mmspec.pipeline import Pipeline
from mmspec.targets.transformers_target import TransformersTarget

FRAMES = 16
_TOKENS = 1536  # of a prompt and its answer, at most
_WARM_UP = 2  # groups of prompts that every method answers before any is timed
_ACCEPTED = 4  # nodes of each step's path, the root included, where drafts are timed
_CHUNK = 1024  # prompt tokens of a prefill pass
_EAGLE3_HEAD = 32_000  # largest draft vocabulary of an EAGLE-3 head, as published ones have


@dataclass
class ScaledModel:
    """A scaled-up model and its drafters.

    Attributes:
        pipe: the target.
        drafters: by label.
        weight_bytes: weights that a pass reads: the language model's without its embeddings.
        build_seconds: time to build model and drafters.
    """

    pipe: Pipeline
    drafters: dict[str, Drafter]
    weight_bytes: int
    build_seconds: float


def build_scaled_model(
    model: str, shape: Shape, drafters: str, device: torch.device, dtype: torch.dtype
) -> ScaledModel:
    """Scale up an embedded model and its drafters."""
    start = clock()
    pipe, scaled = scaled_pipeline(model, shape, drafters, dtype, device)
    big = pipe.model
    read: Any = [*big.get_decoder().layers.parameters(), *big.get_output_embeddings().parameters()]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in read)
    return ScaledModel(pipe, scaled, weights, clock() - start)


def random_drafters(target: TransformersTarget) -> dict[str, Drafter]:
    """EAGLE-3 and DFlash as published for targets of this shape, with random weights: what their drafts cost."""
    config = target.config
    head = min(_EAGLE3_HEAD, config.vocab_size)
    eagle3 = Eagle3Config.like(config, head=head)
    dflash = DFlashConfig.like(
        config,
        layers=5,
        block_size=16,
        mask_token_id=0,
        target_layer_ids=default_layer_ids(config.num_hidden_layers),
    )
    weights = Weights(target.device, target.dtype)

    def network(kind: Any, settings: Any) -> Any:
        with torch.device("meta"):
            made = kind(settings)
        made.load_state_dict({k: weights.random(*x.shape) for k, x in made.state_dict().items()}, assign=True)
        return made

    return {
        "eagle3": Eagle3(network(Eagle3Network, eagle3), torch.arange(head, device=target.device)),
        "dflash": DFlash(network(DFlashNetwork, dflash)),
    }


def time_passes(
    model: ScaledModel, batch: int, prefix: int, nodes: Sequence[int], bandwidth: float, calls: int = 64
) -> dict[str, Any]:
    """Time verify passes over trees of several sizes after a prefix, commits, and drafts.

    The prefix is of arbitrary tokens, since times do not depend on them. A draft comes after a step that accepted three
    tokens, which the drafter reads before it drafts.

    Args:
        calls: of each, in succession; figures are their medians.
    """
    target = model.pipe.target
    device, vocab = target.device, target.config.vocab_size
    reset_peak_memory(device)
    ids = torch.arange(prefix, device=device).expand(batch, -1).contiguous() % min(vocab, 256)
    for drafter in model.drafters.values():
        drafter.attach(target)
    drafters = {name: drafter for name, drafter in model.drafters.items() if features(drafter)}
    target.features = list(dict.fromkeys(name for drafter in drafters.values() for name in features(drafter)))
    *_, output = target.prefill_chunks(Prompt(ids), 256, _CHUNK)
    assert output is not None

    def milliseconds(run: Callable[[], Any]) -> float:
        return 1000 * statistics.median(device_seconds(run, device, calls))

    drafts, budget = {}, Budget(max(nodes) - 1)
    for name, drafter in drafters.items():
        drafter.begin(Prompt(ids), output, [[*line, line[-1]] for line in ids.tolist()])
        target.features = list(features(drafter))
        drafts[name] = milliseconds(_drafts(drafter, target, ids[:, -1], budget))
        drafter.select([])
    target.features = []
    passes = {
        str(count): milliseconds(partial(target.forward_tree, binary_tree(batch, count, device)))
        for count in sorted({1, *nodes})
    }
    # As many entries are read as for a path of this length, none is kept.
    commit = partial(target.runner.commit_nodes, ids.new_full((batch, _ACCEPTED), -1), lambda: [[]] * batch)
    commit_ms = milliseconds(commit)
    floor = 1000 * (model.weight_bytes + _cache_bytes(target, batch, prefix)) / bandwidth
    target.select([])
    return {
        "batch": batch,
        "prefix": prefix,
        "pass_ms": passes,
        "floor_ms": floor,
        "plain_of_floor": floor / passes["1"],
        "over_plain": {count: ms / passes["1"] for count, ms in passes.items()},
        "commit_ms": commit_ms,
        "draft_ms": drafts,
        "peak_bytes": peak_memory(device),
    }


def _drafts(drafter: Drafter, target: TransformersTarget, token: Tensor, budget: Budget) -> Callable[[], TokenTree]:
    """Draft again and again, each time after reading the same accepted path."""
    tree = drafter.propose(token, budget)
    output = target.forward_tree(tree)
    choices = torch.zeros_like(tree.tokens)
    for row, children in enumerate(tree.children):
        node = 0
        for _ in range(_ACCEPTED - 1):
            if children[node]:
                choices[row, node], node = next(iter(children[node].items()))
    verdict = accept_path(tree, choices)

    def run() -> TokenTree:
        drafter.observe(tree, verdict, output)
        return drafter.propose(verdict.bonus, budget)

    return run


def _cache_bytes(target: TransformersTarget, batch: int, prefix: int) -> int:
    """Bytes of keys, values and recurrent states that a pass reads."""
    config, cache = target.config, target.runner.cache
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = len(cache.attending)
    total = 2 * target.model.dtype.itemsize * layers * batch * prefix * config.num_key_value_heads * head_dim
    if (states := getattr(cache, "_state", None)) is not None:
        total += states.data.numel() * states.data.element_size()
    return total


def gpu_requests(hybrid: bool, count: int) -> list[dict[str, Any]]:
    """Held-out texts for hybrids, else held-out videos."""
    return held_out_texts(count) if hybrid else held_out_requests(0, count, frames=FRAMES)


def answer_methods(model: ScaledModel, trees: Sequence[int], chains: Sequence[int], adaptive: bool) -> list[Method]:
    """Plain decoding, and every drafter with trees and chains of several sizes."""
    methods, target = [Method("plain")], model.pipe.target
    for name, drafter in model.drafters.items():
        own = fork(drafter, target)
        methods += [Method(f"{name} tree {size}", own, size) for size in trees]
        methods += [Method(f"{name} adaptive", own, None)] if adaptive else []
        for size in chains:
            chain = fork(drafter, target)
            chain.draft_chains(size)
            methods.append(Method(f"{name} chain {size}", chain, size))
    return methods


@dataclass(frozen=True)
class _Answered:
    """Answers to a group of prompts that were decoded together.

    Attributes:
        seconds: of decoding, after the first tokens.
        stats: of the row with most steps, which has the times of all.
    """

    answers: list[list[int]]
    seconds: float
    stats: Stats

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(len(answer) - 1 for answer in self.answers) / self.seconds

    def step_ms(self, seconds: float) -> float:
        """Milliseconds per step."""
        return 1000 * seconds / max(1, self.stats.num_spec_steps)


def time_answers(
    model: ScaledModel,
    methods: Sequence[Method],
    groups: Sequence[Sequence[Mapping[str, Any]]],
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Decode held-out prompts with every method, interleaved, after some that warm up.

    Figures are medians over groups, of decoding after the first token. In bfloat16 another order of
    summation may flip a near tie, so answers that differ from plain decoding are counted, not refused.

    Args:
        groups: requests that decode together.
        **options: of ``Pipeline.generate_batch``.

    Yields:
        For each method: number of steps; tokens per step and row; milliseconds of a step, and of its phases: draft,
        verify, and the rest, which is the commit and the host's work that the device waits for; on a GPU, those in
        which no kernel ran; tokens per second, alone and over plain decoding's; equal answers; captures made meanwhile.
    """
    target, device = model.pipe.target, model.pipe.target.device
    pipes = {m.name: Pipeline(target, model.pipe.processor, m.drafter, max_num_seqs=len(groups[0])) for m in methods}
    answered: dict[str, list[_Answered]] = {method.name: [] for method in methods}
    captured, peaks = dict.fromkeys(pipes, 0), dict.fromkeys(pipes, 0)

    def answer(method: Method, group: Sequence[Mapping[str, Any]], **changes: Any) -> _Answered:
        results = pipes[method.name].generate_batch(group, **{"nodes": method.nodes, "seed": 1, **options, **changes})
        longest, seconds = shared_times([result.stats for result in results])
        return _Answered([result.token_ids for result in results], seconds, longest)

    for method in methods:
        pipes[method.name].warm_up(len(groups[0]), _TOKENS, [method.nodes])
        for group in groups[:_WARM_UP]:
            answer(method, group)
    for turn, group in enumerate(groups):
        for method in rotated(methods, turn):
            before = graphs.num_captures()
            reset_peak_memory(device)
            answered[method.name].append(answer(method, group))
            captured[method.name] += graphs.num_captures() - before
            peaks[method.name] = max(peaks[method.name], peak_memory(device) or 0)
    plain = answered[methods[0].name]
    for method in methods:
        rows = answered[method.name]
        stats = [row.stats for row in rows]
        step = statistics.median(row.step_ms(row.seconds) for row in rows)
        draft, verify = (
            statistics.median(row.step_ms(getattr(row.stats, f"{phase}_seconds")) for row in rows)
            for phase in ("draft", "verify")
        )
        yield {
            "method": method.name,
            "batch": len(groups[0]),
            "steps": sum(each.num_spec_steps for each in stats),
            "tokens_per_step": statistics.mean(each.mean_acceptance_length for each in stats),
            "step_ms": step,
            "draft_ms": draft,
            "verify_ms": verify,
            "rest_ms": step - draft - verify,
            "idle_ms": _idle_ms(partial(answer, method, groups[0]), step, device),
            "tokens_per_second": statistics.median(row.rate for row in rows),
            "ratio_plain": statistics.median(row.rate / base.rate for row, base in zip(rows, plain, strict=True)),
            "equal": sum(row.answers == base.answers for row, base in zip(rows, plain, strict=True)),
            "groups": len(rows),
            "captures": captured[method.name],
            "peak_bytes": peaks[method.name],
        }


def _idle_ms(answer: Callable[..., _Answered], step_ms: float, device: torch.device) -> float | None:
    """Milliseconds of a step in which no kernel or copy ran; None on a CPU. The prefill's share is measured apart."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    busy = []
    for changes in ({"max_new_tokens": 1}, {}):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            answered = answer(**changes)
            torch.cuda.synchronize(device)
        busy.append(sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6)
    return step_ms - answered.step_ms(busy[1] - busy[0])


GENERATE_MODES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "compiled": {"cache_implementation": "static"},
}
"""Options of transformers' ``generate``; on a GPU, a static cache alone compiles the forward."""


def time_generate(model: ScaledModel, mode: str, batch: int, lengths: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Time transformers' ``generate``: the difference of a long and a short answer, which is decoding alone.

    Args:
        mode: one of ``GENERATE_MODES``.
        lengths: new tokens of the short and the long answer.
    """
    device = model.pipe.target.device
    prompt = model.pipe.encode(gpu_requests(model.pipe.target.config.model_type == "bamba", batch))
    mask = torch.ones_like(prompt.input_ids) if prompt.attention_mask is None else prompt.attention_mask
    inputs = {"input_ids": prompt.input_ids, "attention_mask": mask, **prompt.inputs, "do_sample": False}

    def generate(new: int) -> float:
        options = {**inputs, **GENERATE_MODES[mode], "max_new_tokens": new, "min_new_tokens": new}
        return device_seconds(lambda: model.pipe.model.generate(**options), device, 1, warm_up=0)[0]

    generate(lengths[0])  # compiles
    reset_peak_memory(device)
    seconds = [generate(lengths[1]) - generate(lengths[0]) for _ in range(rounds)]
    token = statistics.median(seconds) / (lengths[1] - lengths[0])
    return {
        "method": f"generate {mode}",
        "batch": batch,
        "token_ms": 1000 * token,
        "tokens_per_second": batch / token,
        "peak_bytes": peak_memory(device),
    }


def check_tokens(name: str, drafters: Sequence[str | None], device: torch.device, new: int) -> Iterator[dict[str, Any]]:
    """Answers of an embedded model in float32 on the device, with several drafters, compared with a CPU's.

    Raises:
        AssertionError: answers with a drafter differ from plain ones on the same device.
    """
    requests = gpu_requests(name == "tiny-hybrid", 2)
    plain: dict[str, list[list[int]]] = {}
    for where in dict.fromkeys(("cpu", device.type)):
        pipe = mmspec.load(name, drafter=None, dtype="float32", device=where)
        plain[where] = [r.token_ids for r in pipe.generate_batch(requests, max_new_tokens=new, temperature=0.0)]
    equal = sum(a == b for a, b in zip(plain["cpu"], plain[device.type], strict=True))
    yield {"model": name, "drafter": "none", "answers": len(requests), "equal_cpu": equal}
    for drafter in drafters:
        pipe = mmspec.load(name, drafter=drafter, dtype="float32", device=device.type)
        for _ in range(3):  # the second captures, the third replays
            results = pipe.generate_batch(requests, max_new_tokens=new, temperature=0.0, nodes=15)
            answers = [r.token_ids for r in results]
            assert answers == plain[device.type], f"{drafter} must answer as plain decoding does: got other tokens"
        yield {
            "model": name,
            "drafter": drafter,
            "answers": len(requests),
            "equal_cpu": sum(r.token_ids == row for r, row in zip(results, plain["cpu"], strict=True)),
            "tokens_per_step": statistics.mean(r.stats.mean_acceptance_length for r in results),
        }
