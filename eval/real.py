"""Passes of a real language model by the form of its weights: ``python -m mmspec.eval real``.

Every form (as in the file, packed bfloat16, int8, int4) runs passes over 1, 2, 4, ... nodes after one prompt,
interleaved, on one and on two threads, with a loop that only reads that form's packed weights. In addition, if
``--llama-server`` is given, llama.cpp decodes the same GGUF file plainly after as many tokens with as many threads, and
both prefill a longer prompt. Columns of ratios are medians over the rounds of ratios within a round. With
``--prefixes``, passes over one node and over a tree, and the prefill, are timed after prompts of these lengths instead.

First, each form decodes a prompt with a lookup drafter and plainly, and forms whose tokens differ are named. With
``--divergence``, the divergence of each form's next-token distributions from the float32 weights' is measured
on 400 tokens of the repository's CONTRIBUTING.md.
"""

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
from mmspec import plugins
from mmspec.cli.options import Listed
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.drafters.ngram import Ngram
from mmspec.eval.harness.output import SIZES, Column, benchmark, make_table, wide_console
from mmspec.eval.harness.peers import LlamaServer
from mmspec.eval.harness.timing import interleaved, wait_for_huge_pages
from mmspec.eval.suite.settings import llama_server_option
from mmspec.loading import load_target
from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import BlockLinear
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget

PACKED = ("auto", "bfloat16", "int8", "int4")
TREE = 8
"""Nodes of the larger pass after a long prompt."""
PROMPT = 512
"""Tokens whose prefill is compared with llama.cpp's."""

_PASSES = 3  # timed passes per size and prefill; the fastest counts
_BEFORE = 4  # untimed passes of the same size before each timed pass
_LLAMA, _READ = "llama.cpp", "read"
_TEXT = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
_PROMPT = "List five animals and their colours. Then list them again."


@torch.inference_mode()
def divergence(target: TransformersTarget, exact: Tensor, ids: Tensor) -> float:
    """Mean KL divergence in nats of a target's next-token distributions from the exact distributions, over a text.

    Args:
        exact: (1, length, vocab), logits with exact weights.
        ids: (1, length) int64, the text.
    """
    expected, actual = (logits.float().log_softmax(-1) for logits in (exact, target.model(ids).logits))
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


def start(target: TransformersTarget, prefix: int, max_new_tokens: int) -> None:
    """Prefill ``prefix`` tokens."""
    list(target.prefill([Prompt(torch.arange(prefix)[None] + 1000)], [max_new_tokens]))


def verify_pass(target: TransformersTarget, nodes: int) -> Callable[[], float]:
    """Function that times a verify pass over a chain of ``nodes`` nodes, including the host's read of the choices.

    As in decoding, other passes precede it, so that the caches hold the same part of the weights.
    """
    tree = TokenTree(torch.arange(nodes)[None] + 500, torch.arange(nodes)[None] - 1)

    def run() -> float:
        for _ in range(_BEFORE):
            target.verify(tree)
        start = clock()
        target.verify(tree).logits.max(-1).indices.tolist()
        return clock() - start

    return run


def plain_step(server: LlamaServer, prefix: int) -> Callable[[], float]:
    """Function that returns llama.cpp's plain decoding time in seconds per token, after ``prefix`` tokens."""
    prompt = range(1000, 1000 + prefix)
    return lambda: server.complete(prompt, 32, ignore_eos=True).token_seconds


def prefill_alone(target: TransformersTarget, prefix: int) -> Callable[[], float]:
    """Function that times a prefill of ``prefix`` tokens and discards its state."""

    def run() -> float:
        begun = clock()
        start(target, prefix, max_new_tokens=1)
        seconds = clock() - begun
        target.keep([])
        return seconds

    return run


