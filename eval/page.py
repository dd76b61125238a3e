"""Times of the web demo's first view: ``python -m mmspec.eval page``.

In every round, ``mmspec demo`` is started anew, and a new Chromium opens the page once it listens, as the first
visitor. Measured are the start (from the command to its address), the first paint (``first-contentful-paint`` of the
browser, from the start of navigation), and the opening result: until the first race is over and can be replayed.
"""

from __future__ import annotations

import shutil
from statistics import median
from time import perf_counter as clock
from typing import Any

import click

from mmspec.errors import UserError
from mmspec.eval.harness.mmspec_server import serving
from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.extras import missing

_TIMES = ("start", "paint", "opening")
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
_PATIENCE = 300  # seconds
_COLUMNS: list[Column] = [
    ("model", "{model}"),
    ("start", "{start:.2f} s"),
    ("first paint", "{paint:.2f} s"),
    ("opening result", "{opening:.2f} s"),
]


@benchmark
@click.option("--model", "models", multiple=True, default=("tiny-llava",), show_default=True)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
def main(models: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Measure the page's first view, medians over rounds: a table, then one JSON line."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise missing("the study of the page", "playwright", "browser") from None
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        raise UserError("expected Chromium on the path, found none: install the system's package")
    records: list[dict[str, Any]] = []
    with sync_playwright() as driver:
        for number in range(rounds * len(models)):
            model = models[number % len(models)]
            browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
            try:
                records.append({"model": model, **_first_view(browser, model)})
            finally:
                browser.close()
    rows = [
        {"model": model, **{name: median(r[name] for r in records if r["model"] == model) for name in _TIMES}}
        for model in models
    ]
    wide_console().print(make_table(_COLUMNS, rows, title="the first visitor"))
    return {"medians": rows, "records": records}


def _first_view(browser: Any, model: str) -> dict[str, float]:
    """Seconds of one visit to a server of its own."""
    begin = clock()
    with serving("demo", model=model) as server:
        start = clock() - begin
        page = browser.new_page()
        page.set_default_timeout(1000 * _PATIENCE)
        begin = clock()
        page.goto(server.url)
        page.locator(".mm-play:visible").wait_for()
        opening = clock() - begin
        return {"start": start, "paint": page.evaluate(_PAINT) / 1000, "opening": opening}
