"""Passes and whole answers of scaled-up models on the device, for ``mmspec.eval.gpu``.

Models and drafters are small trained ones, scaled up without changing their function (``mmspec.eval.scale_up``):
acceptance is the small model's, time is the big shape's. A prompt is a video of 16 frames, 576 visual tokens, as many
as an image has in LLaVA-1.5. Prefill uses the small model's vision tower, and is left out of all figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter as clock
from typing import Any

import torch

from mmspec.core.budget import Budget
from mmspec.core.drafter import Drafter, features, fork
from mmspec.core.target import Prompt
from mmspec.drafters.ngram import Ngram
from mmspec.engine.calibrate import cost_table
from mmspec.eval.harness.prompts import held_out_requests, held_out_texts
from mmspec.eval.harness.timing import TRANSFORMERS, DecodingOptions, Method, run_interleaved
from mmspec.eval.kernels.gpu_kernels import binary_tree, median_seconds
from mmspec.eval.scale_up.axes import Shape
from mmspec.eval.scale_up.drafters import scaled_pipeline
from mmspec.pipeline import Pipeline
from mmspec.targets.transformers_target import TransformersTarget

FRAMES = 16
CHUNK = 64  # chunk length of transformers' prefill scan in the embedded hybrid


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


def time_passes(
    model: ScaledModel, batch: int, prefix: int, nodes: tuple[int, ...], bandwidth: float
) -> dict[str, Any]:
    """Time verify passes over trees of several sizes after a prefix, a commit, and one tree of each drafter.

    The prefix is of arbitrary tokens, since times do not depend on them.
    """
    target = model.pipe.target
    device, vocab = target.device, target.config.vocab_size
    ids = torch.arange(prefix, device=device).expand(batch, -1).contiguous() % min(vocab, 256)
    prompt = Prompt(ids)
    # Ngram runs on the host.
    drafters = {name: drafter for name, drafter in model.drafters.items() if not isinstance(drafter, Ngram)}
    for drafter in drafters.values():
        drafter.attach(target)
    target.features = list(dict.fromkeys(name for drafter in drafters.values() for name in features(drafter)))
    output = target.prefill(prompt, 256)
    target.features = ["last"]
    row: dict[str, Any] = {"batch": batch, "prefix": prefix, "pass_ms": {}, "draft_ms": {}}
    for count in (1, *nodes):
        verify = partial(target.forward_tree, binary_tree(batch, count, device))
        row["pass_ms"][str(count)] = 1000 * _steady_seconds(verify, device)
    plain = row["pass_ms"]["1"]
    row["floor_ms"] = 1000 * (model.weight_bytes + _cache_bytes(target, batch, prefix)) / bandwidth
    row["plain_of_floor"] = row["floor_ms"] / plain
    row["over_plain"] = {count: ms / plain for count, ms in row["pass_ms"].items()}
    padding = torch.full((batch, 4), -1, device=device)  # costs as much as committing up to four nodes
    commit = partial(target.runner.commit_nodes, padding, [[] for _ in range(batch)])
    row["commit_ms"] = 1000 * _steady_seconds(commit, device)
    for name, drafter in drafters.items():
        drafter.begin(prompt, output, [[*line, line[-1]] for line in ids.tolist()])
        grow = partial(drafter.propose, ids[:, -1], Budget(max(nodes) - 1))
        # Without accepted tokens, which would need one more narrow pass of the drafter's layer.
        row["draft_ms"][name] = 1000 * _steady_seconds(grow, device)
        drafter.select([])
    target.select([])
    return row


def _cache_bytes(target: TransformersTarget, batch: int, prefix: int) -> int:
    """Bytes of keys, values and recurrent states that a pass reads."""
    config, cache = target.config, target.runner.cache
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = len(cache.attending)
    total = 2 * target.model.dtype.itemsize * layers * batch * prefix * config.num_key_value_heads * head_dim
    if (states := getattr(cache, "_state", None)) is not None:
        total += states.data.numel() * states.data.element_size()
    return total


def _steady_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call after compilation and CUDA graph capture."""
    for _ in range(3):
        run()
    return median_seconds(run, device)


