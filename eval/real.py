"""Passes of a real language model by the form of its weights: ``python -m mmspec.eval real``.

Every form (as in the file, packed bfloat16, int8, int4, and bfloat16 by ``F.linear``) runs passes over 1, 2, 4, ...
nodes after one prompt, interleaved, on one and on two threads. Beside them, if ``--llama-server`` is given, llama.cpp
decodes the same GGUF file plainly after as many tokens with as many threads; and the bytes of the bfloat16 weights are
read from memory.
Columns of ratios are medians over the rounds of ratios within a round. With ``--prefixes``, passes over one node and
over a tree, and the prefill, are timed after prompts of these lengths instead.

First, each form decodes a prompt with a look-up drafter and plainly, and forms whose tokens differ are named. The
divergence of each form's next-token distributions from those of the float32 weights is measured on 400 tokens of the
repository's CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

import mmspec
from mmspec import plugins
from mmspec.checks import choice, listed
from mmspec.cli.options import Value
from mmspec.drafters.ngram import Ngram
from mmspec.eval.decoding.passes import (
    UNPACKED,
    divergence,
    load_as,
    plain_step,
    ratio,
    read_bytes,
    start,
    verify_pass,
)
from mmspec.eval.decoding.prefixes import PREFIX_COLUMNS, measure_prefixes
from mmspec.eval.harness.interleaved import interleaved
from mmspec.eval.harness.llama_server import LlamaServer
from mmspec.eval.harness.options import SIZES, llama_server_option
from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget

FORMS = ("auto", "bfloat16", "int8", "int4", UNPACKED)
PACKED = FORMS[:-1]
_LLAMA, _READ = "llama.cpp", "read"
_TEXT = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
_PROMPT = "List five animals and their colours. Then list them again."


@benchmark
@click.option("--model", default="smollm2", show_default=True, help="A name that is registered, or a GGUF file.")
@click.option("--threads", type=SIZES, default="1,2", show_default=True)
@click.option("--nodes", type=SIZES, default="1,2,4,8,16", show_default=True)
@click.option("--prefix", default=42, show_default=True, help="Tokens of the prompt.")
@click.option("--prefixes", type=SIZES, help="Lengths of prompts after which one node, a tree and prefill are timed.")
@click.option("--forms", type=Value(listed(choice(*PACKED))), default=",".join(PACKED), show_default=True)
@click.option("--rounds", default=15, show_default=True)
@llama_server_option
def main(model: str, threads: tuple[int, ...], llama_server: str | None, **options: Any) -> dict[str, Any]:
    """Measure verify passes: a table per number of threads, then one JSON line."""
    servers = {count: LlamaServer(llama_server, model, count) for count in threads} if llama_server else {}
    folder = plugins.model_path(model)
    targets, equal, divergences = {}, {}, {}
    exact, processor = load_as(folder, "float32")
    ids = processor.tokenizer(_TEXT.read_text(), return_tensors="pt")["input_ids"][:, :400]
    with torch.inference_mode():
        expected = exact.model(ids).logits
    for form in (*options["forms"], *(() if options["prefixes"] else (UNPACKED,))):
        targets[form], processor = load_as(folder, form)
        equal[form] = decodes_equally(targets[form], processor)
        if not equal[form]:
            click.echo(f"{form}: speculative and plain decoding differ", err=True)
        divergences[form] = divergence(targets[form], expected, ids)
        click.echo(f"{form}: diverges by {divergences[form]:.5f} nats from float32", err=True)
    tables = {}
    for count in threads:
        torch.set_num_threads(count)
        if options["prefixes"]:
            tables[count] = measure_prefixes(targets, options["prefixes"], options["rounds"])
            wide_console().print(make_table(PREFIX_COLUMNS, tables[count], title=f"after a prompt, threads: {count}"))
            continue
        for target in targets.values():
            start(target, options["prefix"], max_new_tokens=max(options["nodes"]))
        llama = plain_step(servers[count], options["prefix"]) if servers else None
        tables[count] = measure(targets, options["nodes"], options["rounds"], llama)
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
    targets: dict[str, TransformersTarget], nodes: tuple[int, ...], rounds: int, llama: Callable[[], float] | None
) -> list[dict[str, Any]]:
    """Rows of the table, one per form and number of nodes.

    Args:
        llama: returns the seconds per token of llama.cpp.
    """
    calls: dict[Any, Callable[[], float]] = {
        (form, count): verify_pass(target, count) for form, target in targets.items() for count in nodes
    }
    calls[_READ] = read_bytes(2 * sum(p.numel() for p in targets[UNPACKED].model.parameters()))
    if llama is not None:
        calls[_LLAMA] = llama
    times = interleaved(calls, rounds)
    rows: list[dict[str, Any]] = []
    for name, seconds in times.items():
        form, count = name if isinstance(name, tuple) else (name, 1)
        row = {"form": form, "nodes": count, "milliseconds": 1000 * median(seconds), "least": 1000 * min(seconds)}
        if isinstance(name, tuple):
            row["speedup"] = ratio(times, (UNPACKED, count), name)
            if count == 1:
                row["read"] = ratio(times, name, _READ)
                row["llama"] = ratio(times, name, _LLAMA) if llama is not None else None
        rows.append(row)
    return rows


_COLUMNS: list[Column] = [
    ("weights", "{form}"),
    ("nodes", "{nodes}"),
    ("median", "{milliseconds:.1f}"),
    ("least", "{least:.1f}"),
    ("faster than F.linear", "{speedup:.2f}x"),
    ("of llama.cpp's token", "{llama:.2f}x"),
    ("of reading bfloat16", "{read:.2f}x"),
]
