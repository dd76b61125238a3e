"""Which drafter and tree size are fastest on a user's prompts, within a time limit.

All methods decode the same prompts, interleaved; a method that is slower than the fastest one by more than chance drops
out, so that most of the time goes to those that are close. Each prompt is decoded once: a drafter that learns from
answers would have memorised a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter as clock
from typing import Any

from mmspec.errors import UserError
from mmspec.eval.harness.acceptance import median_interval
from mmspec.eval.harness.timing import PLAIN, DecodingOptions, Method, TimedBatch, run_interleaved
from mmspec.eval.suite.data import rows_of
from mmspec.files import read_lines
from mmspec.pipeline import Pipeline


def read_requests(path: Path) -> list[dict[str, Any]]:
    """Requests of a file: a text file has a prompt per line; a ``.jsonl`` file an object per line, with ``prompt`` (or
    ``turns``, of which the first is taken), and ``images`` and ``videos``, files beside it, if any.

    Raises:
        UserError: an unreadable file or row, or none at all.
    """
    if path.suffix == ".jsonl":
        requests = [_request(row) for row in rows_of(path)]
    else:
        requests = [{"prompt": line.rstrip("\n")} for _, line in read_lines(path) if line.strip()]
    if not requests:
        raise UserError(f"{path}: expected at least one prompt, received none")
    return requests


def _request(row: Any) -> dict[str, Any]:
    texts = row.texts("turns" if "turns" in row.values else "prompt")
    return {"prompt": texts[0], "images": list(row.images("images")), "videos": list(row.videos("videos"))}


_FEWEST = 4  # prompts that may show a small difference
_CLEARLY = 0.9  # speed against the fastest at which two do
_ENOUGH = 16  # prompts of the last method
_WARM_UP = 32  # tokens


@dataclass
class Contender:
    """A method and its measurements.

    Attributes:
        method: drafter and draft tokens per step.
        ratios: speed of whole requests against plain decoding, by prompt.
        lengths: mean acceptance lengths, by prompt.
        equal: number of prompts whose answer equals that of plain decoding.
    """

    method: Method
    ratios: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    equal: int = 0

    @property
    def speed(self) -> float:
        return median(self.ratios)

    def add(self, batch: TimedBatch, plain: TimedBatch) -> None:
        self.ratios.append(_seconds_per_token(plain) / _seconds_per_token(batch))
        self.lengths.append(batch.mean_acceptance_length)
        self.equal += batch.answers == plain.answers

    def to_dict(self) -> dict[str, Any]:
        """Its measurements as plain JSON values; ``median``, ``low`` and ``high`` are of ``ratios``."""
        return {
            "method": self.method.name,
            "prompts": len(self.ratios),
            "mean_acceptance_length": fmean(self.lengths),
            **median_interval(self.ratios),
            "equal": self.equal,
        }


def race(
    pipe: Pipeline,
    requests: Sequence[dict[str, Any]],
    methods: Sequence[Method],
    options: DecodingOptions,
    seconds: float,
    progress: Callable[[Sequence[Contender]], None] = lambda _: None,
) -> list[Contender]:
    """Measure methods until the time or the prompts are used up, or one is left.

    Args:
        pipe: of the model.
        requests: decoded in order; the first one is the warm-up, if there are others.
        methods: plain decoding is measured in addition.
        seconds: limit; the prompt at hand is completed.
        progress: called after every prompt with those that are left, the fastest first.

    Returns:
        All methods: those that are left first, each group from fast to slow.
    """
    start, plain = clock(), Method(PLAIN)
    left, out = [Contender(method) for method in methods], list[Contender]()
    warm_up, measured = (requests[:1], requests[1:]) if len(requests) > 1 else ([], requests)
    for request in warm_up:
        brief = replace(options, max_new_tokens=min(_WARM_UP, options.max_new_tokens))
        run_interleaved(pipe, [request], [plain, *methods], 1, brief)
    for turn, request in enumerate(measured):
        if (turn and clock() - start > seconds) or (len(left) == 1 and turn >= _ENOUGH):
            break
        running = [plain, *(contender.method for contender in left)]
        shift = turn % len(running)
        batches = run_interleaved(pipe, [request], running[shift:] + running[:shift], 1, options)
        for contender in left:
            contender.add(batches[contender.method.name][0], batches[PLAIN][0])
        left.sort(key=lambda contender: -contender.speed)
        slow = [contender for contender in left[1:] if turn and _is_slower(contender, left[0])]
        left = [contender for contender in left if contender not in slow]
        out = slow + out
        progress(left)
    return [*left, *out]


def _is_slower(one: Contender, best: Contender) -> bool:
    """By more than chance, on the same prompts."""
    ratios = [a / b for a, b in zip(one.ratios, best.ratios, strict=True)]
    return median_interval(ratios)["high"] < (1.0 if len(ratios) >= _FEWEST else _CLEARLY)


def _seconds_per_token(batch: TimedBatch) -> float:
    return batch.seconds["total"] / sum(map(len, batch.answers))
