"""How many tokens one pass of the target yields: ``python -m eval.acceptance``.

Mean acceptance length is tokens emitted per verify step, the bonus token counted; the prefill, and the token that it
gives, are not counted. It is measured on held-out requests (``harness.prompts``): captions of images and of videos,
follow-up questions whose history is the target's own answers, several images at once, text alone. Every output is
compared with plain decoding of the same request: by the same argmax at temperature 0, by the same seed above it.

Sums run over all steps of a suite, so that long answers count more than short ones. A drafter that learns while it
decodes starts every suite, temperature and round of seeds as it was loaded; there, later requests profit from earlier
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import mmspec
from eval.decoding.study import Key, Study
from eval.harness.acceptance import Tally, difference
from eval.harness.command import Measurement, console, print_result
from eval.harness.drafters import named_drafters
from eval.harness.prompts import FIRST, SUITES, suite
from mmspec.calibrate import describe
from mmspec.cli.options import OUT_FILE, Number
from mmspec.drafter import Drafter, learns
from mmspec.errors import UserError
from mmspec.sampling import SamplingParams

POSITIONS = 5
"""Accepted drafts up to which the table shows shares; the JSON line has all."""


def with_totals(tallies: Mapping[Key, Tally]) -> dict[Key, Tally]:
    """The same in the order of temperature, suite and drafter, and sums over all suites where there are several."""
    totals: dict[Key, Tally] = {}
    for key, tally in tallies.items():
        total = Key("all", *list(vars(key).values())[1:])
        totals[total] = totals.get(total, Tally()) + tally
    several = len({key.suite for key in tallies}) > 1
    every = {**tallies, **(totals if several else {})}
    # Sorting is stable: suites and drafters stay in the order in which they were measured, sums last.
    return dict(sorted(every.items(), key=lambda item: item[0].temperature))


def table(tallies: Mapping[Key, Tally], learners: Sequence[str]) -> Table:
    """One line per suite, temperature, drafter and tree size."""
    last = f"≥{POSITIONS}"
    view = Table("suite", "T", "drafter", "nodes", "acceptance", "kept", f"≥1 .. {last}", "passes", "equal")
    view.title = "tokens per verify step on held-out requests"
    view.caption = (
        f"kept: share of drafts that were accepted; ≥d: % of steps that accepted d drafts or more ({last} last)"
    )
    if learners:
        view.caption += f"; {', '.join(learners)}: learning from earlier requests of the same line"
    before = None
    for key, tally in tallies.items():
        if before is not None and before != (key.temperature, key.suite):
            view.add_section()
        before = (key.temperature, key.suite)
        row = tally.row()
        reached = [*row["acceptance_by_position"], *[0.0] * POSITIONS][:POSITIONS]
        shares = " ".join(f"{100 * share:2.0f}" for share in reached)
        forwards = row["forwards_per_tree"]
        view.add_row(
            key.suite,
            f"{key.temperature:g}",
            key.drafter,
            str(key.nodes),
            f"{row['mean_acceptance_length']:.2f}",
            f"{100 * row['draft_acceptance_rate']:.0f} %",
            shares,
            "" if forwards is None else f"{forwards:.1f}",
            f"{row['equal']}/{row['requests']}",
        )
    return view


def pairs(tallies: Mapping[Key, Tally], wanted: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """For each two labels, the difference of their acceptance lengths wherever both were measured alike."""
    for first, second in wanted:
        for key, tally in tallies.items():
            if key.drafter != first:
                continue
            for other, against in tallies.items():
                alike = (other.suite, other.temperature, other.size) == (key.suite, key.temperature, key.size)
                if other.drafter == second and alike:
                    yield {
                        "suite": key.suite,
                        "temperature": key.temperature,
                        "size": key.size,
                        "first": first,
                        "second": second,
                        **difference(tally, against),
                    }


def pair_table(found: Sequence[dict[str, Any]]) -> Table:
    view = Table("suite", "T", "nodes", "drafter", "against", "longer by", "95 % interval")
    view.title = "difference in acceptance length, same requests, bootstrap over conversations"
    for row in found:
        interval = f"{row['low']:+.3f} .. {row['high']:+.3f}"
        places = (row["suite"], f"{row['temperature']:g}", row["size"], row["first"], row["second"])
        view.add_row(*places, f"{row['difference']:+.3f}", interval)
    return view


def _read_temperatures(ctx: click.Context, param: click.Parameter, value: str) -> list[float]:
    return list(dict.fromkeys(Number(0).convert(part, param, ctx) for part in value.split(",")))


def _read_pairs(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> list[tuple[str, str]]:
    found = [tuple(part.strip() for part in pair.split(",")) for pair in value]
    if any(len(pair) != 2 for pair in found):
        raise click.BadParameter(f"expected two labels, separated by a comma: got {', '.join(value)}", ctx, param)
    return found  # type: ignore[return-value]


def _check_pairs(wanted: Sequence[tuple[str, str]], drafters: Mapping[str, Drafter]) -> None:
    for label in (label for pair in wanted for label in pair):
        if label not in drafters:
            raise UserError(f"--paired takes labels of --drafters ({', '.join(drafters)}): got {label!r}")


_COUNTS = {"images": 200, "videos": 24, "turns": 24, "several": 24, "text": 24}


def _count_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, count in reversed(_COUNTS.items()):
        about = {
            "images": "Captions of one image.",
            "videos": "Captions of a video.",
            "turns": "Conversations about an image, three follow-up questions each.",
            "several": "Captions of two or three images at once.",
            "text": "Conversations without an image.",
        }[name]
        option = click.option(f"--{name}", type=click.IntRange(0), default=count, show_default=True, help=about)
        function = option(function)
    return function


@click.command(cls=Measurement)
@click.option("--model", default="tiny-llava", show_default=True)
@click.option(
    "--drafters", default="auto,ngram", show_default=True, help="Names or folders, LABEL=SPEC each if wished."
)
@click.option("--nodes", default="default", show_default=True, help="Drafted nodes per step: sizes, or 'default'.")
@_count_options
@click.option("--frames", type=click.IntRange(1), default=8, show_default=True, help="Per video.")
@click.option(
    "--temperatures", default="0,1", show_default=True, callback=_read_temperatures, help="0 is greedy decoding."
)
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Per request, above temperature 0.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=160, show_default=True)
@click.option("--paired", multiple=True, metavar="A,B", callback=_read_pairs, help="Compare two drafters by label.")
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="CPU threads; torch's choice by default.")
@click.option("--out", type=OUT_FILE, help="Write the JSON line here too.")
def main(
    model: str,
    drafters: str,
    nodes: str,
    frames: int,
    temperatures: list[float],
    seeds: int,
    max_new_tokens: int,
    paired: list[tuple[str, str]],
    device: str,
    dtype: str,
    threads: int | None,
    out: Path | None,
    **counts: int,
) -> None:
    """Measure acceptance lengths on held-out requests: a table, then one JSON line."""
    if threads:
        torch.set_num_threads(threads)
    for temperature in temperatures:
        SamplingParams(temperature)  # refuses what cannot be, before minutes of work
    pipe = mmspec.load(model, drafter=None, device=device, dtype=dtype)
    named = named_drafters(drafters, pipe.model.config.name_or_path)
    _check_pairs(paired, named)
    study = Study(pipe, named, nodes, temperatures, seeds, max_new_tokens)
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True) as progress:
        bar = progress.add_task("decoding", total=study.decodings(counts))
        study.advance = lambda: progress.advance(bar)
        for name in SUITES:
            if counts[name]:
                study.run(name, suite(name, counts[name], frames))
    tallies = with_totals(study.tallies)
    differences = list(pairs(tallies, paired))
    learners = [label for label, drafter in named.items() if learns(drafter)]
    wide = console()
    wide.print(table(tallies, learners))
    if differences:
        wide.print(pair_table(differences))
    for case in study.unequal:
        errors.print(f"unequal: {case}", markup=False)
    content = {
        "model": model,
        **describe(pipe.target),
        "first_scene": FIRST,
        "conversations": counts,
        "frames": frames,
        "seeds": seeds,
        "max_new_tokens": max_new_tokens,
        "learners": learners,
        "rows": [{**vars(key), **tally.row()} for key, tally in tallies.items()],
        "paired": differences,
        "unequal": study.unequal,
    }
    print_result(content, out)


if __name__ == "__main__":
    main()
