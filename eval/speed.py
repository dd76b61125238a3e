"""How much faster than plain decoding: ``python -m eval.speed``.

For every prompt, all ways of decoding it run in turn, several rounds, on the same model in the same process; a way's
time is its median over the rounds, and its output must equal that of transformers' ``generate``. Ratios are of whole
requests (vision tower and prefill included) and of decoding alone.

Every way first decodes a few other prompts. A drafter that learns from earlier answers, and its budget, start every
round of a prompt as the earlier prompts left them, so that no prompt is ever drafted from its own answer.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any

import click
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import mmspec
from mmspec.budget import AdaptiveBudget
from mmspec.calibrate import cost_table, describe
from mmspec.drafter import Drafter
from mmspec.loading import make_drafter
from mmspec.pipeline import Pipeline
from vision.scenes.clips import sample_clip
from vision.scenes.drawing import draw
from vision.scenes.scene import sample_scene, seeded
from vision.video import Video

TRANSFORMERS, PLAIN = "transformers generate", "mmspec, no drafter"


@dataclass
class Way:
    """One way of decoding and, per prompt, what it took: seconds in all, seconds of decoding, acceptance length."""

    name: str
    drafter: Drafter | None = None
    nodes: int | None = 0
    budgets: dict[int, AdaptiveBudget] = field(default_factory=dict)
    total: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    equal: int = 0

    def clear(self) -> None:
        """Forget what was measured; drafter and budget keep what they learnt."""
        self.total, self.decoding, self.lengths, self.equal = [], [], [], 0


def held_out_requests(images: int, videos: int, frames: int = 8, first: int = 5000) -> list[dict[str, Any]]:
    """Captioning requests on scenes and clips that no embedded model was trained on."""
    requests: list[dict[str, Any]] = []
    for index in range(first, first + images):
        picture = Image.fromarray(draw(sample_scene(seeded("heldout", index))))
        requests.append({"prompt": "Describe the image.", "images": [picture]})
    for index in range(first, first + videos):
        scenes = sample_clip(seeded("heldout", index)).frames(frames)
        pictures = [Image.fromarray(draw(scene)) for scene in scenes]
        times = [float(k) for k in range(frames)]
        requests.append({"prompt": "Describe the video.", "videos": [Video(pictures, times, float(frames), "clip")]})
    return requests


def measure(
    pipe: Pipeline, requests: Sequence[dict[str, Any]], ways: Sequence[Way], rounds: int, max_new_tokens: int
) -> None:
    """Decode every request in every way, in turn, and fill ``ways`` with medians over the rounds."""
    for request in requests:
        took: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
        expected: list[int] | None = None
        for turn in range(rounds):
            # The order rotates, so that no way always runs behind the same one.
            shift = turn % len(ways) if turn else 0
            for way in [*ways[shift:], *ways[:shift]]:
                token_ids, seconds, decoding, length = _decode(pipe, way, request, max_new_tokens, turn == rounds - 1)
                took[way.name].append((seconds, decoding))
                expected = token_ids if expected is None else expected
                if turn == 0:
                    way.equal += token_ids == expected
                    way.lengths.append(length)
        for way in ways:
            way.total.append(statistics.median(seconds for seconds, _ in took[way.name]))
            way.decoding.append(statistics.median(seconds for _, seconds in took[way.name]))


def _decode(
    pipe: Pipeline, way: Way, request: dict[str, Any], max_new_tokens: int, last: bool
) -> tuple[list[int], float, float, float]:
    """Token ids, seconds in all, seconds of decoding behind the first token, acceptance length."""
    start = clock()
    if way.name == TRANSFORMERS:
        prompt = pipe.target.encode([request])
        inputs = {"input_ids": prompt.input_ids, "attention_mask": prompt.attention_mask, **prompt.inputs}
        watch = _FirstToken()
        out = pipe.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=watch)
        end = clock()
        return out[0, prompt.input_ids.shape[1] :].tolist(), end - start, end - watch.at, 1.0
    mine = Pipeline(pipe.target, way.drafter if last else copy.deepcopy(way.drafter))
    mine.budgets = way.budgets if last else copy.deepcopy(way.budgets)
    start = clock()
    result = mine.generate(**request, max_new_tokens=max_new_tokens, nodes=way.nodes)
    stats = result.stats
    return (
        result.token_ids,
        clock() - start,
        stats.wall_seconds - stats.time_to_first_token,
        stats.mean_acceptance_length,
    )


class _FirstToken:
    """A streamer that only notes when the first new token came."""

    def __init__(self) -> None:
        self.at = 0.0
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:  # the prompt comes first
            self.at = clock()

    def end(self) -> None:
        """Nothing is held back."""


def report(ways: Sequence[Way], console: Console) -> list[dict[str, Any]]:
    """Print the table and return its rows. Ratios are per prompt, then their median and worst over the prompts."""
    theirs, plain = ways[0], ways[1]
    table = Table("way", "acceptance", "vs HF", "vs plain", "worst", "decoding", "worst", "equal")
    rows = []
    for way in ways:
        against = [a / b for a, b in zip(plain.total, way.total, strict=True)]
        decoding = [a / b for a, b in zip(plain.decoding, way.decoding, strict=True)]
        row = {
            "way": way.name,
            "mean_acceptance_length": statistics.mean(way.lengths),
            "ratio_transformers": statistics.median(a / b for a, b in zip(theirs.total, way.total, strict=True)),
            "ratio_plain": statistics.median(against),
            "ratio_plain_worst": min(against),
            "decoding_ratio_plain": statistics.median(decoding),
            "decoding_ratio_plain_worst": min(decoding),
            "equal": way.equal,
            "prompts": len(way.total),
        }
        rows.append(row)
        figures = [f"{row[key]:.2f}" for key in list(row)[1:7]]
        table.add_row(way.name, *figures, f"{row['equal']}/{row['prompts']}")
    console.print(table)
    return rows


@click.command()
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--images", default=24, show_default=True, help="Held-out images.")
@click.option("--videos", default=8, show_default=True, help="Held-out videos of 8 frames.")
@click.option("--warm-up", default=4, show_default=True, help="Other held-out images that every way decodes first.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--max-new-tokens", default=160, show_default=True)
@click.option("--drafters", default="ngram,recycle,auto", show_default=True)
@click.option("--nodes", default=16, show_default=True, help="Tree size where the budget is not adaptive.")
@click.option("--dtype", default="auto", show_default=True)
def main(
    model: str,
    images: int,
    videos: int,
    warm_up: int,
    rounds: int,
    max_new_tokens: int,
    drafters: str,
    nodes: int,
    dtype: str,
) -> None:
    """Measure decoding speed on held-out captions: a table, then one JSON line."""
    pipe = mmspec.load(model, drafter=None, dtype=dtype)
    ways, home = [Way(TRANSFORMERS), Way(PLAIN)], pipe.model.config.name_or_path
    for name in drafters.split(","):
        ways.append(Way(f"{name}, {nodes} nodes", make_drafter(name, home), nodes))
        ways.append(Way(f"{name}, adaptive", make_drafter(name, home), None))
    cost_table(pipe.target, refresh=True)
    measure(pipe, held_out_requests(warm_up, 0, first=4000), ways, 1, max_new_tokens)
    for way in ways:
        way.clear()
    measure(pipe, held_out_requests(images, videos), ways, rounds, max_new_tokens)
    rows = report(ways, Console())
    click.echo(json.dumps({**describe(pipe.target), "rounds": rounds, "ways": rows}))


if __name__ == "__main__":
    main()
