"""Which drafter and tree size are fastest on a user's prompts, within a time limit.

All methods decode the same prompts, interleaved; a method that is slower than the fastest one by more than chance drops
out, so that most of the time goes to those that are close. Each prompt is decoded once: a drafter that learns from
answers would have memorised a second one.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter as clock
from typing import Any

from mmspec import plugins
from mmspec.drafters.registry import drafters_for, make_drafter, split
from mmspec.errors import UserError
from mmspec.eval.harness.output import Column, make_table, wide_console
from mmspec.eval.harness.timing import DecodingOptions, Method, TimedBatch, decode, rotated
from mmspec.eval.suite import MEASURED
from mmspec.eval.suite.methods import PLAIN
from mmspec.eval.suite.summary import median_interval
from mmspec.eval.suite.tasks import rows_of
from mmspec.files import read_lines
from mmspec.pipeline import Pipeline
from mmspec.progress import Show


def read_requests(path: Path) -> list[dict[str, Any]]:
    """Requests of a file: a text file has a prompt per line; a ``.jsonl`` file an object per line, with ``prompt`` (or
    the first of ``turns``), and optionally ``images`` and ``videos``, file names relative to it."""
    if path.suffix == ".jsonl":
        requests = []
        for row in rows_of(path):
            prompt, *_ = row.texts("turns" if "turns" in row.values else "prompt")
            requests.append({"prompt": prompt, **{kind: list(row.media(kind, kind)) for kind in ("images", "videos")}})
    else:
        requests = [{"prompt": line.rstrip("\n")} for _, line in read_lines(path) if line.strip()]
    if not requests:
        raise UserError(f"{path}: expected at least one prompt, received none")
    return requests


_FEWEST = 4  # minimum prompts to detect a small difference
_CLEARLY = 0.9  # speed relative to the fastest for which two prompts suffice
_ENOUGH = 16  # maximum prompts for the last method
_NOISE = 1.1  # ratio of speed to tokens per step beyond which a prompt's times are noise
_WARM_UP = 32  # tokens


@dataclass
class Contender:
    """A method and its measurements. ``ratios``: speedup of whole requests over plain decoding, by prompt, clipped to
    its mean acceptance length, as a verify pass is not faster than a plain step; prompts clearly beyond are ``noisy``.
    """

    method: Method
    ratios: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    equal: int = 0
    noisy: int = 0

    @property
    def speed(self) -> float:
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the speedup."""
        found = median_interval(self.ratios)
        return found["low"], found["high"]

    @property
    def doubt(self) -> str:
        """Reason why the interval is unreliable; empty if it is reliable."""
        if (count := len(self.ratios)) < MEASURED:
            return f"{count} measured prompts are too few for a 95 % interval, which takes {MEASURED}"
        seemed = f"times are noise: in {self.noisy} of {count} prompts, the speed was above the tokens per step"
        return seemed if 4 * self.noisy > count else ""

    def add(self, batch: TimedBatch, plain: TimedBatch) -> None:
        self.lengths.append(max(1.0, batch.mean_acceptance_length))
        own, base = (one.seconds["total"] / sum(map(len, one.answers)) for one in (batch, plain))
        self.ratios.append(min(base / own, self.lengths[-1]))
        self.noisy += base / own > _NOISE * self.lengths[-1]
        self.equal += batch.answers == plain.answers

    def to_dict(self) -> dict[str, Any]:
        """Measurements as plain JSON values; ``median``, ``low`` and ``high`` summarize ``ratios``."""
        return {
            "method": self.method.name,
            "prompts": len(self.ratios),
            "mean_acceptance_length": median(self.lengths),
            **median_interval(self.ratios),
            "equal": self.equal,
            "noisy": self.noisy,
        }


def fitting_methods(pipe: Pipeline, drafters: str, sizes: Sequence[int]) -> tuple[list[Method], list[str]]:
    """Methods of the drafters that fit the model, and a line about each that does not."""
    home = plugins.model_path(pipe.name)
    listed = [part.strip() for part in split(drafters, ",") if part.strip()]
    names = (name for part in listed for name in (drafters_for(Path(home)) if part == "auto" else [part]))
    fit, unfit = list[Method](), []
    for name in dict.fromkeys(names):
        try:
            drafter = make_drafter(name, home)
            if drafter is None:
                continue
            drafter.attach(pipe.target)
            fit += [Method(f"{name}, {size} nodes", drafter.fork(pipe.target), size) for size in sizes]
            fit.append(Method(f"{name}, adaptive", drafter, None))
        except UserError as error:
            if name in listed:
                raise
            unfit.append(f"{name} does not fit: {error}")
    if not fit:
        raise UserError(f"expected a drafter, received {drafters!r}: plain decoding is always measured")
    return fit, unfit


