"""Benchmark in the form of llama-bench: ``python -m mmspec.eval bench``.

A row is a combination of the options that take lists: forms of the weights (``--dtypes``), CPU threads, busy programs,
then prompt depths and nodes of a verify pass or, with ``--methods``, batch sizes and decoding methods. All combinations
are measured interleaved, for several rounds; times are medians, ratios medians of ratios within a round or a prompt.

Without ``--methods``, verify passes over chains are timed after prompts of each depth, with the prefill of the prompt
and a loop that only reads the packed weights.

With ``--methods``, requests are answered by each method; answers must equal the first method's at the first batch size.
A batch size of one decodes one request after another, a larger one keeps as many sequences running until all requests
are answered (goodput, SmartSpec, arXiv 2406.14066). Drafters learn from request to request,
but start every round of a request in the same state, so no request is drafted from its own answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import torch
from torch import Tensor

import mmspec
from mmspec.cli.options import Listed
from mmspec.drafters.ngram import Ngram
from mmspec.engine.stats import Stats
from mmspec.errors import UserError
from mmspec.eval.harness.output import Column, benchmark, describe, make_table, wide_console
from mmspec.eval.harness.peers import LlamaServer, OpenVino
from mmspec.eval.harness.prompts import held_out_requests, warm_up_requests
from mmspec.eval.harness.timing import (
    PHASES,
    READ,
    DecodingOptions,
    Method,
    TimedBatch,
    decode,
    pass_seconds,
    rotated,
    wait_for_huge_pages,
)
from mmspec.eval.suite.command import SIZES, llama_server_option
from mmspec.eval.suite.methods import BASELINE, LLAMA, OPENVINO, PLAIN, parse_methods
from mmspec.eval.suite.race import read_requests
from mmspec.pipeline import Pipeline

_LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(10**5))"  # until its parent exits


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Run compute-bound programs during the block."""
    with ExitStack() as stack:
        for _ in range(count):
            program = subprocess.Popen([sys.executable, "-S", "-c", _LOOP, str(os.getpid())])
            stack.callback(program.wait)
            stack.callback(program.kill)
        yield


