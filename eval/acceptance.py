"""Acceptance lengths of drafters on held-out requests: ``python -m mmspec.eval acceptance``.

Mean acceptance length is the number of tokens emitted per verify step, bonus token included; the prefill and its token
are not counted. Requests (``mmspec.eval.harness.prompts``) are image and video captions, follow-up questions whose
history is the target's own answers, several images at once, and text only. Every output is compared with plain decoding
of the same request: greedy at temperature 0, with the same seed above.

Sums run over all steps of a suite, so long answers weigh more. A drafter that learns while decoding starts each suite,
temperature and seed as it was loaded, and learns from the earlier requests of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

import mmspec
from mmspec.core.drafter import Drafter, learns
from mmspec.engine.calibrate import describe
from mmspec.errors import UserError
from mmspec.eval.decoding.acceptance_study import (
    AcceptanceStudy,
    acceptance_table,
    difference_table,
    paired_differences,
    with_totals,
)
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.harness.options import TEMPERATURES
from mmspec.eval.harness.output import benchmark, wide_console
from mmspec.eval.harness.prompts import FIRST_INDEX, SUITES, suite_conversations
from mmspec.sampling.params import SamplingParams

_COUNTS = {
    "images": (200, "Captions of one image."),
    "videos": (24, "Captions of a video."),
    "turns": (24, "Conversations about an image, three follow-up questions each."),
    "several": (24, "Captions of two or three images at once."),
    "text": (24, "Conversations without an image."),
}
"""Default number of conversations of each suite, and the help text of its option."""


def _count_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, (count, text) in reversed(_COUNTS.items()):
        function = click.option(f"--{name}", type=click.IntRange(0), default=count, show_default=True, help=text)(
            function
        )
    return function


def _parse_pairs(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [tuple(part.strip() for part in pair.split(",")) for pair in value]
    if any(len(pair) != 2 for pair in pairs):
        raise click.BadParameter(f"expected two labels, separated by a comma: got {', '.join(value)}", ctx, param)
    return pairs  # type: ignore[return-value]


def _check_pairs(pairs: Sequence[tuple[str, str]], drafters: Mapping[str, Drafter]) -> None:
    for label in (label for pair in pairs for label in pair):
        if label not in drafters:
            raise UserError(f"--paired takes labels of --drafters ({', '.join(drafters)}): got {label!r}")


def _run_study(study: AcceptanceStudy, counts: Mapping[str, int], frames: int) -> None:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("decoding", total=study.num_answers(counts))
        study.advance = lambda: progress.advance(bar)
        for name in SUITES:
            if counts[name]:
                study.run(name, suite_conversations(name, counts[name], frames))


@benchmark
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--drafters", default="auto,ngram", show_default=True, help="Names or folders, optionally LABEL=SPEC.")
@click.option("--nodes", default="default", show_default=True, help="Draft tokens per step: sizes, or 'default'.")
@_count_options
@click.option("--frames", type=click.IntRange(1), default=8, show_default=True, help="Per video.")
@click.option("--temperatures", type=TEMPERATURES, default="0,1", show_default=True, help="0 is greedy decoding.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Per request, above temperature 0.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=160, show_default=True)
@click.option("--paired", multiple=True, metavar="A,B", callback=_parse_pairs, help="Compare two drafters by label.")
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
def main(**options: Any) -> dict[str, Any]:
    """Measure acceptance lengths on held-out requests: a table, then one JSON line."""
    for temperature in options["temperatures"]:
        SamplingParams(temperature)  # refuses invalid values before minutes of work
    pipe = mmspec.load(options["model"], drafter=None, device=options["device"], dtype=options["dtype"])
    drafters = parse_drafters(options["drafters"], pipe.model.config.name_or_path)
    _check_pairs(options["paired"], drafters)
    settings = {name: options[name] for name in ("nodes", "temperatures", "seeds", "max_new_tokens")}
    study = AcceptanceStudy(pipe, drafters, **settings)
    counts = {name: options[name] for name in _COUNTS}
    _run_study(study, counts, options["frames"])
    results = with_totals(study.results)
    differences = list(paired_differences(results, options["paired"]))
    learners = [label for label, drafter in drafters.items() if learns(drafter)]
    wide_console().print(acceptance_table(results, learners))
    if differences:
        wide_console().print(difference_table(differences))
    for case in study.unequal:
        click.echo(f"unequal: {case}", err=True)
    return {
        "model": options["model"],
        **describe(pipe.target),
        "first_scene": FIRST_INDEX,
        "conversations": counts,
        **{name: options[name] for name in ("frames", "seeds", "max_new_tokens")},
        "learners": learners,
        "rows": [{**vars(condition), **stats.to_dict()} for condition, stats in results.items()],
        "paired": differences,
        "unequal": study.unequal,
    }
