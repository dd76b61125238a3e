"""Acceptance of adapting drafters over a stream of requests that changes its subject: ``mmspec.eval adaptation``.

Two pipelines over the same weights answer every request, one with ``adapt``, one with copies of the drafter that are
dropped with the request, as ``mmspec serve`` has them. Tokens must be equal. What is to be learned is learned between
requests. With ``--cost``, weights are never replaced, both pipelines draft the same, and whole requests are timed in
random order after random pauses; the adapting one learns in its own.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from time import perf_counter as clock
from time import process_time
from typing import Any

import click

import mmspec
from mmspec.adaptation import heads
from mmspec.answer import Generation
from mmspec.cli.options import FILE
from mmspec.drafters.per_sequence import per_sequence
from mmspec.drafters.registry import make_drafter
from mmspec.engine.calibrate import describe
from mmspec.errors import UserError
from mmspec.eval.harness.acceptance import AcceptanceStats, acceptance_difference
from mmspec.eval.harness.intervals import median_interval
from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.eval.tuning.race import read_requests
from mmspec.pipeline import Pipeline
from mmspec.vision.scenes.conversations import LIST, ORDERED
from mmspec.vision.scenes.drawing import picture
from mmspec.vision.scenes.scene import sample_scene, seeded

_FIRST_INDEX = 2_300_000  # of the held-out scenes
_WINDOW = 20  # answers at a subject's beginning and end
_PAUSE = 1.0  # seconds, at most


def scenes(limit: int) -> dict[str, list[dict[str, Any]]]:
    """Requests about held-out scenes, of one kind after another."""
    kinds = {"lists": LIST, "reversed captions": ORDERED["reversed"]}
    found: dict[str, list[dict[str, Any]]] = {}
    for number, (kind, wordings) in enumerate(kinds.items()):
        first = _FIRST_INDEX + number * 10_000
        rngs = [seeded("heldout", index) for index in range(first, first + limit)]
        found[kind] = [{"images": [picture(sample_scene(rng))], "prompt": rng.choice(wordings)} for rng in rngs]
    return found


def texts(files: tuple[Path, ...], limit: int) -> dict[str, list[dict[str, Any]]]:
    """The first turns of files in Spec-Bench's format, a subject each."""
    return {file.stem: read_requests(file)[:limit] for file in files}


def pipelines(model: str, dtype: str, drafter: str) -> tuple[Pipeline, Pipeline]:
    """The adapting pipeline and the other one."""
    adapting = mmspec.load(model, drafter, dtype=dtype, adapt=True)
    home = str(adapting.model.config.name_or_path)
    return adapting, Pipeline(adapting.target.fork(), adapting.io, per_sequence(make_drafter(drafter, home)))


def learn(pipe: Pipeline) -> None:
    """Learn all there is to learn."""
    assert pipe.adaptation is not None
    pipe.engine.drain()
    with pipe.engine.paused():
        pipe.adaptation.finish()


