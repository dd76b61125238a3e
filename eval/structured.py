"""Structured output against free output: ``python -m mmspec.eval structured``.

Each request asks for a JSON object of a generated schema (``mmspec.eval.harness.schemas``), or with ``--data`` of one
of JSONSchemaBench (2501.10868). It is answered with the schema as a constraint and without, by the same drafter,
forked for every answer and interleaved; and with the constraint plainly, without drafts, whose tokens must be the same.
Outputs that end within the token limit are parsed and validated by the package jsonschema; those that do not end are
counted apart.

Columns: share of valid outputs among those that ended; tokens per second of all decode phases together, with and
without the schema, and their ratio; the same ratio over the requests whose free output ended, as one that does not end
often repeats itself, which is easy to draft; seconds in llguidance (compilation, masks, tokens consumed and rolled
back) over seconds of the requests.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter as clock
from typing import Any

import click

import mmspec
from mmspec.answer import Generation
from mmspec.cli.options import FILE, derived
from mmspec.core.drafter import fork
from mmspec.engine.calibrate import describe
from mmspec.errors import explained
from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.eval.harness.schemas import SchemaRequest, schema_requests
from mmspec.eval.suite.tasks.rows import rows_of
from mmspec.pipeline import Pipeline
from mmspec.sampling.grammar import Grammar
from mmspec.sampling.params import SamplingParams

_ALL = "all"


@benchmark
@click.option("--model", default="smollm2", show_default=True)
@click.option("--drafter", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--schemas", default=204, show_default=True, help="Number of schemas, cycling through the kinds.")
@click.option(
    "--data",
    type=FILE,
    help="JSON Lines of JSONSchemaBench, json_schema in each, whose first --schemas replace the generated ones.",
)
@derived(SamplingParams, "max_new_tokens", default=256)
@derived(SamplingParams, "temperature", default=0.0)
@click.option("--seed", default=0, show_default=True, help="Of schemas and sampling.")
def main(
    model: str,
    drafter: str,
    dtype: str,
    schemas: int,
    data: Path | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """Measure structured output: a table by kind of schema, then one JSON line."""
    _validator()  # fails early where jsonschema is missing
    requests = stored_requests(data, schemas) if data else schema_requests(schemas, seed)
    pipe = mmspec.load(model, drafter, dtype=dtype)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    decoder = Interleaved(pipe)
    for request in schema_requests(4, seed=-1):
        decoder(request, settings)
    records = []
    for number, request in enumerate(requests, start=1):
        records.append(decoder(request, settings))
        click.echo(f"\r{number} of {len(requests)}", nl=False, err=True)
    click.echo(err=True)
    rows = summary(records)
    wide_console().print(make_table(_COLUMNS, rows, sections=("last",), title=f"{model}, drafter {drafter}"))
    invalid = [record for record in records if record["valid"] is False]
    return {**describe(pipe.target), **settings, "kinds": rows, "invalid": invalid, "records": records}


def stored_requests(file: Path, count: int) -> list[SchemaRequest]:
    """The first ``count`` schemas of a file, as requests of the kind that is the file's name.

    Raises:
        UserError: a line without ``json_schema``, or one that is no JSON object.
    """
    requests = []
    for row in islice(rows_of(file), count):
        with explained(f"{row.where}: expected a JSON object in 'json_schema'", ValueError, TypeError):
            schema = {**json.loads(row["json_schema"])}
        text = json.dumps(schema)
        requests.append(SchemaRequest(file.stem, f"Write one JSON object that conforms to this schema: {text}", schema))
    return requests


class Interleaved:
    """Answers requests with and without their schemas, in alternating order.

    Args:
        pipe: its drafter is forked for each answer, so that none is drafted from another.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._plain = Pipeline(pipe.target, pipe.io, None)
        self._count = 0

    def __call__(self, request: SchemaRequest, settings: dict[str, Any]) -> dict[str, Any]:
        """The record of one request.

        Raises:
            RuntimeError: speculative and plain decoding give different tokens.
        """
        schema = {"json_schema": request.schema}
        expected = self._plain.generate(request.prompt, **schema, **settings)
        answers: dict[str, tuple[Generation, float, float]] = {}
        self._count += 1
        for name in ("constrained", "free")[:: 1 if self._count % 2 else -1]:
            answers[name] = self._timed(request.prompt, {**(schema if name == "constrained" else {}), **settings})
        (answer, seconds, masks), (free, free_seconds, _) = answers["constrained"], answers["free"]
        if answer.token_ids != expected.token_ids:
            raise RuntimeError(f"speculative and plain decoding differ: {answer.text!r} and {expected.text!r}")
        ended = answer.finish_reason == "stop"
        return {
            "kind": request.kind,
            "text": answer.text,
            "tokens": len(answer.token_ids),
            "free_tokens": len(free.token_ids),
            "valid": is_valid(answer.text, request.schema) if ended else None,
            "free_valid": is_valid(free.text, request.schema) if free.finish_reason == "stop" else None,
            "tokens_per_second": answer.stats.tokens_per_second,
            "free_tokens_per_second": free.stats.tokens_per_second,
            "plain_tokens_per_second": expected.stats.tokens_per_second,
            "acceptance_length": answer.stats.mean_acceptance_length,
            "free_acceptance_length": free.stats.mean_acceptance_length,
            "seconds": seconds,
            "free_seconds": free_seconds,
            "mask_seconds": masks,
        }

    def _timed(self, prompt: str, keywords: dict[str, Any]) -> tuple[Generation, float, float]:
        """The answer, its seconds, and those spent on its grammar."""
        pipe = TimedPipeline(self._pipe.target, self._pipe.io, fork(self._pipe.drafter, self._pipe.target))
        pipe.share(self._pipe)
        start = clock()
        answer = pipe.generate(prompt, **keywords)
        return answer, clock() - start, pipe.seconds


