"""Benchmark in the form of llama-bench: ``python -m mmspec.eval bench``, see ``docs/evaluation.md``.

All combinations of the options that take lists are measured interleaved, for several rounds; times are medians, ratios
medians of ratios within a round or a prompt. Drafters learn from request to request, but start every round of a request
in the same state, so no request is drafted from its own answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, product, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import mmspec
from mmspec.cli.options import Listed
from mmspec.core.target import Prompt
from mmspec.drafters.ngram import Ngram
from mmspec.engine.threads import fix_threads
from mmspec.errors import UserError
from mmspec.eval.harness.output import Column, benchmark, cell_text, describe, make_table, wide_console
from mmspec.eval.harness.peers import engines
from mmspec.eval.harness.prompts import held_out_requests, warm_up_requests
from mmspec.eval.harness.small_configs import number_processor
from mmspec.eval.harness.timing import (
    PHASES,
    READ,
    DecodingOptions,
    Method,
    TimedBatch,
    decode,
    pass_seconds,
    results_of,
    rotated,
    wait_for_huge_pages,
)
from mmspec.eval.suite import SIZES, peer_option
from mmspec.eval.suite.methods import BASELINE, PLAIN, SetAcceptance, parse_methods, with_rates
from mmspec.eval.suite.race import read_requests
from mmspec.eval.suite.report import equal_of_compared
from mmspec.eval.suite.summary import OVERALL, Record, by_request, figures, throughput
from mmspec.pipeline import Pipeline
from mmspec.targets.checkpoints import from_pretrained
from mmspec.targets.packing import pack_model, packs_bfloat16
from mmspec.targets.transformers_target import TransformersTarget

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


Request = dict[str, Any]


@dataclass
class Condition:
    """Methods, next to a number of ``busy`` programs, and their ``records`` for ``mmspec.eval.suite.summary``: one per
    request, or one of all requests that a batch decoded; ``answers`` are plain decoding's, for ``SetAcceptance``."""

    pipe: Pipeline
    dtype: str
    threads: int
    busy: int
    batch: int
    methods: list[Method]
    records: list[Record] = field(default_factory=list)
    answers: dict[Any, list[int]] = field(default_factory=dict)

    def decode(self, method: Method, requests: Sequence[dict[str, Any]], options: DecodingOptions, learn: bool) -> Any:
        """As ``mmspec.eval.harness.timing.decode``, which records plain answers to single requests."""
        batch = decode(self.pipe, method, requests, options, learn)
        if method.name == PLAIN and any(isinstance(one.drafter, SetAcceptance) for one in self.methods):
            self.answers[tuple(self.pipe.encode(requests).input_ids[0].tolist())] = batch.answers[0]
        return batch


def conditions_of(
    pipes: Mapping[str, Pipeline],
    methods: str,
    threads: Sequence[int],
    busy: Sequence[int],
    sizes: Sequence[int],
    peers: Callable[[int], Mapping[str, Any]],
    sampled: bool,
    acceptance: Sequence[float] = (),
) -> list[Condition]:
    """All combinations; other engines and transformers decode greedily, one request after another. Rates of
    ``acceptance`` replace each drafter by ``SetAcceptance``."""
    conditions = []
    for (dtype, pipe), count, programs, size in product(pipes.items(), threads, busy, sizes):
        target = pipe.target.fork()  # pipelines over one target share an engine
        chosen = parse_methods(methods, target, peers(count), pipe.name)
        if sampled or size > 1:
            chosen = [one for one in chosen if one.peer is None and one.generate_options is None]
        for method in chosen:
            method.target, method.max_num_seqs = target, size
        condition = Condition(pipe, dtype, count, programs, size, chosen)
        if acceptance:
            condition.methods = with_rates(chosen, acceptance, condition.answers, target)
        conditions.append(condition)
    return conditions


