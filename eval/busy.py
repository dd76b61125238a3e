"""Decoding speed under CPU contention, by number of threads: ``python -m mmspec.eval busy``.

The same prompt is decoded with 1, 2, 4, ... threads, up to all processors, with and without concurrent compute-bound
programs, interleaved. A decoder whose threads wait for each other stalls when one of them is descheduled.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter as clock
from typing import Any

import click
import torch

import mmspec
from mmspec.eval.harness.output import SIZES, Column, benchmark, make_table, wide_console
from mmspec.eval.harness.passes import describe
from mmspec.eval.harness.peers import LlamaServer
from mmspec.eval.harness.timing import wait_for_huge_pages

_PROMPT = "Tell me about the sea."
_LLAMA_TOKENS = 16
_LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(10**5))"  # until its parent exits

_COLUMNS: list[Column] = [
    ("decoder", "{decoder}"),
    ("threads", "{threads}"),
    ("alone, tokens/s", "{alone:.1f}"),
    ("over one thread", "{alone_over_one:.2f}"),
    ("beside them, tokens/s", "{beside:.1f}"),
    ("over one thread", "{beside_over_one:.2f}"),
]


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Run compute-bound programs during the block."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            running.append(subprocess.Popen([sys.executable, "-S", "-c", _LOOP, str(os.getpid())]))
        yield
    finally:
        for program in running:
            program.kill()
        for program in running:
            program.wait()


def decode_rate(pipe: mmspec.Pipeline, seconds: float) -> float:
    """Tokens per second after the first token, for an answer stopped after ``seconds``."""
    first, tokens, now = None, 0, clock()
    for piece in pipe.stream(_PROMPT, max_new_tokens=10_000, temperature=0.0, ignore_eos=True):
        now = clock()
        if first is None:
            first = now
        else:
            tokens += len(piece.token_ids)
        if now - first >= seconds:
            break
    assert first is not None
    return tokens / (now - first)


@benchmark
@click.option("--model", default="smollm2", show_default=True)
@click.option("--dtype", "dtypes", multiple=True, default=("int4", "float32"), show_default=True)
@click.option("--busy", type=click.IntRange(1), help="Programs that compute; by default one per processor.")
@click.option("--threads", type=SIZES, help="Numbers of threads; by default 1, 2, 4, ... and all processors.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Of each answer.")
@click.option("--llama-server", help="Path of llama.cpp's server, which decodes the same GGUF file.")
def main(
    model: str,
    dtypes: tuple[str, ...],
    busy: int | None,
    threads: Sequence[int] | None,
    rounds: int,
    seconds: float,
    llama_server: str | None,
) -> dict[str, Any]:
    """Measure decoding speed beside other programs: a table of medians, then one JSON line."""
    processors = len(os.sched_getaffinity(0))
    busy = busy or processors
    counts = sorted({1, *(threads or [2**i for i in range(processors.bit_length())] + [processors])})
    pipes = {dtype: mmspec.load(model, drafter=None, device="cpu", dtype=dtype) for dtype in dtypes}
    wait_for_huge_pages()
    rates: dict[tuple[str, int, int], list[float]] = {}
    before = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        servers = {n: LlamaServer(llama_server, model, n) for n in counts} if llama_server else {}
        prompt = pipes[dtypes[0]].encode([{"prompt": _PROMPT}]).input_ids[0].tolist()
        for _ in range(rounds):
            for programs in (0, busy):
                with busy_programs(programs):
                    for count in counts:
                        torch.set_num_threads(count)
                        for dtype, pipe in pipes.items():
                            rates.setdefault((dtype, count, programs), []).append(decode_rate(pipe, seconds))
                        if count in servers:
                            answer = servers[count].complete(prompt, _LLAMA_TOKENS, ignore_eos=True)
                            rates.setdefault(("llama.cpp", count, programs), []).append(1 / answer.token_seconds)
    medians = {key: statistics.median(found) for key, found in rates.items()}
    table = [
        {
            "decoder": decoder,
            "threads": count,
            "alone": medians[decoder, count, 0],
            "alone_over_one": medians[decoder, count, 0] / medians[decoder, 1, 0],
            "beside": medians[decoder, count, busy],
            "beside_over_one": medians[decoder, count, busy] / medians[decoder, 1, busy],
        }
        for decoder, count, programs in sorted(medians)
        if not programs
    ]
    title = f"decoding alone and beside {busy} busy programs"
    wide_console().print(make_table(_COLUMNS, table, sections=["decoder"], title=title))
    about = {"model": model, **describe(pipes[dtypes[0]].target), "busy": busy, "rounds": rounds}
    return {**about, "load": os.getloadavg()[0], "rates": table}
