"""Accuracy of the embedded hybrid model on held-out texts: ``python -m mmspec.eval tiny_hybrid``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import mmspec
from mmspec.eval.harness.output import Column, benchmark, make_table
from mmspec.ssm.texts import KINDS, TextExample, correct, example
from mmspec.ssm.texts.checking import runs_right
from mmspec.ssm.texts.problems import steps_of

FIRST_INDEX = 1_000_000
"""First held-out index used; lower ones are for validation during training."""

MAX_NEW_TOKENS = 256
Answer = Callable[[Sequence[str]], list[str]]
"""A function from prompts to the model's answers."""


def text_accuracy(answer: Answer, problems: int, others: int) -> dict[str, float]:
    """Shares of correct answers by kind of text, word problems also by number of steps, and "program runs".

    Args:
        answer: the model.
        problems: number of word problems.
        others: number of examples of each other kind.
    """
    report: dict[str, float] = {}
    for kind in KINDS:
        examples = [example(FIRST_INDEX + k, "heldout", kind) for k in range(problems if kind == "problem" else others)]
        texts = answer([item.prompt for item in examples])
        right = [correct(item, text) for item, text in zip(examples, texts, strict=True)]
        report[kind] = _share(right)
        if kind == "problem":
            report |= _by_steps(examples, right)
        if kind == "program":
            report["program runs"] = _share(
                [runs_right(item, text) for item, text in zip(examples, texts, strict=True)]
            )
    return report


def _by_steps(examples: Sequence[TextExample], right: Sequence[bool]) -> dict[str, float]:
    steps = [steps_of(item.answer) for item in examples]
    return {
        f"problem of {count} steps": _share([solved for solved, own in zip(right, steps, strict=True) if own == count])
        for count in sorted(set(steps))
    }


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)


def greedy_decoder(model: str, batch: int) -> Answer:
    """Greedy plain decoding of a model in float32, ``batch`` prompts at once."""
    pipe = mmspec.load(model, drafter=None, dtype="float32", max_num_seqs=batch)

    def answer(prompts: Sequence[str]) -> list[str]:
        requests = [{"prompt": prompt} for prompt in prompts]
        answers = pipe.generate_batch(requests, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)
        return [generation.text.strip() for generation in answers]

    return answer


def accuracy_table(report: dict[str, float]) -> Table:
    rows = [{"kind": name, "percent": 100 * share} for name, share in report.items()]
    columns: list[Column] = [("held-out texts", "{kind}"), ("right", "{percent:.1f} %")]
    return make_table(columns, rows, title="greedy decoding, texts never trained on")


@benchmark
@click.option("--model", default="tiny-hybrid", show_default=True, help="Embedded name, folder or hub id.")
@click.option("--problems", type=click.IntRange(1), default=200, show_default=True, help="Word problems.")
@click.option("--others", type=click.IntRange(1), default=50, show_default=True, help="Examples of each other kind.")
@click.option("--batch", type=click.IntRange(1), default=25, show_default=True, help="Answers decoded at once.")
def main(model: str, problems: int, others: int, batch: int) -> dict[str, Any]:
    """Print a table of accuracies, then one JSON line."""
    began = time.monotonic()
    report = text_accuracy(greedy_decoder(model, batch), problems, others)
    Console().print(accuracy_table(report))
    figures = {name: round(value, 4) for name, value in report.items()}
    seconds = round(time.monotonic() - began, 1)
    counts = {"model": model, "problems": problems, "others": others, "seconds": seconds}
    return counts | {"right": figures}