def measure(
    conditions: Sequence[Condition], sets: Mapping[str, Sequence[Request]], rounds: int, options: DecodingOptions
) -> None:
    """Answer the requests of all sets by all methods, and add the records. An answer is ``equal`` if it was the first
    method's in all rounds; ``differs_at`` is the place of the first other token."""
    known: dict[Any, list[int]] = {}
    for (task, requests), size in product(sets.items(), dict.fromkeys(one.batch for one in conditions)):
        alike, places = [one for one in conditions if one.batch == size], list(range(len(requests)))
        for unit in [[place] for place in places] if size == 1 else [places]:
            asked, timed = [requests[place] for place in unit], dict[tuple[int, str], list[TimedBatch]]()
            for turn in range(rounds):
                for busy in rotated(list(dict.fromkeys(one.busy for one in alike)), turn):
                    turns = [(one, method) for one in alike if one.busy == busy for method in one.methods]
                    with busy_programs(busy):
                        for one, method in rotated(turns, turn):
                            fix_threads(one.threads)
                            batch = one.decode(method, asked, options, learn=turn == rounds - 1)
                            timed.setdefault((id(one), method.name), []).append(batch)
            for one in alike:
                methods = {method.name: results_of(timed[id(one), method.name]) for method in one.methods}
                for method in one.methods:
                    answers = [batch.answers for batch in timed[id(one), method.name]]
                    # The rows of a batch have other seeds than single requests.
                    keys = [(one.dtype, task, place, options.temperature > 0 and size) for place in unit]
                    first = [known.setdefault(key, answer) for key, answer in zip(keys, answers[0], strict=True)]
                    equal = [all(rows[row] == right for rows in answers) for row, right in enumerate(first)]
                    methods[method.name] |= {"equal": [None] * len(unit) if method.peer else equal, "differences": []}
                    ends, pairs = one.pipe.target.eos_token_ids, zip(answers[0], first, strict=True)
                    methods[method.name]["differs_at"] = [difference(own, right, ends) for own, right in pairs]
                head = {"task": task, "group": unit[0], "ids": unit, "categories": [""] * len(unit)}
                one.records.append({**head, "turns": [{"rows": list(range(len(unit))), "methods": methods}]})


def difference(answer: Sequence[int], expected: Sequence[int], ends: Sequence[int]) -> int | None:
    """Place of an answer's first token that is not the expected token; None if they are equal, apart from
    end-of-sequence tokens, which some engines leave out."""
    own, right = ([token for token in tokens if token not in ends] for tokens in (answer, expected))
    places = (place for place, (one, other) in enumerate(zip_longest(own, right)) if one != other)
    return next(places, None)


def rows_of(conditions: Sequence[Condition]) -> list[dict[str, Any]]:
    """A row of results per condition, set of requests and method: ``figures`` and ``by_request`` of
    ``mmspec.eval.suite.summary``; tokens per second of the prefill, which gives the first token, and of ``decoding``
    after it; ``differs_at`` of each request."""
    rows, sets = [], dict.fromkeys(record["task"] for record in conditions[0].records)
    for one in conditions:
        where = {name: getattr(one, name) for name in _CONDITIONS[1:]}
        for task, method in product(sets, one.methods):
            records = [record for record in one.records if record["task"] == task]
            found = [record["turns"][0]["methods"][method.name] for record in records]
            results = figures(records, method.name) | by_request(records, method.name)[OVERALL]
            results |= {
                "prefill_tokens_per_second": throughput(records, method.name, "first", "prompt_tokens"),
                "decoding_tokens_per_second": throughput(records, method.name, "decoding", "later_tokens"),
                "differs_at": [place for result in found for place in result["differs_at"]],
            }
            rows.append({"task": task, **where, "method": method.name, **results})
    return sorted(rows, key=lambda row: list(sets).index(row["task"]))  # stable


_CONDITIONS = ("task", "dtype", "threads", "busy", "batch")
_ANSWERS: list[Column] = [
    ("method", "{method}"),
    ("tokens per step", "{acceptance[mean_acceptance_length]:.2f}"),
    ("nodes", "{acceptance[nodes_per_step]:.1f}"),
    ("vs generate", lambda row: f"{row['end_to_end']['median']:.2f}" if row["baseline"] == BASELINE else ""),
    ("vs plain", "{end_to_end_plain[median]:.2f}"),
    ("worst", "{slowest[total]:.2f}"),
    ("decoding", "{decoding_plain[median]:.2f}"),
    ("tokens/s", "{output_tokens_per_second:.1f}"),
    ("decoding", "{decoding_tokens_per_second:.1f}"),
    ("prefill", "{prefill_tokens_per_second:.0f}"),
    ("equal", equal_of_compared),
    ("differs at", lambda row: ", ".join(str(place) for place in row["differs_at"] if place is not None)),
]
_TIMES: list[Column] = [
    ("method", "{method}"),
    ("seconds", "{latency[mean]:.2f}"),
    *((phase, lambda row, phase=phase: f"{row['shares'][phase]:.0%}") for phase in (*PHASES, "rest")),
    ("a tree, in passes", "{draft_cost:.2f}"),
    ("its verify pass", "{verify_cost:.2f}"),
]


