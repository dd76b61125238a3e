"""Ablation of FLASH's settings: training a grid of drafters and measuring them on the same requests.

See ``mmspec.eval.flash`` for what the grid holds and what is measured.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from mmspec.core.drafter import fork
from mmspec.errors import UserError
from mmspec.eval.harness.output import Column, make_table, milliseconds, percent
from mmspec.eval.harness.prompts import held_out_requests, picture
from mmspec.eval.harness.timing import PLAIN, Method, compare_methods, time_ratios, warm_up_methods
from mmspec.files import write_text
from mmspec.pipeline import Pipeline
from mmspec.vision.drafters.msd.drafter import Flash
from mmspec.vision.scenes.conversations import several_images
from mmspec.vision.scenes.scene import Scene, sample_scene, seeded

FIRST_INDEX = 3_000_000
"""First held-out index of the requests; see ``mmspec.eval.harness.prompts``."""

LEVELS = 8
"""Tree depth that drafters are trained for."""


@dataclass(frozen=True)
class Variant:
    """Settings of one drafter of the grid.

    Attributes:
        slots: tokens per drafter pass.
        latents: compressed visual tokens per image; 0 keeps all visual tokens.
        glancing: share of glancing in training.
    """

    slots: int
    latents: int
    glancing: float

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"slots-{self.slots}-latents-{self.latents or 'all'}-glancing-{self.glancing:g}"


MSD = Variant(1, 0, 0.0)
"""The baseline: one token per pass, all visual tokens, no glancing."""


def variant_grid(
    slots: Sequence[int], latents: Sequence[int], glancing: Sequence[float], levels: int = LEVELS
) -> list[Variant]:
    """The variants to train, MSD first.

    These are all pairs of ``slots`` and ``latents`` with the first share of glancing, and the other shares for
    uncompressed images with fewer slots than levels, since glancing needs a second pass. MSD trains without glancing.
    """
    variants = [Variant(k, c, glancing[0]) for k, c in product(slots, latents)]
    variants += [Variant(k, 0, share) for k, share in product(slots, glancing[1:]) if k < levels]
    others = [variant for variant in variants if (variant.slots, variant.latents) != (1, 0)]
    return list(dict.fromkeys([MSD, *others]))


def train_variant(
    variant: Variant, folder: Path, length: Sequence[str], options: Sequence[str], levels: int = LEVELS
) -> None:
    """Train a variant in its own process, or resume its training; a trained variant is left as it is.

    Args:
        length: ``--minutes`` or ``--steps`` with its value.
        levels: minimum tree depth that it is trained for.
        options: more options of ``mmspec train flash``.

    Raises:
        UserError: training failed or was stopped, or the folder holds a variant trained with other settings.
    """
    out = folder / variant.name
    own = {**asdict(variant), "passes": -(-levels // variant.slots)}
    settings = {**own, "length": list(length), "options": list(options)}
    marker = out / "trained.json"
    if marker.exists():
        if (trained := json.loads(marker.read_text())) != settings:
            raise UserError(f"{out} was trained with other settings: expected {settings}, received {trained}")
        return
    flags = [part for name, value in own.items() for part in (f"--{name}", f"{value:g}")]
    command = [
        sys.executable,
        "-m",
        "mmspec.vision.cli.drafters",
        "flash",
        *length,
        *options,
        *flags,
        "--out",
        str(out),
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode or "stopped at step" in done.stderr:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"training {variant.name} ended early: {last_line}")
    write_text(marker, json.dumps(settings) + "\n")


def load_variant(variant: Variant, folder: Path) -> Flash:
    """The drafter of a trained variant."""
    return Flash.from_checkpoint(folder / variant.name / "drafter")


def ablation_requests(images: int, videos: int, frames: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """Held-out requests by suite: images, images with a sign, several images, and videos by number of frames."""
    suites = {
        "images": held_out_requests(images, 0, first=FIRST_INDEX),
        "signs": [_request("Describe the image.", [_with_sign(index)]) for index in range(images)],
        "several": [
            _request("Describe the images.", several_images(seeded("heldout", FIRST_INDEX + 20_000 + index)).scenes)
            for index in range(images)
        ],
    }
    for count in frames:
        suites[f"video, {count} frames"] = held_out_requests(0, videos, count, first=FIRST_INDEX + 30_000)
    return {name: requests for name, requests in suites.items() if requests}


def _request(prompt: str, scenes: Sequence[Scene]) -> dict[str, Any]:
    return {"prompt": prompt, "images": [picture(scene) for scene in scenes]}


def _with_sign(index: int) -> Scene:
    """A scene whose sign has at least three characters."""
    rng = seeded("heldout", FIRST_INDEX + 10_000 + index)
    while True:
        scene = sample_scene(rng, sign_share=1.0)
        if scene.sign is not None and len(scene.sign.text) >= 3:
            return scene


def compare_variants(
    pipe: Pipeline,
    drafters: Mapping[Variant, Flash],
    requests: Sequence[dict[str, Any]],
    nodes: int,
    rounds: int,
    max_new_tokens: int,
) -> list[dict[str, Any]]:
    """Decode a suite's requests plainly and with every drafter, interleaved.

    Args:
        nodes: size of the fixed trees, which acceptance and the cost of a tree are measured on.

    Returns:
        A row of figures per variant.
    """
    plain = Method(PLAIN)
    adaptive = {variant: Method(f"{variant.name}, adaptive", drafter, None) for variant, drafter in drafters.items()}
    fixed = {
        variant: Method(f"{variant.name}, fixed", fork(drafter, pipe.target), nodes)
        for variant, drafter in drafters.items()
    }
    methods = [plain, *fixed.values(), *adaptive.values()]
    warm_up_methods(pipe, requests[:1], methods, max_new_tokens)
    compare_methods(pipe, requests, methods, rounds, max_new_tokens)
    rows = [_variant_row(variant, plain, fixed[variant], adaptive[variant]) for variant in drafters]
    if MSD in drafters:
        msd = rows[list(drafters).index(MSD)]
        for variant, row in zip(drafters, rows, strict=True):
            row["draft_cost_to_msd"] = row["draft_seconds_per_token"] / msd["draft_seconds_per_token"]
            row["tree_cost_to_msd"] = row["tree_seconds"] / msd["tree_seconds"]
            row["ratio_msd"] = statistics.median(time_ratios(adaptive[MSD], adaptive[variant], "decoding"))
    return rows


def _variant_row(variant: Variant, plain: Method, fixed: Method, adaptive: Method) -> dict[str, Any]:
    count = len(fixed.tokens)
    return {
        **asdict(variant),
        "mean_acceptance_length": statistics.mean(fixed.lengths),
        "tree_seconds": statistics.median(fixed.column("tree")),
        "adaptive_acceptance_length": statistics.mean(adaptive.lengths),
        "draft_seconds_per_token": sum(adaptive.column("draft")) / sum(adaptive.tokens),
        "tokens_per_second": (sum(adaptive.tokens) - count) / sum(adaptive.column("decoding")),
        "ratio_plain": statistics.median(time_ratios(plain, adaptive, "decoding")),
        "equal": fixed.equal + adaptive.equal,
        "answers": 2 * count,
    }


def average_over_suites(by_suite: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row per variant, suites weighted equally: mean acceptance length and geometric means of ratios."""
    rows = []
    for own in zip(*by_suite.values(), strict=True):
        row = {name: own[0][name] for name in ("slots", "latents", "glancing")}
        row["mean_acceptance_length"] = statistics.mean(suite["mean_acceptance_length"] for suite in own)
        for name in ("ratio_plain", "ratio_msd", "draft_cost_to_msd", "tree_cost_to_msd"):
            row[name] = statistics.geometric_mean(suite[name] for suite in own)
        rows.append(row)
    return rows


