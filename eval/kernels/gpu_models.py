"""Decoding with models of real sizes, made on the device; for `eval.gpu`.

Models and drafters are small trained ones, scaled up without changing what they say (`eval.scale_up`): acceptance is
the small model's, time is the big shape's. A prompt is a video of 16 frames, 576 visual tokens, as many as an image has
in LLaVA-1.5; its prefill takes the small model's vision tower, and is left out of every figure here.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter as clock
from typing import Any

import torch

import mmspec
from eval.harness.prompts import held_out_requests, held_out_texts
from eval.kernels.gpu_kernels import binary_tree, seconds
from eval.scale_up.axes import Shape
from eval.scale_up.drafters import scaled
from eval.scale_up.models import scale_up
from mmspec import plugins
from mmspec.budget import Budget
from mmspec.calibrate import cost_table
from mmspec.drafter import Drafter, fork
from mmspec.drafters.ngram import Ngram
from mmspec.loading import make_drafter
from mmspec.pipeline import Pipeline
from mmspec.target import Prompt

FRAMES = 16
CHUNK = 64  # positions that transformers' scan of a prompt takes at once; the embedded hybrid's
Enough = Callable[[], bool]
"""Whether time is up."""


@dataclass
class Big:
    """A scaled-up model and its drafters.

    Attributes:
        weight_bytes: what a pass reads: all weights of the language model but the embeddings.
    """

    pipe: Pipeline
    drafters: dict[str, Drafter]
    weight_bytes: int
    build_seconds: float


def build(model: str, shape: Shape, drafters: dict[str, str], device: torch.device, dtype: torch.dtype) -> Big:
    """Scale an embedded model up, and its drafters by label."""
    start = clock()
    small = mmspec.load(model, drafter=None, dtype="float32", device="cpu")
    big = scale_up(small.model, shape, device=device, dtype=dtype)
    found: dict[str, Drafter] = {}
    for label, spec in drafters.items():
        drafter = make_drafter(spec, small.model.config.name_or_path)
        assert drafter is not None
        found[label] = scaled(drafter, small.model, big)
    target = plugins.target_class(big.config)(big, small.processor)
    gc.collect()
    read: Any = [*big.get_decoder().layers.parameters(), *big.get_output_embeddings().parameters()]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in read)
    return Big(Pipeline(target, name=model), found, weights, clock() - start)


# ---------------------------------------------------------------------- single passes


def passes(big: Big, batch: int, prefix: int, nodes: tuple[int, ...], bandwidth: float) -> dict[str, Any]:
    """A pass over trees of so many nodes behind a prefix, and one tree of each drafter, by themselves.

    The prefix is of arbitrary tokens: nothing here depends on what is said.
    """
    target = big.pipe.target
    device, vocab = target.device, target.config.vocab_size
    # Not cached: a prompt is read in one go, by the model's own attention.
    ids = torch.arange(prefix, device=device).expand(batch, -1).contiguous() % min(vocab, 256)
    prompt = Prompt(ids)
    step = target.prefill(prompt, 256)
    size = target.model.dtype.itemsize
    cache: Any = target._cache
    entries = 2 * size * len(cache.attending) * batch * prefix * target.config.num_key_value_heads
    entries *= (
        getattr(target.config, "head_dim", None) or target.config.hidden_size // target.config.num_attention_heads
    )
    if (states := getattr(cache, "_state", None)) is not None:
        entries += states.numel() * states.element_size()
    row: dict[str, Any] = {"batch": batch, "prefix": prefix, "pass_ms": {}, "draft_ms": {}}
    for count in (1, *nodes):
        check = partial(target.forward_tree, binary_tree(batch, count, device))
        row["pass_ms"][str(count)] = 1000 * _ready(check, device)
    plain = row["pass_ms"]["1"]
    row["floor_ms"] = 1000 * (big.weight_bytes + entries) / bandwidth
    row["plain_of_floor"] = row["floor_ms"] / plain
    row["over_plain"] = {count: taken / plain for count, taken in row["pass_ms"].items()}
    nothing = torch.full((batch, 4), -1, device=device)  # which takes the work of keeping up to four nodes
    row["commit_ms"] = 1000 * _ready(partial(target.commit_nodes, nothing, [[] for _ in range(batch)]), device)
    token = ids[:, -1]
    for name, drafter in big.drafters.items():
        if isinstance(drafter, Ngram):
            continue  # it looks things up on the host
        drafter.attach(target)
        drafter.begin(prompt, step, [[*line, line[-1]] for line in ids.tolist()])
        grow = partial(drafter.propose, token, Budget(max(nodes) - 1))
        # Without the last step's tokens, which take one narrow pass of the drafter's layer more.
        row["draft_ms"][name] = 1000 * _ready(grow, device)
    return row


def _ready(run: Callable[[], Any], device: torch.device) -> float:
    """A call's seconds once it is compiled, captured and replayed."""
    for _ in range(3):
        run()
    return seconds(run, device)