def calibrate(model: ScaledModel, *, refresh: bool) -> Iterator[dict[str, Any]]:
    """Measure the cost table that adaptive tree sizes are chosen by."""
    target = model.pipe.target
    target.cost = cost_table(target, refresh=refresh)
    yield {"pass_ms_by_nodes": {str(n): 1000 * s for n, s in zip(target.cost.tokens, target.cost.seconds, strict=True)}}


def needed_bytes(shape: Shape, batch: int, prefix: int) -> int:
    """Approximate memory of passes after a prefix, in 16 bits: weights of model and drafters, caches, and activations.

    For hybrids, transformers' prefill scan materialises products over the positions of a chunk, between chunks, and of
    inputs with states.
    """
    width, kv = shape.hidden, 2 * shape.kv_heads * shape.head_dim
    weights, attending = 2 * shape.vocab * width + 3 * width * shape.mlp * shape.layers, shape.layers
    states = scan = 0
    if shape.mamba is not None:
        mamba, tokens = shape.mamba, batch * prefix
        attending, inner = len(mamba.attending), mamba.heads * mamba.head_dim
        weights += (shape.layers - attending) * width * (3 * inner + 2 * mamba.groups * mamba.state + mamba.heads)
        states = 4 * (shape.layers - attending) * batch * inner * mamba.state
        chunks = -(-prefix // CHUNK)
        kinds = tokens * CHUNK * mamba.heads * mamba.state, tokens * inner * mamba.state
        between = batch * (chunks + 1) ** 2 * inner * mamba.state
        scan = 4 * (max(kinds) + between)  # not alive at once, but of sizes that the allocator cannot reuse
    weights += attending * width * (2 * shape.heads * shape.head_dim + kv)
    cache = 2 * attending * kv * batch * (prefix + 512)
    hidden = 2 * batch * prefix * (4 * width + 3 * shape.mlp)  # of one layer in prefill
    return int(1.15 * 2 * weights) + cache + 2 * states + max(scan, hidden)


def gpu_requests(hybrid: bool, batch: int) -> list[dict[str, Any]]:
    """Held-out texts for hybrids, else held-out videos."""
    return held_out_texts(batch) if hybrid else held_out_requests(0, batch, frames=FRAMES)


def time_answers(
    model: ScaledModel, batch: int, sizes: tuple[int, ...], max_new_tokens: int, rounds: int, hybrid: bool
) -> Iterator[dict[str, Any]]:
    """Answer held-out prompts plainly and with every drafter and tree size, interleaved: a row for each.

    One prompt is also answered by transformers' ``generate``. Ratios are of decoding after the first token; medians
    over the rounds. In bfloat16 another order of summation may flip a near tie, so rows that differ from plain decoding
    are counted, not refused.
    """
    methods = [Method("plain")]
    for name, drafter in model.drafters.items():
        own = fork(drafter, model.pipe.target)
        methods += [Method(f"{name}, {size} nodes", own, size) for size in sizes]
        methods.append(Method(f"{name}, adaptive", own, None))
    if batch == 1:
        methods.append(Method(TRANSFORMERS))
    requests, options = gpu_requests(hybrid, batch), DecodingOptions(max_new_tokens)
    run_interleaved(model.pipe, requests, methods, 1, options)  # compiles and captures
    results = run_interleaved(model.pipe, requests, methods, rounds, options)
    plain = results["plain"]
    for name, batches in results.items():
        seconds, stats = statistics.median(each.seconds["decoding"] for each in batches), batches[-1].stats
        yield {
            "method": name,
            "batch": batch,
            "tokens_per_second": sum(len(answer) - 1 for answer in batches[-1].answers) / seconds,
            "step_ms": 1000 * seconds / max(1, *(row.num_spec_steps for row in stats)),
            "mean_acceptance_length": statistics.mean(row.mean_acceptance_length for row in stats),
            "ratio_plain": statistics.median(each.seconds["decoding"] for each in plain) / seconds,
            "equal": sum(a == b for a, b in zip(batches[-1].answers, plain[-1].answers, strict=True)),
            "rounds": rounds,
        }