_SETTINGS: list[Column] = [
    ("slots", "{slots}"),
    ("latents", lambda row: str(row["latents"] or "all")),
    ("glancing", "{glancing:g}"),
    ("acceptance", "{mean_acceptance_length:.2f}"),
]


def average_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per variant."""
    columns: list[Column] = [
        *_SETTINGS,
        ("a tree, of MSD's", percent("tree_cost_to_msd")),
        ("drafting per token, of MSD's", percent("draft_cost_to_msd")),
        ("vs plain", "{ratio_plain:.2f}"),
        ("vs MSD", "{ratio_msd:.2f}"),
    ]
    return make_table(columns, rows)


def suite_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per suite and variant."""
    columns: list[Column] = [
        ("requests", "{suite}"),
        *_SETTINGS,
        ("ms per tree", milliseconds("tree_seconds")),
        ("adaptive", "{adaptive_acceptance_length:.2f}"),
        ("draft µs per token", lambda row: f"{1e6 * row['draft_seconds_per_token']:.0f}"),
        ("of MSD's", percent("draft_cost_to_msd")),
        ("tokens/s", "{tokens_per_second:.0f}"),
        ("vs plain", "{ratio_plain:.2f}"),
        ("vs MSD", "{ratio_msd:.2f}"),
        ("equal", "{equal}/{answers}"),
    ]
    return make_table(columns, rows, sections=("suite",))