def race(
    pipe: Pipeline,
    requests: Sequence[dict[str, Any]],
    methods: Sequence[Method],
    options: DecodingOptions,
    seconds: float,
    show: Show = lambda *_: None,
) -> list[Contender]:
    """Measure methods next to plain decoding until ``seconds`` or prompts run out, or a single method remains.

    Returns the remaining methods, then dropped methods, each group from fast to slow. The first of several requests is
    the warm-up. When the time is up, the current method completes its prompt, which is dropped.
    """
    start, plain = clock(), Method(PLAIN)
    left, out = [Contender(method) for method in methods], list[Contender]()
    warm_up, measured = (requests[:1], requests[1:]) if len(requests) > 1 else ([], requests)
    brief = replace(options, max_new_tokens=min(_WARM_UP, options.max_new_tokens))

    def measure(request: Any, limits: DecodingOptions, turn: int) -> dict[str, TimedBatch]:
        """Results of the remaining methods; empty if the time is up first."""
        found: dict[str, TimedBatch] = {}
        for method in rotated([plain, *(contender.method for contender in left)], turn):
            if clock() - start > seconds:
                return {}
            found[method.name] = decode(pipe, method, [request], limits)
        return found

    show(0.0, seconds, f"{len(methods)} methods")
    for request in warm_up:
        measure(request, brief, 0)
    for turn, request in enumerate(measured):
        if (len(left) == 1 and turn >= _ENOUGH) or not (batches := measure(request, options, turn)):
            break
        base = batches.pop(PLAIN)
        for contender in left:
            contender.add(batches[contender.method.name], base)
        left.sort(key=lambda contender: -contender.speed)
        limit = 1.0 if turn + 1 >= _FEWEST else _CLEARLY  # of the ratios to the fastest on the same prompts
        ratios = [[a / b for a, b in zip(one.ratios, left[0].ratios, strict=True)] for one in left]
        slow = [one for one, own in zip(left, ratios, strict=True) if turn and median_interval(own)["high"] < limit]
        left = [contender for contender in left if contender not in slow]
        out = slow + out
        fastest = f"{len(left)} left, fastest: {left[0].method.name} {left[0].speed:.2f}x"
        show(min(clock() - start, 0.99 * seconds), seconds, fastest)
    show(seconds, seconds)
    if not left[0].ratios:
        raise UserError(f"the time was too short for a prompt with {len(methods)} methods: expected more time")
    return [*left, *out]


def tied(contenders: Sequence[Contender]) -> str:
    """Reason why the first contender has not won; empty if it or plain decoding has won."""
    best, (low, high) = contenders[0], contenders[0].interval
    left = [one for one in contenders[1:] if len(one.ratios) == len(best.ratios)]
    close = [one.method.name for one in left if one.interval[1] >= low] if low > 1 else ["plain decoding"]
    chance = f"{'; '.join([best.method.name, *close])}: they differ by no more than chance"
    return best.doubt or (chance if close and high >= 1 else "")


def print_table(contenders: Sequence[Contender]) -> None:
    columns: list[Column] = [
        ("method", "{method}"),
        ("prompts", "{prompts}"),
        ("tokens per step", "{mean_acceptance_length:.2f}"),
        ("vs plain", "{median:.2f}x"),
        ("95 % interval", lambda row: "" if row["doubt"] else f"{row['low']:.2f} to {row['high']:.2f}"),
        ("equal", "{equal}/{prompts}"),
    ]
    wide_console().print(make_table(columns, [{**one.to_dict(), "doubt": one.doubt} for one in contenders]))


def options_of(model: str, fastest: Contender) -> str:
    """Command-line options for the fastest method or plain decoding; the default if the result is inconclusive."""
    options = ["--model", model, "--drafter"]
    if fastest.doubt or fastest.interval[0] <= 1:
        return shlex.join([*options, "auto" if fastest.doubt else "none"])
    options.append(fastest.method.name.rpartition(", ")[0])
    if fastest.method.nodes is not None:
        options += ["--num-draft-tokens", str(fastest.method.nodes)]
    return shlex.join(options)
