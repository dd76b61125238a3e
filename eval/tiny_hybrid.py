"""Accuracy of the embedded hybrid model on held-out texts: `python -m eval.tiny_hybrid`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

import click
import torch
from rich.console import Console
from rich.table import Table

from ssm.texts import KINDS, TextExample, correct, example
from ssm.texts.checking import runs_right
from ssm.texts.problems import steps_of

FIRST = 1_000_000
"""Held-out indices from here on are for measuring; those before are for watching the training."""

MOST_TOKENS = 256
Answer = Callable[[Sequence[str]], list[str]]


def measure(answer: Answer, problems: int, others: int) -> dict[str, float]:
    """Shares of right answers: "problem" in all and by steps, every other kind, and "program runs".

    Args:
        answer: gives the model's texts for prompts.
        problems: word problems to ask.
        others: examples of each other kind.
    """
    report: dict[str, float] = {}
    for kind in KINDS:
        asked = [example(FIRST + k, "heldout", kind) for k in range(problems if kind == "problem" else others)]
        texts = answer([one.prompt for one in asked])
        right = [correct(one, text) for one, text in zip(asked, texts, strict=True)]
        report[kind] = _share(right)
        if kind == "problem":
            report |= _by_steps(asked, right)
        if kind == "program":
            report["program runs"] = _share([runs_right(one, text) for one, text in zip(asked, texts, strict=True)])
    return report


def _by_steps(asked: Sequence[TextExample], right: Sequence[bool]) -> dict[str, float]:
    steps = [steps_of(one.answer) for one in asked]
    return {
        f"problem of {count} steps": _share([found for found, own in zip(right, steps, strict=True) if own == count])
        for count in sorted(set(steps))
    }


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)


def decoder(model: str, batch: int) -> Answer:
    """Greedy answers of a model in float32, its plain decoding, `batch` prompts at once."""
    import mmspec

    pipe = mmspec.load(model, drafter=None, dtype="float32")

    def every(prompts: Sequence[str]) -> Iterator[str]:
        for start in range(0, len(prompts), batch):
            requests = [{"prompt": prompt} for prompt in prompts[start : start + batch]]
            yield from (found.text.strip() for found in pipe.generate_batch(requests, max_new_tokens=MOST_TOKENS))

    return lambda prompts: list(every(prompts))


def table(report: dict[str, float]) -> Table:
    """The shares in percent."""
    view = Table("held-out texts", "right", title="greedy decoding, texts never trained on")
    for name, value in report.items():
        view.add_row(name, f"{100 * value:.1f} %")
    return view


@click.command()
@click.option("--model", default="tiny-hybrid", show_default=True, help="Embedded name, folder or hub id.")
@click.option("--problems", type=click.IntRange(1), default=200, show_default=True, help="Word problems to ask.")
@click.option("--others", type=click.IntRange(1), default=50, show_default=True, help="Examples of each other kind.")
@click.option("--batch", type=click.IntRange(1), default=25, show_default=True, help="Answers decoded at once.")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads; torch's choice by default.")
def main(model: str, problems: int, others: int, batch: int, threads: int | None) -> None:
    """Print a table of what the model gets right, then the same as one JSON line."""
    if threads:
        torch.set_num_threads(threads)
    began = time.monotonic()
    report = measure(decoder(model, batch), problems, others)
    Console().print(table(report))
    figures = {name: round(value, 4) for name, value in report.items()}
    seconds = round(time.monotonic() - began, 1)
    counts = {"model": model, "problems": problems, "others": others, "seconds": seconds}
    click.echo(json.dumps(counts | {"right": figures}))


if __name__ == "__main__":
    main()
