"""Runs test cases in sequence and reports results as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter as clock
from typing import Any

from mmspec.checking.cases import CASES
from mmspec.checking.sides import SkippedError
from mmspec.checking.trial import Trial
from mmspec.errors import UserError, first_line
from mmspec.progress import Show

OUTCOMES = ("equal", "tie", "different", "skipped", "failed")
FAILING = ("different", "failed")
"""Outcomes that fail a check."""


def chosen(names: str | None) -> list[str]:
    """Parse a comma-separated list of case names; None selects all cases.

    Raises:
        UserError: a case is unknown.
    """
    asked = list(CASES) if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in asked if name not in CASES]:
        raise UserError(f"cases must be of {', '.join(CASES)}: got {unknown[0]}")
    return [name for name in CASES if name in asked]


def run_case(trial: Trial, name: str) -> dict[str, Any]:
    """Run a case.

    Returns:
        Name and outcome of the case: ``"equal"``; ``"tie"``, if all differences are within rounding; ``"different"``;
        ``"skipped"`` or ``"failed"``, with the reason.
    """
    start, reason = clock(), ""
    trial.begin()
    try:
        CASES[name].run(trial)
        outcome = None
    except SkippedError as error:
        outcome, reason = "skipped", str(error)
    except Exception as error:
        outcome, reason = "failed", f"{type(error).__name__}: {first_line(error)}"
    record = trial.end()
    found = record.outcome(trial.bound)
    return {
        "name": name,
        "outcome": found if outcome is None or found == "different" else outcome,
        "reason": reason,
        "tokens": record.tokens,
        "accepted": record.accepted,
        "rehearsed": record.rehearsed,
        "seconds": round(clock() - start, 3),
        "differences": record.differences,
        "notes": list(record.notes),
        "power": record.power,
        **({"sampling": record.sampling} if record.sampling else {}),
    }


def run_cases(
    names: Sequence[str], trial: Trial, done: Mapping[str, dict[str, Any]], show: Show
) -> Iterator[list[dict[str, Any]]]:
    """Run all cases not in ``done``; after each case, yields all results so far, including earlier runs."""
    found = dict(done)
    for number, name in enumerate(names):
        show(number, len(names), part=name)
        if name not in found:
            found[name] = run_case(trial, name)
            yield [found[one] for one in CASES if one in found]
    show(len(names), len(names))
    yield [found[one] for one in CASES if one in found]


def summary(cases: Sequence[Mapping[str, Any]]) -> str:
    """One-line summary of the results."""
    counts = {outcome: sum(one["outcome"] == outcome for one in cases) for outcome in OUTCOMES}
    shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    tokens, own = sum(one["tokens"] for one in cases), [one["accepted"] for one in cases if one["accepted"] is not None]
    drafts = f"{sum(own)} accepted drafts" if own else "an unknown number of accepted drafts"
    line = f"{shown}: {tokens} tokens compared, {drafts}"
    if own and not sum(own):
        line += "; the drafter's drafts were never accepted, which proves little about them"
    return line