def calibrate(big: Big, *, refresh: bool) -> Iterator[dict[str, Any]]:
    """How long a pass over n nodes takes, which is what sizes of trees are chosen by."""
    target = big.pipe.target
    target.cost = cost_table(target, refresh=refresh)
    yield {"pass_ms_by_nodes": {str(n): 1000 * s for n, s in zip(target.cost.tokens, target.cost.seconds, strict=True)}}


def needed(shape: Shape, batch: int, prefix: int) -> int:
    """Bytes that passes behind a prefix take about, in 16 bits: weights of model and drafters, caches, and for hybrids
    what transformers makes of a prompt: products of all positions of a chunk, of chunks, and of inputs with states."""
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
        scan = 4 * (max(kinds) + between)  # one after the other, but of sizes for which no room is used again
    weights += attending * width * (2 * shape.heads * shape.head_dim + kv)
    cache = 2 * attending * kv * batch * (prefix + 512)
    hidden = 2 * batch * prefix * (4 * width + 3 * shape.mlp)  # of one layer of a prompt
    return int(1.15 * 2 * weights) + cache + 2 * states + max(scan, hidden)


# ---------------------------------------------------------------------- whole answers


def requests(hybrid: bool, batch: int) -> list[dict[str, Any]]:
    return held_out_texts(batch) if hybrid else held_out_requests(0, batch, frames=FRAMES)


def decoding(
    big: Big, batch: int, sizes: tuple[int, ...], new: int, rounds: int, hybrid: bool, enough: Enough
) -> Iterator[dict[str, Any]]:
    """Answers to a batch of held-out prompts, plainly and by every drafter and tree size, in turn: a row for each.

    Ratios are of decoding alone, behind the first token; medians over the rounds. In bfloat16 another order of sums may
    turn a near tie, so rows that differ from plain decoding are counted, not refused.
    """
    asked = requests(hybrid, batch)
    ways: dict[str, tuple[Pipeline, int | None]] = {"plain": (Pipeline(big.pipe.target), 0)}
    for name, drafter in big.drafters.items():
        own = Pipeline(big.pipe.target, fork(drafter, big.pipe.target))
        ways |= {f"{name}, {size} nodes": (own, size) for size in sizes} | {f"{name}, adaptive": (own, None)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, Any] = {}
    for turn in range(1 + rounds):  # the first compiles and captures
        for name, (pipe, nodes) in ways.items():
            if turn and enough() and times[name]:
                continue
            results = pipe.generate_batch(asked, max_new_tokens=new, nodes=nodes)
            stats = max((result.stats for result in results), key=lambda s: s.wall_seconds)
            if turn:
                times[name].append(stats.wall_seconds - stats.time_to_first_token)
            answers[name] = results
    plain = answers["plain"]
    for name, results in answers.items():
        if not times[name]:
            continue
        taken, steps = statistics.median(times[name]), max(r.stats.num_spec_steps for r in results)
        tokens = sum(len(result.token_ids) - 1 for result in results)
        yield {
            "way": name,
            "batch": batch,
            "tokens_per_second": tokens / taken,
            "step_ms": 1000 * taken / max(steps, 1),
            "mean_acceptance_length": statistics.mean(r.stats.mean_acceptance_length for r in results),
            "ratio_plain": statistics.median(times["plain"]) / taken,
            "equal": sum(a.token_ids == b.token_ids for a, b in zip(results, plain, strict=True)),
            "rounds": len(times[name]),
        }


def transformers_generate(big: Big, new: int, hybrid: bool) -> Iterator[dict[str, Any]]:
    """The same first prompt by transformers' ``generate``, behind its own first token."""
    target = big.pipe.target
    prompt = target.encode(requests(hybrid, 1))
    inputs = {"input_ids": prompt.input_ids, "attention_mask": prompt.attention_mask, **prompt.inputs}

    def run(tokens: int) -> float:
        start = clock()
        out = big.pipe.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        out.tolist()
        return clock() - start

    run(2)
    taken = run(new) - run(1)
    yield {"way": "transformers generate", "batch": 1, "tokens_per_second": (new - 1) / taken, "rounds": 1}