@dataclass
class Cell:
    """A method under the conditions of a row, and its measurements.

    Attributes:
        busy: measured next to this number of busy programs.
        seconds: medians over the rounds, with the keys of ``TimedBatch.seconds``, by unit: a request, or all requests
            that a batch decoded.
        tokens, answers: by unit, new tokens and the number of answers.
        stats: of all requests, in the last round.
        equal: number of answers that equal the reference in all rounds.
    """

    pipe: Pipeline
    method: Method
    dtype: str
    threads: int
    busy: int
    batch: int
    seconds: list[dict[str, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    equal: int = 0

    @property
    def conditions(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("dtype", "threads", "busy", "batch")}

    def add(self, rounds: Sequence[TimedBatch], expected: Sequence[Sequence[int]]) -> None:
        """Add the rounds of a unit."""
        times = [one.seconds for one in rounds]
        self.seconds.append({name: median(spent[name] for spent in times) for name in times[0]})
        self.tokens.append(sum(map(len, rounds[-1].answers)))
        self.answers.append(len(expected))
        self.stats += rounds[-1].stats
        rows = zip(*(one.answers for one in rounds), strict=True)
        self.equal += sum(all(answer == right for answer in row) for row, right in zip(rows, expected, strict=True))

    def ratios(self, slow: Cell, name: str) -> list[float]:
        """Speedup over ``slow`` in seconds per token, by unit.

        Args:
            name: ``total`` for all new tokens, or ``decoding`` for tokens after the first. Units whose answers have no
                such tokens are left out.
        """
        first = name == "decoding"
        spent = [
            [(spent[name], tokens - first * count) for spent, tokens, count in zip(*columns, strict=True)]
            for columns in ((one.seconds, one.tokens, one.answers) for one in (slow, self))
        ]
        return [a * n / (b * m) for (a, m), (b, n) in zip(*spent, strict=True) if min(m, n) > 0]


def measure(cells: Sequence[Cell], requests: Sequence[dict[str, Any]], rounds: int, options: DecodingOptions) -> None:
    """Answer all requests by all cells, and add the measurements to them."""
    known: dict[Any, list[int]] = {}
    for size in dict.fromkeys(cell.batch for cell in cells):
        places = range(len(requests))
        alike = [cell for cell in cells if cell.batch == size]
        for unit in [[place] for place in places] if size == 1 else [list(places)]:
            found: dict[int, list[TimedBatch]] = {}
            for turn in range(rounds):
                for busy in rotated(list(dict.fromkeys(cell.busy for cell in alike)), turn):
                    with busy_programs(busy):
                        for cell in rotated([cell for cell in alike if cell.busy == busy], turn):
                            torch.set_num_threads(cell.threads)
                            asked = [requests[place] for place in unit]
                            one = decode(cell.pipe, cell.method, asked, options, learn=turn == rounds - 1)
                            found.setdefault(id(cell), []).append(one)
            for cell in alike:
                # The rows of a batch have other seeds than single requests.
                keys = [(cell.dtype, place, options.temperature > 0 and size) for place in unit]
                own = found[id(cell)][0].answers
                cell.add(found[id(cell)], [known.setdefault(*pair) for pair in zip(keys, own, strict=True)])


def make_cells(
    pipes: Mapping[str, Pipeline],
    methods: str,
    threads: Sequence[int],
    busy: Sequence[int],
    sizes: Sequence[int],
    peers: Callable[[int], Mapping[str, Any]],
    sampled: bool,
) -> list[Cell]:
    """A cell per combination; other engines and transformers decode greedily, one request after another."""
    cells = []
    for dtype, pipe in pipes.items():
        for count in threads:
            for programs in busy:
                for size in sizes:
                    target = pipe.target.fork()  # pipelines over one target share an engine
                    for method in parse_methods(methods, target, peers(count)):
                        other = method.peer is not None or method.generate_options is not None
                        if other and (sampled or size > 1):
                            continue
                        method.target, method.max_num_seqs = target, size
                        cells.append(Cell(pipe, method, dtype, count, programs, size))
    return cells


def rows_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row of results per cell: medians and minima over the units of ratios in seconds per token.

    ``shares`` are of the time of a request by phase; ``tree_passes`` and ``pass_passes`` are the times to draft a tree
    and to verify it, in passes of plain decoding.
    """
    rows = []
    for cell in cells:
        alike = {one.method.name: one for one in cells if one.conditions == cell.conditions}
        plain, steps = alike[PLAIN], Stats.combined(cell.stats) if cell.stats else Stats()
        total, decoding = cell.ratios(plain, "total"), cell.ratios(plain, "decoding")
        spent = [sum(one[name] for one in cell.seconds) for name in ("total", "decoding")]
        later = sum(cell.tokens) - sum(cell.answers)
        row = {
            **cell.conditions,
            "method": cell.method.name,
            "tokens_per_step": fmean([one.mean_acceptance_length for one in cell.stats if one.num_spec_steps] or [1.0]),
            "nodes_per_step": steps.num_draft_tokens / max(steps.num_spec_steps, 1),
            "ratio_generate": median(cell.ratios(alike[BASELINE], "total")) if BASELINE in alike else None,
            "ratio_plain": median(total),
            "ratio_plain_worst": min(total),
            "decoding_ratio_plain": median(decoding) if decoding else None,
            "decoding_ratio_plain_worst": min(decoding, default=None),
            "tokens_per_second": sum(cell.tokens) / spent[0],
            "decoding_tokens_per_second": later / spent[1] if later else None,
            "equal": None if cell.method.peer else cell.equal,
            "answers": sum(cell.answers),
        }
        if PHASES[0] in cell.seconds[0]:
            shares = {phase: fmean(one[phase] / one["total"] for one in cell.seconds) for phase in PHASES}
            row["shares"] = {**shares, "rest": 1 - sum(shares.values())}
            for name in ("tree", "pass"):
                # An adaptive method may not have drafted for some requests.
                pairs = [(a[name], b["pass"]) for a, b in zip(cell.seconds, plain.seconds, strict=True) if a[name] > 0]
                row[f"{name}_passes"] = median(a / b for a, b in pairs) if pairs else 0.0
        rows.append(row)
    return rows


_CONDITIONS = ("dtype", "threads", "busy", "batch")
_ANSWERS: list[Column] = [
    ("method", "{method}"),
    ("tokens per step", "{tokens_per_step:.2f}"),
    ("nodes", "{nodes_per_step:.1f}"),
    ("vs generate", "{ratio_generate:.2f}"),
    ("vs plain", "{ratio_plain:.2f}"),
    ("worst", "{ratio_plain_worst:.2f}"),
    ("decoding", "{decoding_ratio_plain:.2f}"),
    ("worst", "{decoding_ratio_plain_worst:.2f}"),
    ("tokens/s", "{tokens_per_second:.1f}"),
    ("decoding", "{decoding_tokens_per_second:.1f}"),
    ("equal", "{equal}/{answers}"),
]
_TIMES: list[Column] = [
    ("method", "{method}"),
    *((phase, lambda row, phase=phase: f"{row['shares'][phase]:.0%}") for phase in (*PHASES, "rest")),
    ("a tree, in passes", "{tree_passes:.2f}"),
    ("its verify pass", "{pass_passes:.2f}"),
]


def print_rows(columns: Sequence[Column], rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print a table, with a column for each condition that differs between rows."""
    varied = [name for name in (*_CONDITIONS, "depth") if len({row.get(name) for row in rows}) > 1]
    shown: list[Column] = [(name, f"{{{name}}}") for name in varied]
    sections = [name for name in varied if name != "dtype"]
    wide_console().print(make_table([*shown, *columns], rows, sections=sections, title=title))


_LLAMA_TOKENS = 32
_TEXT = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
_PROMPT = "List five animals and their colours. Then list them again."

_PASSES: list[Column] = [
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
                    for part, seconds in pass_seconds(pipe.target, depth, rotated(nodes, turn)).items():
                        found.setdefault((count, depth, name, part), []).append(seconds)
                if count in servers:
                    answer = servers[count].complete(range(1000, 1000 + depth), _LLAMA_TOKENS, ignore_eos=True)
                    for part, seconds in (("prefill", answer.prompt_seconds), (1, answer.token_seconds)):
                        found.setdefault((count, depth, LLAMA, part), []).append(seconds)
    return pass_rows({name: seconds[1:] for name, seconds in found.items()}, nodes)


def pass_rows(found: Mapping[tuple[Any, ...], Sequence[float]], nodes: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the table from seconds by round; ratios are medians over the rounds of ratios within a round."""

    def ratio(own: tuple[Any, ...], other: tuple[Any, ...]) -> float | None:
        pairs = zip(found.get(own, ()), found.get(other, ()), strict=False)
        ratios = [a / b for a, b in pairs]
        return median(ratios) if ratios else None

    rows = []
    for key in (key for key in sorted(found, key=lambda key: key[:2]) if key[3] != "prefill"):
        count, depth, form, part = key
        where, peer = (count, depth, form), (count, depth, LLAMA)
        row = {"threads": count, "depth": depth, "dtype": form, "nodes": part}
        row |= {"milliseconds": 1000 * median(found[key]), "least": 1000 * min(found[key])}
        row |= {"passes": ratio(key, (*where, 1)), "read": None if part == READ else ratio(key, (*where, READ))}
        if part == min(nodes) or form == LLAMA:
            row["llama"] = ratio(key, (*peer, 1)) if part == 1 else None
            row["prefill"] = depth / median(found[*where, "prefill"])
            row["prefill_speed"] = ratio((*peer, "prefill"), (*where, "prefill"))
        rows.append(row)
    return rows


def load_requests(source: str, warm_up: int, visual: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Requests that warm up and requests to measure: of a file, or of held-out sets, ``SET:COUNT`` separated by commas.

    Raises:
        UserError: an unreadable file, an unknown set, or too few requests.
    """
    if Path(source).is_file():
        requests = read_requests(Path(source))
        if len(requests) <= warm_up:
            raise UserError(f"{source}: expected more than {warm_up} requests, the first of which warm up")
        return requests[:warm_up], requests[warm_up:]
    measured = []
    for part in source.split(","):
        name, _, count = part.strip().partition(":")
        if not (count.isdecimal() and int(count)):
            raise UserError(f"requests must be a file or SET:COUNT, separated by commas: got {part!r}")
        measured += held_out_requests(name, int(count))
    return warm_up_requests(warm_up, visual), measured


@benchmark
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--dtypes", type=Listed(click.STRING), default="auto", show_default=True, help="Forms of weights.")
@click.option("--threads", type=SIZES, help="CPU threads; torch's default if not given.")
@click.option("--busy", type=Listed(click.IntRange(0)), default="0", show_default=True, help="Busy programs beside it.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--depths", type=SIZES, default="42", show_default=True, help="Prompt tokens before verify passes.")
@click.option("--nodes", type=SIZES, default="1,2,4,8,16", show_default=True, help="Of verify passes.")
@click.option("--divergence", is_flag=True, help="Measure divergences from the float32 weights, which are loaded.")
@click.option("--methods", help="As for mmspec eval: answer requests instead of timing passes.")
@click.option("--batch-sizes", type=SIZES, default="1", show_default=True, help="Sequences that decode together.")
@click.option("--requests", "source", help="A file as for mmspec tune, or SET:COUNT, ... of held-out sets.")
@click.option("--warm-up", type=click.IntRange(0), default=4, show_default=True, help="Unmeasured requests.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=160, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@llama_server_option
def main(
    model: str,
    dtypes: Sequence[str],
    threads: Sequence[int] | None,
    busy: Sequence[int],
    rounds: int,
    depths: Sequence[int],
    nodes: Sequence[int],
    divergence: bool,
    methods: str | None,
    batch_sizes: Sequence[int],
    source: str | None,
    warm_up: int,
    max_new_tokens: int,
    temperature: float,
    llama_server: str | None,
) -> dict[str, Any]:
    """Measure verify passes or, with --methods, answers: tables, then one JSON line."""
    before = torch.get_num_threads()
    threads = threads or (before,)
    start_llama = cache(partial(LlamaServer, llama_server, model)) if llama_server else None

    @cache
    def peers(count: int) -> dict[str, Any]:
        return {OPENVINO: cache(partial(OpenVino, model, count))} | (
            {LLAMA: partial(start_llama, count)} if start_llama else {}
        )

    pipes = {dtype: mmspec.load(model, drafter=None, dtype=dtype) for dtype in dtypes}
    about = {"model": model, **describe(next(iter(pipes.values())).target), "rounds": rounds}
    wait_for_huge_pages()
    try:
        if methods is None:
            about["equal"] = {dtype: drafts_equal(pipe) for dtype, pipe in pipes.items()}
            about["divergence"] = divergences(model, pipes) if divergence else {}
            servers = {count: start_llama(count) for count in threads} if start_llama else {}
            rows = []
            for programs in busy:
                with busy_programs(programs):
                    found = time_passes(pipes, threads, depths, nodes, rounds, servers)
                rows += [{"busy": programs, **row} for row in found]
            print_rows(_PASSES, rows, "milliseconds per verify pass")
            for dtype, nats in about["divergence"].items():
                click.echo(f"{dtype}: {nats:.5f} nats from float32", err=True)
            return {**about, "rows": rows}
        visual = next(iter(pipes.values())).processor.reads_media
        first, requests = load_requests(source or ("images:24,clips:8" if visual else "prompts:16"), warm_up, visual)
        cells = make_cells(pipes, methods, threads, busy, batch_sizes, peers, temperature > 0)
        options = DecodingOptions(max_new_tokens, temperature)
        for cell in cells:
            torch.set_num_threads(cell.threads)
            for request in first:
                decode(cell.pipe, cell.method, [request], options)
        measure(cells, requests, rounds, options)
    finally:
        torch.set_num_threads(before)
    rows = rows_of(cells)
    print_rows(_ANSWERS, rows, f"{len(requests)} requests, medians and minima of speedups in seconds per token")
    print_rows(_TIMES, [row for row in rows if "shares" in row], "shares of a request's time; cost of a tree")
    return {**about, "temperature": temperature, "requests": len(requests), "rows": rows}
