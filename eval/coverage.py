"""Every decoder class of the installed transformers under speculative decoding: ``python -m mmspec.eval coverage``.

``mmspec.eval.decoding.coverage`` describes what is compared. Each class runs in a process of its own with a time limit.
The log is appended to, so that a stopped sweep resumes; the table is written to ``docs/models.md``.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import warnings
from collections import Counter
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch
import transformers
from transformers.utils import is_torchvision_available

from mmspec.cli.options import OUT_FILE
from mmspec.eval.decoding.coverage import NEW_TOKENS, NOT_BUILT, OUTCOMES, PUBLISHED, Model, Outcome, check, models
from mmspec.eval.harness.output import BenchmarkCommand, git_commit, print_result
from mmspec.files import append_row, read_rows, write_text

ROOT = Path(__file__).resolve().parents[1]
_DOCS = ROOT / "docs" / "models.md"
_RESULT = ROOT / "eval" / "results" / "coverage.json"
_LOG = ROOT / "build" / "coverage.jsonl"


@click.command(cls=BenchmarkCommand)
@click.option("--configs", type=click.Path(path_type=Path, exists=True), help="Folder of published configurations.")
@click.option("--only", help="Model types and files whose names match this regular expression.")
@click.option("--limit", default=120, show_default=True, help="Seconds per class.")
@click.option("--log", type=OUT_FILE, default=_LOG, show_default=True, help="Log of a sweep, resumed if it exists.")
@click.option("--docs", type=OUT_FILE, default=_DOCS, show_default=True, help="Page with the tables.")
@click.option("--out", type=OUT_FILE, default=_RESULT, show_default=True, help="JSON result.")
def main(configs: Path | None, only: str | None, limit: int, log: Path, docs: Path, out: Path) -> None:
    """Print one line per class, then the counts as one JSON line."""
    transformers.logging.set_verbosity_error()
    log.parent.mkdir(parents=True, exist_ok=True)
    rows = {(row["kind"], row["name"]): row for _, row in read_rows(log, cut=True)}
    for model in models(configs):
        key = model.kind, model.label
        if key in rows or (only and not re.search(only, model.label)):
            continue
        start = clock()
        outcome = check_apart(model, limit)
        rows[key] = {**outcome.row(model), "seconds": round(clock() - start, 1)}
        append_row(log, rows[key])
        click.echo(f"{model.label:32} {outcome.outcome:16} {outcome.reason[:200]}")
    result = {"environment": environment(), "counts": counts(list(rows.values())), "models": list(rows.values())}
    if only is None:
        write_text(docs, page(result))
        print_result(result, out)
    else:
        click.echo(json.dumps(result["counts"]))


def environment() -> dict[str, Any]:
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    versions["torchvision"] = version("torchvision") if is_torchvision_available() else "none"
    return {**versions, "commit": git_commit(), "dtype": "float32", "new_tokens": NEW_TOKENS}


def check_apart(model: Model, limit: float) -> Outcome:
    """``check`` in a process of its own, ended after ``limit`` seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mmspec.eval.decoding.coverage"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcome, args=(model, sender), daemon=True)
    process.start()
    sender.close()
    phase, end = NOT_BUILT, clock() + limit
    try:
        while receiver.poll(max(0.0, end - clock())):
            message = receiver.recv()
            if isinstance(message, Outcome):
                return message
            phase = message
        return Outcome(phase, f"no answer in {limit:.0f} s")
    except EOFError:
        process.join()
        return Outcome(phase, f"the process ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send_outcome(model: Model, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    pipe.send(check(model, pipe.send))


def counts(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Number of classes of each kind by outcome."""
    counters: dict[str, Counter[str]] = {}
    for row in rows:
        counters.setdefault(row["kind"], Counter())[row["outcome"]] += 1
    return {kind: {outcome: counters[kind][outcome] for outcome in OUTCOMES} for kind in counters}


def page(result: dict[str, Any]) -> str:
    about, rows = result["environment"], result["models"]
    text = [_INTRODUCTION.format(**about)]
    text.append(_table(("", *OUTCOMES), [(kind, *by.values()) for kind, by in result["counts"].items()]))
    for kind in result["counts"]:
        group = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["name"])
        first = "configuration" if kind == PUBLISHED else "model type"
        cells = [(row["name"], row["model_class"], row["outcome"], _remark(row)) for row in group]
        text += [f"## {kind.capitalize()}\n", _table((first, "class", "outcome", "reason"), cells)]
    return "\n".join(text)


def _remark(row: dict[str, Any]) -> str:
    return "; ".join(part for part in (row["reason"], row["note"] and f"not compared: {row['note']}") if part)


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    escaped = [[re.sub(r"([|<>*_`])", r"\\\1", str(cell)) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


_INTRODUCTION = """# Supported models

Written by `python -m mmspec.eval coverage` with transformers {transformers}, torch {torch} and torchvision
{torchvision} (some image processors need it). Every decoder-only class with a causal language model or
image-text-to-text head is built from its default configuration with sizes cut, and published configurations keep their
widths with layers, experts and vocabulary cut. Weights are random, in {dtype}. Each class decodes greedily {new_tokens}
tokens (8 if it has more than 100 million parameters) after a short prompt, a long one and two prompts with padding;
vision-language models also after prompts with images, where the inputs can be made without a checkpoint's processor.
Trees are random, or drafted from recycled tokens. The tokens are compared with those of transformers' `generate`.

- **equal**: all tokens are those of `generate`.
- **refused**: an error of one line, before any token.
- **faulty**: other tokens, or a crash. Each is a bug.
- **not by generate**: `generate` itself does not decode the model with these inputs.
- **not built**: transformers cannot build it at this size, or here.

Decoders of encoder-decoder families and classes that are encoders by default (BERT) are left out. Doge is equal up
to its window, 2048 tokens by default: beyond, it picks among equal scores by their order, and prompts are refused.
"""
