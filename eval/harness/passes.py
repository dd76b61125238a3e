"""Times of verify passes, prefills and reads of the weights, and divergences of packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter as clock
from typing import Any

import click
import torch
from torch import Tensor

import mmspec
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.drafters.ngram import Ngram
from mmspec.eval.harness.output import Column
from mmspec.eval.harness.peers import LlamaServer
from mmspec.eval.harness.timing import rotated
from mmspec.ops import cpu, cpu_library
from mmspec.pipeline import Pipeline
from mmspec.quantisation.blocks import BlockLinear
from mmspec.targets.transformers_target import TransformersTarget

READ = "read"
"""In place of a number of nodes: a loop that only reads the packed weights."""

_BEFORE = 4  # untimed passes of the same size before each timed pass
_COSTS = (1, 2, 4, 8, 16, 33)  # nodes
_LLAMA, _LLAMA_TOKENS = "llama.cpp", 32
_TEXT = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
_PROMPT = "List five animals and their colours. Then list them again."

COLUMNS: list[Column] = [
    ("nodes", "{nodes}"),
    ("median", "{milliseconds:.1f}"),
    ("least", "{least:.1f}"),
    ("in one-node passes", "{passes:.2f}"),
    ("of reading its weights", "{read:.2f}x"),
    ("of llama.cpp's token", "{llama:.2f}x"),
    ("prefill, tokens/s", "{prefill:.0f}"),
    ("faster than llama.cpp's", "{prefill_speed:.2f}x"),
]


def drafts_equal(pipe: Pipeline) -> bool:
    """Whether drafted and plain decoding give equal tokens, which is also printed if not."""
    options: dict[str, Any] = {"max_new_tokens": 48, "temperature": 0.0, "nodes": 8}
    answers = [
        Pipeline(pipe.target, pipe.processor, drafter).generate(_PROMPT, **options).token_ids
        for drafter in (Ngram(), None)
    ]
    if answers[0] != answers[1]:
        click.echo(f"{pipe.name}: speculative and plain decoding differ", err=True)
    return answers[0] == answers[1]


@torch.inference_mode()
def divergences(model: str, pipes: Mapping[str, Pipeline]) -> dict[str, float]:
    """Mean KL divergences in nats of next-token distributions from the float32 model, over 400 tokens."""
    exact = mmspec.load(model, drafter=None, dtype="float32")
    ids = exact.processor.tokenizer(_TEXT.read_text(), return_tensors="pt")["input_ids"][:, :400]
    expected = exact.model(ids).logits
    del exact
    return {name: kl_divergence(expected, pipe.model(ids).logits) for name, pipe in pipes.items()}


def kl_divergence(exact: Tensor, logits: Tensor) -> float:
    """Mean over positions of the KL divergence of softmaxes, in nats: logits (1, length, vocab)."""
    expected, actual = (each.float().log_softmax(-1) for each in (exact, logits))
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


def time_passes(
    pipes: Mapping[str, Pipeline],
    threads: Sequence[int],
    depths: Sequence[int],
    nodes: Sequence[int],
    rounds: int,
    servers: Mapping[int, LlamaServer],
) -> list[dict[str, Any]]:
    """Time prefills, passes and reads of the weights, interleaved, after one unmeasured round.

    Args:
        servers: llama.cpp by number of threads: its prefill of the same number of tokens, and its plain decoding.

    Returns:
        A row per number of threads, depth, form of the weights (or llama.cpp) and number of nodes.
    """
    found: dict[tuple[Any, ...], list[float]] = {}
    for turn in range(rounds + 1):
        for count in threads:
            torch.set_num_threads(count)
            for depth in rotated(depths, turn):
                for name, pipe in rotated(list(pipes.items()), turn):
                    for part, seconds in _pass_seconds(pipe.target, depth, rotated(nodes, turn)).items():
                        found.setdefault((count, depth, name, part), []).append(seconds)
                if count in servers:
                    answer = servers[count].complete(range(1000, 1000 + depth), _LLAMA_TOKENS, ignore_eos=True)
                    for part, seconds in (("prefill", answer.prompt_seconds), (1, answer.token_seconds)):
                        found.setdefault((count, depth, _LLAMA, part), []).append(seconds)
    return pass_rows({name: seconds[1:] for name, seconds in found.items()}, nodes)


def _pass_seconds(target: TransformersTarget, depth: int, nodes: Sequence[int]) -> dict[Any, float]:
    """Seconds of a prefill, of a pass over each number of nodes after it, and of a read of the weights."""
    begun = clock()
    list(target.prefill([Prompt(torch.zeros(1, depth, dtype=torch.long, device=target.device))], [max(nodes)]))
    seconds: dict[Any, float] = {"prefill": clock() - begun}
    seconds |= {count: time_pass(target, count) for count in nodes}
    if (read := read_weights(target)) is not None:
        seconds[READ] = read()
    target.keep([])
    return seconds


def time_pass(target: TransformersTarget, nodes: int) -> float:
    """Seconds of a verify pass over a chain of ``nodes`` nodes, including the host's read of the choices.

    As in decoding, other passes precede it, so that the caches hold the same part of the weights.
    """
    parents = torch.arange(-1, nodes - 1, device=target.device)[None]
    tree = TokenTree(torch.zeros_like(parents), parents)
    for _ in range(_BEFORE):
        target.verify(tree)
    begun = clock()
    target.verify(tree).logits.max(-1).indices.tolist()
    return clock() - begun


def pass_costs(target: TransformersTarget) -> dict[str, list[float]]:
    """Medians of three passes over chains: ``seconds`` by total number of ``tokens``."""
    spent = [_pass_seconds(target, 8, _COSTS) for _ in range(3)]
    return {"tokens": [*_COSTS], "seconds": [median(one[count] for one in spent) for count in _COSTS]}


def read_weights(target: TransformersTarget) -> Callable[[], float] | None:
    """Function that times a read of the packed weights of a target's layers; None without packed weights."""
    layers = [layer for layer in target.model.modules() if isinstance(layer, BlockLinear)]
    blocks = [max(layer.buffers(), key=Tensor.numel) for layer in layers]
    if not blocks:
        return None

    def run() -> float:
        begun = clock()
        for part in blocks:
            cpu_library.functions().read_bytes(part.data_ptr(), part.numel(), cpu.kernel_threads())
        return clock() - begun

    return run


def pass_rows(found: Mapping[tuple[Any, ...], Sequence[float]], nodes: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the table from seconds by round; ratios are medians over the rounds of ratios within a round."""

    def ratio(own: tuple[Any, ...], other: tuple[Any, ...]) -> float | None:
        pairs = zip(found.get(own, ()), found.get(other, ()), strict=False)
        ratios = [a / b for a, b in pairs]
        return median(ratios) if ratios else None

    rows = []
    for key in (key for key in sorted(found, key=lambda key: key[:2]) if key[3] != "prefill"):
        count, depth, form, part = key
        where, peer = (count, depth, form), (count, depth, _LLAMA)
        row = {"threads": count, "depth": depth, "dtype": form, "nodes": part}
        row |= {"milliseconds": 1000 * median(found[key]), "least": 1000 * min(found[key])}
        row |= {"passes": ratio(key, (*where, 1)), "read": None if part == READ else ratio(key, (*where, READ))}
        if part == min(nodes) or form == _LLAMA:
            row["llama"] = ratio(key, (*peer, 1)) if part == 1 else None
            row["prefill"] = depth / median(found[*where, "prefill"])
            row["prefill_speed"] = ratio((*peer, "prefill"), (*where, "prefill"))
        rows.append(row)
    return rows