class TimedPipeline(Pipeline):
    """Measures the time spent on grammars.

    Attributes:
        seconds: of compilation and of all calls of the compiled grammar.
    """

    seconds = 0.0

    def share(self, other: Pipeline) -> None:
        """Use the compiled tokenizer of another pipeline, which takes half a second to build."""
        if other._grammars is None:
            other.grammar(SamplingParams(regex="a"))
        self._grammars = other._grammars

    def grammar(self, params: SamplingParams) -> Grammar | None:
        grammar = self.timed(super().grammar)(params)
        return None if grammar is None else _TimedGrammar(grammar, self)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:

        def call(*args: Any) -> Any:
            start = clock()
            try:
                return function(*args)
            finally:
                self.seconds += clock() - start

        return call


class _TimedGrammar(Grammar):
    """A grammar whose calls are timed."""

    def __init__(self, grammar: Grammar, pipe: TimedPipeline) -> None:
        vars(self).update(vars(grammar))
        for name in ("start", "advance", "undo", "mask", "forced", "allows"):
            setattr(self, name, pipe.timed(getattr(grammar, name)))


@cache
def _validator() -> Callable[..., Any]:
    """jsonschema's class, with its formats and those for which it needs another package."""
    import jsonschema

    checker = jsonschema.FormatChecker(())
    checker.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    for name, read in (("time", datetime.time.fromisoformat), ("date-time", datetime.datetime.fromisoformat)):

        def check(value: object, read: Callable[[str], object] = read) -> bool:
            return not isinstance(value, str) or read(value) is not None

        checker.checks(name, ValueError)(check)
    return partial(jsonschema.Draft202012Validator, format_checker=checker)


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON of a schema, its numbers read as doubles; formats are checked where jsonschema can."""
    with suppress(json.JSONDecodeError):
        return bool(_validator()(schema).is_valid(json.loads(text)))
    return False


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table: one per kind of schema, then all."""
    kinds = list(dict.fromkeys(record["kind"] for record in records))
    return [_row(kind, [record for record in records if kind in (_ALL, record["kind"])]) for kind in (*kinds, _ALL)]


def _row(kind: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ended = [record["valid"] for record in records if record["valid"] is not None]
    free_ended = [record for record in records if record["free_valid"] is not None]
    return {
        "kind": kind,
        "last": kind == _ALL,
        "schemas": len(records),
        "ended": len(ended),
        "valid": sum(ended) / len(ended) if ended else None,
        "free_ended": len(free_ended),
        "free_valid": sum(record["free_valid"] for record in free_ended) / len(free_ended) if free_ended else None,
        "tokens_per_second": _rate(records, ""),
        "free_tokens_per_second": _rate(records, "free_"),
        "plain_tokens_per_second": _rate(records, "plain_"),
        "ratio": _rate(records, "") / _rate(records, "free_"),
        "ratio_free_ended": _rate(free_ended, "") / _rate(free_ended, "free_") if free_ended else None,
        "median_ratio": median(record["tokens_per_second"] / record["free_tokens_per_second"] for record in records),
        "acceptance_length": median(record["acceptance_length"] for record in records),
        "free_acceptance_length": median(record["free_acceptance_length"] for record in records),
        "mask_share": sum(r["mask_seconds"] for r in records) / sum(r["seconds"] for r in records),
    }


def _rate(records: Sequence[dict[str, Any]], method: str) -> float:
    """Tokens per second of all decode phases together."""
    tokens = "free_tokens" if method == "free_" else "tokens"
    return sum(r[tokens] for r in records) / sum(r[tokens] / r[f"{method}tokens_per_second"] for r in records)


_COLUMNS: list[Column] = [
    ("kind", "{kind}"),
    ("schemas", "{schemas}"),
    ("ended", "{ended}"),
    ("valid", "{valid:.1%}"),
    ("tokens/s", "{tokens_per_second:.0f}"),
    ("free", "{free_tokens_per_second:.0f}"),
    ("ratio", "{ratio:.2f}x"),
    ("free ended", "{free_ended}"),
    ("valid", "{free_valid:.1%}"),
    ("ratio", "{ratio_free_ended:.2f}x"),
    ("accepted", "{acceptance_length:.2f}"),
    ("free", "{free_acceptance_length:.2f}"),
    ("masks", "{mask_share:.1%}"),
]