def read_weights(target: TransformersTarget) -> Callable[[], float] | None:
    """Function that times reading the packed weights of a target's layers; None without packed weights."""
    blocks = [layer._blocks for layer in target.model.modules() if isinstance(layer, BlockLinear)]
    if not blocks:
        return None

    def run() -> float:
        begun = clock()
        for part in blocks:
            cpu_library.functions().read_bytes(part.data_ptr(), part.numel(), cpu.kernel_threads())
        return clock() - begun

    return run


def ratio(found: Mapping[Any, Sequence[float]], name: Any, other: Any) -> float:
    """Median over the rounds of the ratio of two calls' times."""
    return median(a / b for a, b in zip(found[name], found[other], strict=True))


def measure_prefixes(
    targets: Mapping[str, TransformersTarget], prefixes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Rows of the table, one per target and length: medians over the rounds, ratios to the first length's."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(rounds + 1):  # the first is not measured
        for prefix in prefixes:
            for form, target in targets.items():
                found.setdefault((form, prefix), []).append(seconds_after(target, prefix))
    rows: list[dict[str, Any]] = []
    for (form, prefix), rounds_of in found.items():
        one, tree, prefill = (median(row[name] for row in rounds_of[1:]) for name in ("one", "tree", "prefill"))
        row: dict[str, Any] = {"form": form, "prefix": prefix, "milliseconds": 1000 * one, "tree": 1000 * tree}
        row |= {"passes": tree / one, "prefill": prefix / prefill}
        first = next((other for other in rows if other["form"] == form), row)
        row["speed"] = first["milliseconds"] / row["milliseconds"]
        row["prefill_speed"] = row["prefill"] / first["prefill"]
        rows.append(row)
    return rows


def seconds_after(target: TransformersTarget, prefix: int) -> dict[str, float]:
    """Seconds of a prefill of ``prefix`` tokens (``prefill``), then of passes over one node (``one``) and ``TREE``."""
    begun = clock()
    start(target, prefix, max_new_tokens=TREE)
    seconds = {"prefill": clock() - begun}
    for name, nodes in (("one", 1), ("tree", TREE)):
        run = verify_pass(target, nodes)
        seconds[name] = min(run() for _ in range(_PASSES))
    target.keep([])
    return seconds


PREFIX_COLUMNS: list[Column] = [
    ("weights", "{form}"),
    ("prefix", "{prefix}"),
    ("1 node, ms", "{milliseconds:.1f}"),
    ("speed", "{speed:.2f}"),
    (f"{TREE} nodes, ms", "{tree:.1f}"),
    ("in passes", "{passes:.2f}"),
    ("prefill, tokens/s", "{prefill:.0f}"),
    ("prefill speed", "{prefill_speed:.2f}"),
]


@benchmark
@click.option("--model", default="smollm2", show_default=True, help="A name that is registered, or a GGUF file.")
@click.option("--threads", type=SIZES, default="1,2", show_default=True)
@click.option("--nodes", type=SIZES, default="1,2,4,8,16", show_default=True)
@click.option("--prefix", default=42, show_default=True, help="Tokens of the prompt.")
@click.option("--prefixes", type=SIZES, help="Lengths of prompts after which one node, a tree and prefill are timed.")
@click.option("--forms", type=Listed(click.Choice(tuple(PACKED))), default=",".join(PACKED), show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--divergence", is_flag=True, help="Measure divergences from the float32 weights, which are loaded.")
@llama_server_option
def main(model: str, threads: tuple[int, ...], llama_server: str | None, **options: Any) -> dict[str, Any]:
    """Measure verify passes: a table per number of threads, then one JSON line."""
    servers = {count: LlamaServer(llama_server, model, count) for count in threads} if llama_server else {}
    folder = plugins.model_path(model)
    targets, equal, divergences = {}, {}, {}
    if options["divergence"]:
        exact, processor = load_target(folder, "cpu", "float32")
        ids = processor.tokenizer(_TEXT.read_text(), return_tensors="pt")["input_ids"][:, :400]
        with torch.inference_mode():
            expected = exact.model(ids).logits
        del exact
    for form in options["forms"]:
        targets[form], processor = load_target(folder, "cpu", form)
        equal[form] = decodes_equally(targets[form], processor)
        if not equal[form]:
            click.echo(f"{form}: speculative and plain decoding differ", err=True)
        if options["divergence"]:
            divergences[form] = divergence(targets[form], expected, ids)
            click.echo(f"{form}: diverges by {divergences[form]:.5f} nats from float32", err=True)
    wait_for_huge_pages()
    tables = {}
    for count in threads:
        torch.set_num_threads(count)
        if options["prefixes"]:
            tables[count] = measure_prefixes(targets, options["prefixes"], options["rounds"])
            wide_console().print(make_table(PREFIX_COLUMNS, tables[count], title=f"after a prompt, threads: {count}"))
            continue
        tables[count] = measure(targets, options["nodes"], options["prefix"], options["rounds"], servers.get(count))
        wide_console().print(make_table(_COLUMNS, tables[count], title=f"milliseconds per pass, threads: {count}"))
    about = {"model": model, "equal": equal, "divergence": divergences}
    return {**about, "prefix": options["prefixes"] or options["prefix"], "rounds": options["rounds"], "threads": tables}


def decodes_equally(target: TransformersTarget, processor: Processor) -> bool:
    """Whether speculative and plain decoding of one form of the weights give equal tokens."""
    answers = [
        mmspec.Pipeline(target, processor, drafter).generate(_PROMPT, max_new_tokens=48, temperature=0.0).token_ids
        for drafter in (Ngram(), None)
    ]
    return answers[0] == answers[1]


def measure(
    targets: Mapping[str, TransformersTarget],
    nodes: Sequence[int],
    prefix: int,
    rounds: int,
    server: LlamaServer | None,
) -> list[dict[str, Any]]:
    """Rows of the table, one per form and number of nodes, and one of llama.cpp.

    Args:
        prefix: tokens before the passes.
    """
    prompts: dict[Any, Callable[[], float]] = {}
    if server is not None:
        prompts = {form: prefill_alone(target, PROMPT) for form, target in targets.items()}
        prompts[_LLAMA] = lambda: server.complete(range(1000, 1000 + PROMPT), 1).prompt_seconds
    prefills = interleaved(prompts, max(rounds // 3, 1))
    calls: dict[Any, Callable[[], float]] = {}
    for form, target in targets.items():
        start(target, prefix, max_new_tokens=max(nodes))
        calls |= {(form, count): verify_pass(target, count) for count in nodes}
        if (read := read_weights(target)) is not None:
            calls[form, _READ] = read
    if server is not None:
        calls[_LLAMA, 1] = plain_step(server, prefix)
    times = interleaved(calls, rounds)
    for target in targets.values():
        target.keep([])
    rows: list[dict[str, Any]] = []
    for (form, count), seconds in times.items():
        row = {"form": form, "nodes": count, "milliseconds": 1000 * median(seconds), "least": 1000 * min(seconds)}
        if form != _LLAMA and 1 in nodes:
            row["passes"] = ratio(times, (form, count), (form, 1))
        if (form, _READ) in times and count != _READ:
            row["read"] = ratio(times, (form, count), (form, _READ))
        if count == 1 and server is not None:
            row["llama"] = ratio(times, (form, 1), (_LLAMA, 1))
            row["prefill"] = PROMPT / median(prefills[form])
            row["prefill_speed"] = ratio(prefills, _LLAMA, form)
        rows.append(row)
    return rows


_COLUMNS: list[Column] = [
    ("weights", "{form}"),
    ("nodes", "{nodes}"),
    ("median", "{milliseconds:.1f}"),
    ("least", "{least:.1f}"),
    ("in one-node passes", "{passes:.2f}"),
    ("of reading its weights", "{read:.2f}x"),
    ("of llama.cpp's token", "{llama:.2f}x"),
    (f"prefill of {PROMPT}, tokens/s", "{prefill:.0f}"),
    ("faster than llama.cpp's", "{prefill_speed:.2f}x"),
]