def stream(
    pipes: tuple[Pipeline, Pipeline], subjects: dict[str, list[dict[str, Any]]], keywords: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row per subject: acceptance of both pipelines, whole and in its first and last answers."""
    for subject, requests in subjects.items():
        stats = [AcceptanceStats(), AcceptanceStats()]
        for number, request in enumerate(requests):
            answers = [pipe.generate(**request, **keywords) for pipe in pipes]
            equal = answers[0].token_ids == answers[1].token_ids
            for one, answer in zip(stats, answers, strict=True):
                one.add(number, answer.stats, equal)
            learn(pipes[0])
        parts = {"": slice(None), "first_": slice(_WINDOW), "last_": slice(-_WINDOW, None)}
        row: dict[str, Any] = {"subject": subject, "answers": len(requests), "equal": stats[0].equal}
        for name, part in parts.items():
            adapted, fixed = (sum(one.tokens[part]) / max(1, sum(one.steps[part])) for one in stats)
            row |= {f"{name}adapting": adapted, f"{name}fixed": fixed, f"{name}gain": adapted / fixed - 1}
        yield row | acceptance_difference(stats[0], stats[1])


def cost(pipes: tuple[Pipeline, Pipeline], requests: list[dict[str, Any]], keywords: dict[str, Any]) -> dict[str, Any]:
    """Ratios of a request's time in the adapting pipeline to that in the other one, with 95 % intervals of the median:
    ``wall`` time, and ``processor`` time of the process, which depends less on other jobs.

    The former learns in the pause before a request; it rests from the pause on in which the other one waits.

    Raises:
        UserError: tokens or drafts differ, so that times would not compare the same work.
    """
    adapting, fixed = pipes
    heads.REQUESTS = sys.maxsize  # weights are not replaced: both draft the same
    rng = random.Random(0)
    ratios: dict[str, list[float]] = {"wall": [], "processor": []}

    def timed(pipe: Pipeline, request: dict[str, Any]) -> tuple[tuple[float, float], Generation]:
        with nullcontext() if pipe is adapting else adapting.engine.paused():
            time.sleep(rng.uniform(0.0, _PAUSE))
            wall, processor = clock(), process_time()
            answer = pipe.generate(**request, **keywords)
            return (clock() - wall, process_time() - processor), answer

    for number, request in enumerate(requests):
        measured = {id(pipe): timed(pipe, request) for pipe in rng.sample(pipes, 2)}
        (ours, one), (theirs, other) = measured[id(adapting)], measured[id(fixed)]
        if (one.token_ids, one.stats.accept_lengths) != (other.token_ids, other.stats.accept_lengths):
            raise UserError("times compare the same drafts: got others, give a drafter whose weights are trained")
        if number:  # the first warms up
            for kind, mine, other_time in zip(ratios, ours, theirs, strict=True):
                ratios[kind].append(mine / other_time)
    summary = {kind: {**median_interval(values), "mean": fmean(values)} for kind, values in ratios.items()}
    return {"requests": len(requests) - 1, **summary}


@benchmark
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--drafter", default="auto", show_default=True)
@click.option("--subject", "files", type=FILE, multiple=True, help="Requests in Spec-Bench's format; repeatable.")
@click.option("--limit", type=click.IntRange(1), default=200, show_default=True, help="Answers per subject.")
@click.option("--nodes", type=click.IntRange(1), default=14, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--cost", "timing", is_flag=True, help="Time requests instead.")
def main(
    model: str,
    dtype: str,
    drafter: str,
    files: tuple[Path, ...],
    limit: int,
    nodes: int,
    max_new_tokens: int,
    timing: bool,
) -> dict[str, Any]:
    """Measure acceptance with and without adaptation: a table, then one JSON line."""
    subjects = texts(files, limit) if files else scenes(limit)
    pipes = pipelines(model, dtype, drafter)
    keywords = {"nodes": nodes, "max_new_tokens": max_new_tokens, "temperature": 0.0}
    about = {"model": model, **describe(pipes[0].target), "drafter": drafter, **keywords}
    if timing:
        requests = [request for found in subjects.values() for request in found]
        return {**about, "cost": cost(pipes, requests, keywords)}
    rows = list(stream(pipes, subjects, keywords))
    columns: list[Column] = [
        ("subject", "{subject}"),
        ("fixed", "{fixed:.2f}"),
        ("adapting", "{adapting:.2f}"),
        ("gain", "{gain:+.1%}"),
        (f"first {_WINDOW}", "{first_gain:+.1%}"),
        (f"last {_WINDOW}", "{last_gain:+.1%}"),
        ("equal", "{equal}/{answers}"),
    ]
    wide_console().print(make_table(columns, rows, title=f"tokens per step, {nodes} nodes"))
    assert pipes[0].adaptation is not None
    heads = [
        {"answers": head.answers, "replacements": head.replacements, "rollbacks": head.rollbacks}
        for head in pipes[0].adaptation.heads
    ]
    return {**about, "subjects": rows, "heads": heads}