def print_rows(columns: Sequence[Column], rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print a table, with a column for each condition that differs between rows, without empty columns."""
    varied = [name for name in (*_CONDITIONS, "depth") if len({row.get(name) for row in rows}) > 1]
    shown: list[Column] = [(name, f"{{{name}}}") for name in varied]
    columns = [(header, cell) for header, cell in columns if any(cell_text(cell, row) for row in rows)]
    sections = [name for name in varied if name != "dtype"]
    wide_console().print(make_table([*shown, *columns], rows, sections=sections, title=title))


_TEXT = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
_PROMPT = "List five animals and their colours. Then list them again."

_PASSES: list[Column] = [
    ("nodes", "{nodes}"),
    ("median", "{milliseconds:.1f}"),
    ("least", "{least:.1f}"),
    ("in one-node passes", "{passes:.2f}"),
    ("of reading its weights", "{read:.2f}x"),
    ("prefill, tokens/s", "{prefill:.0f}"),
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
    return {name: kl_divergence(expected, prompt_logits(pipe.target, ids)) for name, pipe in pipes.items()}


def prompt_logits(target: TransformersTarget, ids: Tensor) -> Tensor:
    """Logits after each token of a prompt, (1, length, vocab)."""
    *_, output = target.prefill([Prompt(ids)], [1], ["last"])
    target.keep([])
    assert output is not None
    return target.head(output.features["last"])


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
) -> list[dict[str, Any]]:
    """Time prefills, passes and reads of the weights, interleaved, after one unmeasured round. Returns a row per number
    of threads, depth, form of the weights and number of nodes."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for turn in range(rounds + 1):
        for count in threads:
            torch.set_num_threads(count)
            for depth in rotated(depths, turn):
                for name, pipe in rotated(list(pipes.items()), turn):
                    for part, seconds in pass_seconds(pipe.target, depth, rotated(nodes, turn)).items():
                        found.setdefault((count, depth, name, part), []).append(seconds)
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
        where = (count, depth, form)
        row = {"threads": count, "depth": depth, "dtype": form, "nodes": part}
        row |= {"milliseconds": 1000 * median(found[key]), "least": 1000 * min(found[key])}
        row |= {"passes": ratio(key, (*where, 1)), "read": None if part == READ else ratio(key, (*where, READ))}
        if part == min(nodes):
            row["prefill"] = depth / median(found[*where, "prefill"])
        rows.append(row)
    return rows


def load_requests(source: str, warm_up: int, visual: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Warm-up and measured requests: of a file, or of held-out sets, ``SET:COUNT`` separated by commas, or none."""
    if Path(source).is_file():
        requests = read_requests(Path(source))
        if len(requests) <= warm_up:
            raise UserError(f"{source}: expected more than {warm_up} requests, the first of which warm up")
        return requests[:warm_up], requests[warm_up:]
    measured = []
    for part in source.split(",") if source else ():
        name, _, count = part.strip().partition(":")
        if not (count.isdecimal() and int(count)):
            raise UserError(f"requests must be a file or SET:COUNT, separated by commas: got {part!r}")
        measured += held_out_requests(name, int(count))
    return warm_up_requests(warm_up, visual), measured


def text_of(pipe: Pipeline, tokens: int) -> Request:
    """A request to continue this package's source code, whose prompt has about ``tokens`` tokens."""
    code = "".join(path.read_text() for path in sorted(Path(mmspec.__file__).parent.glob("*.py")))
    asked = "Continue this program:\n\n"
    own = pipe.encode([{"prompt": asked}]).input_ids.shape[1]
    ids = pipe.processor.tokenizer(code, add_special_tokens=False)["input_ids"]
    if tokens - own > len(ids):
        raise UserError(f"--depths with --methods must be at most {len(ids) + own} for this model: got {tokens}")
    return {"prompt": asked + pipe.processor.tokenizer.decode(ids[: max(tokens - own, 1)])}


def open_model(name: str, dtype: str, keys: str) -> Pipeline:
    """A model for plain decoding; random weights in the shape of a ``config.json``. ``keys``: ``kv_cache_dtype``."""
    if not name.endswith(".json"):
        return mmspec.load(name, drafter=None, dtype=dtype, kv_cache_dtype=keys)
    config = from_pretrained(AutoConfig, name).get_text_config()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if dtype not in ("auto", "bfloat16") or packs_bfloat16():
        pack_model(model, "bfloat16" if dtype == "auto" else dtype)
    return mmspec.load(model, drafter=None, processor=number_processor(config.vocab_size), kv_cache_dtype=keys)


@benchmark
@click.option(
    "--models",
    "--model",
    type=Listed(click.STRING),
    default="tiny-llava",
    show_default=True,
    help="Models, as for mmspec.load, or config.json files of text models, which get random weights.",
)
@click.option("--dtypes", type=Listed(click.STRING), default="auto", show_default=True, help="Forms of weights.")
@click.option("--kv-cache-dtypes", "keys", type=Listed(click.STRING), default="auto", help="Of keys and values.")
@click.option("--threads", type=SIZES, help="CPU threads; torch's default if not given.")
@click.option("--busy", type=Listed(click.IntRange(0)), default="0", show_default=True, help="Busy programs beside it.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--depths", type=SIZES, help="Prompt tokens before verify passes (default: 42), or of requests.")
@click.option("--nodes", type=SIZES, default="1,2,4,8,16", show_default=True, help="Of verify passes.")
@click.option("--divergence", is_flag=True, help="Measure divergences from the float32 weights, which are loaded.")
@click.option("--methods", help="As for mmspec eval: answer requests instead of timing passes.")
@click.option("--acceptance", type=Listed(click.FloatRange(0, 1, min_open=True)), help="Set rates per draft.")
@click.option("--batch-sizes", type=SIZES, default="1", show_default=True, help="Sequences that decode together.")
@click.option("--requests", "source", help="A file as for mmspec tune, or SET:COUNT, ... of held-out sets.")
@click.option("--warm-up", type=click.IntRange(0), default=4, show_default=True, help="Unmeasured requests.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=160, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@peer_option
def main(
    models: Sequence[str],
    dtypes: Sequence[str],
    keys: Sequence[str],
    threads: Sequence[int] | None,
    busy: Sequence[int],
    rounds: int,
    depths: Sequence[int] | None,
    nodes: Sequence[int],
    divergence: bool,
    methods: str | None,
    acceptance: Sequence[float] | None,
    batch_sizes: Sequence[int],
    source: str | None,
    warm_up: int,
    max_new_tokens: int,
    temperature: float,
    peers: Sequence[str],
) -> dict[str, Any]:
    """Measure verify passes or, with --methods, answers: tables, then one JSON line."""
    model, threads = models[0], threads or (torch.get_num_threads(),)
    if len(models) > 1 and (peers or divergence):
        raise UserError(f"--peer and --divergence need one model: got {len(models)}")
    if peers and methods is None:
        raise UserError("--peer needs --methods: other engines answer requests")
    if acceptance and (methods is None or max(batch_sizes) > 1):
        raise UserError("--acceptance needs --methods, one request at a time: expected --batch-sizes 1")

    @cache
    def started(count: int) -> dict[str, Any]:
        return {name: cache(start) for name, start in engines(model, count, peers).items()}

    pipes = {}
    for name, dtype, form in product(models, dtypes, keys):
        about_it = [Path(name).stem] * (len(models) > 1), [dtype], [form] * (len(keys) > 1)
        pipes[" ".join(chain(*about_it))] = open_model(name, dtype, form)
    about = {"model": ", ".join(models), **describe(next(iter(pipes.values())).target), "rounds": rounds}
    wait_for_huge_pages()
    if methods is None:
        about["equal"] = {dtype: drafts_equal(pipe) for dtype, pipe in pipes.items()}
        about["divergence"] = divergences(model, pipes) if divergence else {}
        rows = []
        for programs in busy:
            with busy_programs(programs):
                found = time_passes(pipes, threads, depths or (42,), nodes, rounds)
            rows += [{"busy": programs, **row} for row in found]
        print_rows(_PASSES, rows, "milliseconds per verify pass")
        for dtype, nats in about["divergence"].items():
            click.echo(f"{dtype}: {nats:.5f} nats from float32", err=True)
        return {**about, "rows": rows}
    pipe = next(iter(pipes.values()))
    visual = pipe.processor.reads_media
    sets = {f"depth {tokens}": [text_of(pipe, tokens)] for tokens in depths or ()}
    source = source or ("" if depths else "images:24,clips:8" if visual else "prompts:16")
    first, requests = load_requests(source, warm_up, visual)
    sets |= {source: requests} if source else {}
    sampled, rates = temperature > 0, acceptance or ()
    conditions = conditions_of(pipes, methods, threads, busy, batch_sizes, started, sampled, rates)
    options = DecodingOptions(max_new_tokens, temperature)
    for one in conditions:
        fix_threads(one.threads)
        for method, request in product(one.methods, first):
            one.decode(method, [request], options, learn=True)
    measure(conditions, sets, rounds, options)
    rows = rows_of(conditions)
    count = sum(map(len, sets.values()))
    print_rows(_ANSWERS, rows, f"{count} requests, medians and minima of speedups in seconds per token")
    print_rows(_TIMES, [row for row in rows if row["shares"]], "mean time of a request, and its shares; cost of a tree")
    about |= {"set_acceptance": list(rates)} if rates else {}
    return {**about, "temperature": temperature, "requests": count, "rows": rows}
