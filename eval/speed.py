"""How much faster than plain decoding: ``python -m eval.speed``.

For every prompt, all ways of decoding it run in turn, several rounds, on the same model in the same process; a way's
time is its median over the rounds, and its output must equal that of transformers' ``generate``. Ratios are of whole
requests (vision tower and prefill included) and of decoding alone.

Every way first decodes a few other prompts. A drafter that learns from earlier answers, and its budget, start every
round of a prompt as the earlier prompts left them, so that no prompt is ever drafted from its own answer.

Beside the speed stands where it goes: the shares of prefill, drafting, verifying and committing in a whole request, and
what one drafted tree costs in passes of the target over one token, both timed on the same prompts in turn.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import mmspec
from eval.command import Measurement, console, print_result
from eval.drafters import Watched, named_drafters, tree_sizes
from eval.memory import peak, start_watching
from eval.prompts import held_out_requests
from mmspec.budget import AdaptiveBudget
from mmspec.calibrate import cost_table, describe
from mmspec.drafter import Drafter, fork
from mmspec.pipeline import Pipeline
from mmspec.stats import Stats
from mmspec.transformers_target import TransformersTarget

TRANSFORMERS, PLAIN = "transformers generate", "mmspec, no drafter"


PARTS = ("prefill", "draft", "verify", "commit")
"""What a request's time is split into; the rest is preprocessing, stopping rules and text."""


@dataclass(frozen=True)
class Asked:
    """How answers are decoded: as for ``Pipeline.generate``."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One batch of answers.

    Attributes:
        answers: their tokens, row by row.
        stats: row by row; of transformers the acceptance lengths alone, and nothing of several rows.
        seconds: by what they were spent on: ``total``, ``decoding`` (behind the first token), ``PARTS`` where they are
            known, ``tree`` (to draft one) and ``pass`` (to verify once), the means of the answer's steps.
        memory: bytes at the peak, see ``eval.memory``.
    """

    answers: list[list[int]]
    stats: list[Stats]
    seconds: dict[str, float]
    memory: int | None = None

    @property
    def length(self) -> float:
        """Mean acceptance length of the first row."""
        return self.stats[0].mean_acceptance_length if self.stats else 1.0


@dataclass
class Way:
    """One way of decoding, and what it took.

    Attributes:
        name: in tables.
        drafter, nodes: who drafts, and how many nodes; None adapts them.
        target: who verifies; None is the pipeline's target.
        options: of transformers' ``generate``, which then decodes by itself; None is our engine.
        budgets: what adaptive budgets have learnt.
        seconds: for each prompt, medians over the rounds, as ``Run`` names them.
        lengths: for each prompt, the mean acceptance length.
        answers: for each prompt, the tokens.
        equal: prompts whose tokens were those of transformers.
    """

    name: str
    drafter: Drafter | None = None
    nodes: int | None = 0
    target: TransformersTarget | None = None
    options: dict[str, Any] | None = None
    budgets: dict[int, AdaptiveBudget] = field(default_factory=dict)
    seconds: list[dict[str, float]] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    equal: int = 0

    def __post_init__(self) -> None:
        if self.name == TRANSFORMERS and self.options is None:
            self.options = {}

    def fork(self, target: TransformersTarget) -> Way:
        """The same way, unmeasured, that learns on its own from what this one has learnt."""
        drafter, budgets = fork(self.drafter, target), copy.deepcopy(self.budgets)
        return Way(self.name, drafter, self.nodes, self.target, self.options, budgets)

    def clear(self) -> None:
        """Forget what was measured; drafter and budget keep what they learnt."""
        self.seconds, self.lengths, self.answers, self.equal = [], [], [], 0

    def column(self, name: str) -> list[float]:
        """One of the times, by prompt."""
        return [seconds[name] for seconds in self.seconds]


def measure(
    pipe: Pipeline, requests: Sequence[dict[str, Any]], ways: Sequence[Way], rounds: int, max_new_tokens: int
) -> None:
    """Decode every request in every way, in turn, and fill ``ways`` with medians over the rounds."""
    asked = Asked(max_new_tokens)
    for request in requests:
        runs = rounds_of(pipe, [request], ways, rounds, asked)
        expected = runs[ways[0].name][0].answers[0]
        for way in ways:
            first = runs[way.name][0]
            way.equal += first.answers[0] == expected
            way.lengths.append(first.length)
            way.answers.append(first.answers[0])
            each = [run.seconds for run in runs[way.name]]
            way.seconds.append({name: statistics.median(s[name] for s in each) for name in each[0]})


def rounds_of(
    pipe: Pipeline, requests: Sequence[dict[str, Any]], ways: Sequence[Way], rounds: int, asked: Asked
) -> dict[str, list[Run]]:
    """Decode a batch of requests in every way, in turn, several rounds; the ways learn from the last one.

    Returns:
        The runs of each way, in the order of the rounds.
    """
    runs: dict[str, list[Run]] = {way.name: [] for way in ways}
    for turn in range(rounds):
        # The order rotates, so that no way always runs behind the same one.
        shift = turn % len(ways) if turn else 0
        for way in [*ways[shift:], *ways[:shift]]:
            runs[way.name].append(_decode(pipe, way, requests, asked, turn == rounds - 1))
    return runs


def _decode(pipe: Pipeline, way: Way, requests: Sequence[dict[str, Any]], asked: Asked, last: bool) -> Run:
    start_watching(pipe.target.device)
    if way.options is not None:
        return _generate(pipe, way.options, requests, asked)
    target = pipe.target if way.target is None else way.target
    drafter = way.drafter if last else fork(way.drafter, target)
    watched = None if drafter is None else Watched(drafter)
    mine = Pipeline(target, watched)
    mine.budgets = way.budgets if last else copy.deepcopy(way.budgets)
    start = clock()
    results = mine.generate_batch(requests, **vars(asked), nodes=way.nodes)
    total = clock() - start
    longest = max((result.stats for result in results), key=lambda stats: stats.num_spec_steps)
    wall = max(result.stats.wall_seconds for result in results)
    seconds = {
        "total": total,
        "decoding": wall - longest.time_to_first_token,
        # The rows of a batch share their steps: the one that took most of them tells what all took.
        **{part: getattr(longest, f"{part}_seconds") for part in PARTS},
        "tree": 0.0 if watched is None else watched.seconds / max(watched.proposals, 1),
        "pass": longest.verify_seconds / max(longest.num_spec_steps, 1),
    }
    answers = [result.token_ids for result in results]
    return Run(answers, [result.stats for result in results], seconds, peak(target.device))


def _generate(pipe: Pipeline, options: dict[str, Any], requests: Sequence[dict[str, Any]], asked: Asked) -> Run:
    sampling: dict[str, Any] = {"do_sample": False}
    if asked.temperature > 0:
        torch.manual_seed(asked.seed)
        sampling = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
    start = clock()
    prompt = pipe.target.encode(requests)
    ids = prompt.input_ids
    mask = torch.ones_like(ids) if prompt.attention_mask is None else prompt.attention_mask
    watch = _Watch()
    inputs = {"input_ids": ids, "attention_mask": mask, **prompt.inputs, **sampling, **options}
    out = pipe.model.generate(**inputs, max_new_tokens=asked.max_new_tokens, streamer=watch)
    end = clock()
    answers = [_ended(row, pipe.target.eos_token_ids) for row in out[:, ids.shape[1] :].tolist()]
    stats = [watch.stats] if len(answers) == 1 else []
    return Run(answers, stats, {"total": end - start, "decoding": end - watch.at}, peak(ids.device))


def _ended(tokens: list[int], eos: Sequence[int]) -> list[int]:
    """A row without the padding behind its end."""
    return next((tokens[: at + 1] for at, token in enumerate(tokens) if token in eos), tokens)


class _Watch:
    """A streamer that only notes when the first new tokens came, and how many each pass of the target gave."""

    def __init__(self) -> None:
        self.at = 0.0
        self.stats = Stats()
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:  # the prompt comes first
            self.at = clock()
        elif self._calls > 2:
            self.stats.record_step(0, 0, value.numel() - 1, value.numel())

    def end(self) -> None:
        """Nothing is held back."""


def report(ways: Sequence[Way], wide: Console) -> list[dict[str, Any]]:
    """Print the tables and return their rows. Ratios are per prompt, then their median and worst over the prompts."""
    theirs, plain = ways[0], ways[1]
    table = Table("way", "acceptance", "vs HF", "vs plain", "worst", "decoding", "worst", "equal")
    rows = []
    for way in ways:
        against = _ratios(plain, way, "total")
        decoding = _ratios(plain, way, "decoding")
        row = {
            "way": way.name,
            "mean_acceptance_length": statistics.mean(way.lengths),
            "ratio_transformers": statistics.median(_ratios(theirs, way, "total")),
            "ratio_plain": statistics.median(against),
            "ratio_plain_worst": min(against),
            "decoding_ratio_plain": statistics.median(decoding),
            "decoding_ratio_plain_worst": min(decoding),
            "equal": way.equal,
            "prompts": len(way.seconds),
        }
        figures = [f"{row[key]:.2f}" for key in list(row)[1:7]]
        table.add_row(way.name, *figures, f"{row['equal']}/{row['prompts']}")
        rows.append(row | (split(way, plain) if way is not theirs else {}))
    wide.print(table)
    wide.print(_split_table(rows))
    return rows


def _ratios(slow: Way, fast: Way, name: str) -> list[float]:
    return [a / b for a, b in zip(slow.column(name), fast.column(name), strict=True)]


def split(way: Way, plain: Way) -> dict[str, Any]:
    """Where a way's time goes.

    Returns:
        ``shares`` of a request's whole time by part, means over the prompts; ``tree_seconds`` and ``pass_seconds``,
        what it takes to draft one tree and to verify it, medians; ``tree_passes`` and ``pass_passes``, the same over
        the time of one pass in plain decoding (over one token), by prompt, then their median.
    """
    shares = {part: statistics.mean(s[part] / s["total"] for s in way.seconds) for part in PARTS}
    shares["rest"] = 1.0 - sum(shares.values())
    costs: dict[str, float] = {}
    for name in ("tree", "pass"):
        # An adaptive way may have drafted no tree for some prompts.
        pairs = [(a, b) for a, b in zip(way.column(name), plain.column("pass"), strict=True) if a > 0.0]
        costs[f"{name}_seconds"] = statistics.median(a for a, _ in pairs) if pairs else 0.0
        costs[f"{name}_passes"] = statistics.median(a / b for a, b in pairs) if pairs else 0.0
    return {"shares": shares, **costs}


def _split_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("way", *PARTS, "rest", "ms per tree", "tree in passes", "verify in passes")
    table.title = "share of a request's time; cost of drafting and of verifying a tree in plain passes of the target"
    for row in rows:
        if "shares" in row:
            shares = [f"{100 * share:.0f} %" for share in row["shares"].values()]
            costs = (f"{1000 * row['tree_seconds']:.2f}", f"{row['tree_passes']:.2f}", f"{row['pass_passes']:.2f}")
            table.add_row(row["way"], *shares, *costs)
    return table


@click.command(cls=Measurement)
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--images", default=24, show_default=True, help="Held-out images.")
@click.option("--videos", default=8, show_default=True, help="Held-out videos of 8 frames.")
@click.option("--warm-up", default=4, show_default=True, help="Other held-out images that every way decodes first.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--max-new-tokens", default=160, show_default=True)
@click.option(
    "--drafters",
    default="ngram,new:recycle,auto",
    show_default=True,
    help="Names or folders, LABEL=SPEC each if wished; new:NAME takes no checkpoint.",
)
@click.option("--nodes", default="default", show_default=True, help="Fixed tree sizes, beside the adaptive one.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON line here too.")
def main(
    model: str,
    images: int,
    videos: int,
    warm_up: int,
    rounds: int,
    max_new_tokens: int,
    drafters: str,
    nodes: str,
    dtype: str,
    out: Path | None,
) -> None:
    """Measure decoding speed on held-out captions: two tables, then one JSON line."""
    pipe = mmspec.load(model, drafter=None, dtype=dtype)
    ways = [Way(TRANSFORMERS), Way(PLAIN)]
    for name, drafter in named_drafters(drafters, pipe.model.config.name_or_path).items():
        for size in dict.fromkeys(tree_sizes(drafter, nodes).values()):
            ways.append(Way(f"{name}, {size} nodes", fork(drafter, pipe.target), size))
        ways.append(Way(f"{name}, adaptive", drafter, None))
    calibrated = cost_table(pipe.target, refresh=True)
    measure(pipe, held_out_requests(warm_up, 0, first=4000), ways, 1, max_new_tokens)
    for way in ways:
        way.clear()
    measure(pipe, held_out_requests(images, videos), ways, rounds, max_new_tokens)
    rows = report(ways, console())
    figures = {"rounds": rounds, "calibrated_pass_seconds": calibrated(1), "ways": rows}
    print_result({**describe(pipe.target), **figures}, out)


if __name__ == "__main__":
    main()
