"""What each idea of FLASH is worth: ``python -m eval.flash --out FOLDER --train "--data FILE"``.

One drafter is trained per cell of a grid: tokens per pass, latents per image, glancing; each learns to guess as many
levels, in as many self-fed passes as that takes. The cell of one token per pass and all visual tokens is MSD. Trained
cells are kept in the folder, and a run that was killed goes on where it was. Then all are measured on the same held-out
requests, in turn: images, images with a sign of random letters, several images at once, videos of a few and of many
frames.

Acceptance and the cost of a tree are those of trees of one fixed size; speed, and what drafting costs per token, are
those of the adaptive tree, reading the prompt included. Ratios to MSD are by request, then their median.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import mmspec
from eval.harness.command import Measurement, console, print_result
from eval.harness.prompts import held_out_requests
from eval.harness.timing import PLAIN, Way, measure, ratios
from mmspec.calibrate import cost_table, describe
from mmspec.cli.options import OUT_FILE, OUT_FOLDER
from mmspec.drafter import fork
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from vision.drafters.msd import Flash
from vision.scenes.conversations import several_images
from vision.scenes.drawing import draw
from vision.scenes.scene import Scene, sample_scene, seeded

FIRST = 3_000_000
"""Held-out index from which requests are drawn; see ``eval.harness.prompts``."""
LEVELS = 8


@dataclass(frozen=True)
class Cell:
    """One drafter: ``slots`` tokens per pass, ``latents`` per image (0 keeps all visual tokens), glancing share."""

    slots: int
    latents: int
    glancing: float

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"slots-{self.slots}-latents-{self.latents or 'all'}-glancing-{self.glancing:g}"


MSD = Cell(1, 0, 0.0)


def grid(slots: Sequence[int], latents: Sequence[int], glancing: Sequence[float], levels: int = LEVELS) -> list[Cell]:
    """The cells, MSD first: all pairs with the first share of glancing, and the other shares where images are not
    compressed and there is a pass to be shown something. MSD is trained without glancing."""
    cells = [Cell(k, c, glancing[0]) for k, c in product(slots, latents)]
    cells += [Cell(k, 0, share) for k, share in product(slots, glancing[1:]) if k < levels]
    others = [cell for cell in cells if (cell.slots, cell.latents) != (1, 0)]
    return list(dict.fromkeys([MSD, *others]))


# ---------------------------------------------------------------------- training


def train(cell: Cell, folder: Path, length: Sequence[str], options: Sequence[str], levels: int = LEVELS) -> None:
    """Train a cell, or go on with it, in a process of its own.

    Args:
        length: ``--minutes`` or ``--steps`` with its value.
        levels: of a tree, at least, that it is trained for.
        options: more of ``mmspec train flash``.

    Raises:
        UserError: the training ended with an error, was stopped, or the folder's cell was trained otherwise.
    """
    out = folder / cell.name
    own = {**asdict(cell), "passes": -(-levels // cell.slots)}
    wanted = {**own, "length": list(length), "options": list(options)}
    mark = out / "trained.json"
    if mark.exists():
        if (found := json.loads(mark.read_text())) != wanted:
            raise UserError(f"{out} was trained otherwise: expected {wanted}, received {found}")
        return
    given = [part for name, value in own.items() for part in (f"--{name}", f"{value:g}")]
    command = [sys.executable, "-m", "vision.distil.command", "flash", *length, *options, *given, "--out", str(out)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode or "the drafter lies in" not in done.stderr:
        raise UserError(f"training {cell.name} ended early: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    part = mark.with_suffix(".part")
    part.write_text(json.dumps(wanted) + "\n")
    os.replace(part, mark)


def trained(cell: Cell, folder: Path) -> Flash:
    """The drafter of a trained cell."""
    return Flash.from_checkpoint(folder / cell.name / "drafter")


# ---------------------------------------------------------------------- requests


def requests(images: int, videos: int, frames: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """Held-out requests by suite."""
    found = {
        "images": held_out_requests(images, 0, first=FIRST),
        "signs": [_request("Describe the image.", [_with_sign(index)]) for index in range(images)],
        "several": [
            _request("Describe the images.", several_images(seeded("heldout", FIRST + 20_000 + index)).scenes)
            for index in range(images)
        ],
    }
    for count in frames:
        found[f"video, {count} frames"] = held_out_requests(0, videos, count, first=FIRST + 30_000)
    return {name: asked for name, asked in found.items() if asked}


def _request(prompt: str, scenes: Sequence[Scene]) -> dict[str, Any]:
    return {"prompt": prompt, "images": [Image.fromarray(draw(scene)) for scene in scenes]}


def _with_sign(index: int) -> Scene:
    """A scene whose sign has at least three characters."""
    rng = seeded("heldout", FIRST + 10_000 + index)
    while True:
        scene = sample_scene(rng, sign_share=1.0)
        if scene.sign is not None and len(scene.sign.text) >= 3:
            return scene


# ---------------------------------------------------------------------- measuring


def compare(
    pipe: Pipeline, drafters: Mapping[Cell, Flash], asked: Sequence[dict[str, Any]], settings: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Decode a suite's requests plainly and with every drafter, in turn; a row of figures per cell.

    Args:
        settings: ``nodes`` of the trees of fixed size, ``rounds``, ``max_new_tokens``.
    """
    plain = Way(PLAIN)
    free = {cell: Way(f"{cell.name}, adaptive", drafter, None) for cell, drafter in drafters.items()}
    fixed = {
        cell: Way(f"{cell.name}, fixed", fork(drafter, pipe.target), settings["nodes"])
        for cell, drafter in drafters.items()
    }
    ways = [plain, *fixed.values(), *free.values()]
    measure(pipe, asked[:1], ways, 1, settings["max_new_tokens"])  # budgets learn what drafting costs
    for way in ways:
        way.clear()
    measure(pipe, asked, ways, settings["rounds"], settings["max_new_tokens"])
    rows = []
    for cell in drafters:
        own, tree = free[cell], fixed[cell]
        rows.append(
            {
                **asdict(cell),
                "mean_acceptance_length": statistics.mean(tree.lengths),
                "tree_seconds": statistics.median(tree.column("tree")),
                "adaptive_acceptance_length": statistics.mean(own.lengths),
                "draft_seconds_per_token": sum(own.column("draft")) / sum(own.tokens),
                "tokens_per_second": (sum(own.tokens) - len(asked)) / sum(own.column("decoding")),
                "ratio_plain": statistics.median(ratios(plain, own, "decoding")),
                "equal": tree.equal + own.equal,
                "answers": 2 * len(asked),
            }
        )
    if MSD in drafters:
        first = rows[list(drafters).index(MSD)]
        for cell, row in zip(drafters, rows, strict=True):
            row["draft_cost_to_msd"] = row["draft_seconds_per_token"] / first["draft_seconds_per_token"]
            row["tree_cost_to_msd"] = row["tree_seconds"] / first["tree_seconds"]
            row["ratio_msd"] = statistics.median(ratios(free[MSD], free[cell], "decoding"))
    return rows


def summary(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row per cell over all suites, each of the same weight: mean acceptance length, geometric means of ratios."""
    rows = []
    for own in zip(*found.values(), strict=True):
        row = {name: own[0][name] for name in ("slots", "latents", "glancing")}
        row["mean_acceptance_length"] = statistics.mean(suite["mean_acceptance_length"] for suite in own)
        for name in ("ratio_plain", "ratio_msd", "draft_cost_to_msd", "tree_cost_to_msd"):
            row[name] = statistics.geometric_mean(suite[name] for suite in own)
        rows.append(row)
    return rows


def summary_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per cell."""
    view = Table("slots", "latents", "glancing", "acceptance", "a tree, of MSD's", "drafting per token, of MSD's")
    for name in ("vs plain", "vs MSD"):
        view.add_column(name)
    for row in rows:
        figures = [f"{row['glancing']:g}", f"{row['mean_acceptance_length']:.2f}"]
        figures += [f"{100 * row[name]:.0f} %" for name in ("tree_cost_to_msd", "draft_cost_to_msd")]
        figures += [f"{row[name]:.2f}" for name in ("ratio_plain", "ratio_msd")]
        view.add_row(str(row["slots"]), str(row["latents"] or "all"), *figures)
    return view


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """One line per suite and cell."""
    view = Table("requests", "slots", "latents", "glancing", "acceptance", "ms per tree", "adaptive")
    for name in ("draft µs per token", "of MSD's", "tokens/s", "vs plain", "vs MSD", "equal"):
        view.add_column(name)
    for suite, rows in found.items():
        view.add_section()
        for row in rows:
            view.add_row(
                suite,
                str(row["slots"]),
                str(row["latents"] or "all"),
                f"{row['glancing']:g}",
                f"{row['mean_acceptance_length']:.2f}",
                f"{1e3 * row['tree_seconds']:.2f}",
                f"{row['adaptive_acceptance_length']:.2f}",
                f"{1e6 * row['draft_seconds_per_token']:.0f}",
                f"{100 * row['draft_cost_to_msd']:.0f} %",
                f"{row['tokens_per_second']:.0f}",
                f"{row['ratio_plain']:.2f}",
                f"{row['ratio_msd']:.2f}",
                f"{row['equal']}/{row['answers']}",
            )
            suite = ""
    return view


# ---------------------------------------------------------------------- the command


def _numbers(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    def callback(ctx: click.Context, param: click.Parameter, value: str) -> list[Any]:
        try:
            found = [read(part.strip()) for part in value.split(",")]
        except ValueError as error:
            raise click.BadParameter(f"expected numbers, separated by commas: got {value!r}", ctx, param) from error
        if any(number < 0 for number in found):
            raise click.BadParameter(f"expected no negative number: got {value!r}", ctx, param)
        return found

    return callback


def _latents(part: str) -> int:
    return 0 if part == "all" else int(part)


@click.command(cls=Measurement)
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder of the cells.")
@click.option("--train", "training", default="", help='Options of `mmspec train flash`, e.g. "--data FILE".')
@click.option("--minutes", type=float, help="Training of each cell.")
@click.option("--steps", type=click.IntRange(1), help="Or its length in steps.")
@click.option("--levels", default=LEVELS, show_default=True, help="Of trees, that drafters are trained for.")
@click.option("--slots", default="1,2,3,5,12", show_default=True, callback=_numbers(int), help="Tokens per pass.")
@click.option("--latents", default="4,16,all", show_default=True, callback=_numbers(_latents), help="Per image.")
@click.option(
    "--glancing",
    default="0,0.4",
    show_default=True,
    callback=_numbers(float),
    help="Shares; the first is the usual one.",
)
@click.option("--images", default=12, show_default=True, help="Requests of each suite of images.")
@click.option("--videos", default=8, show_default=True, help="Requests of each suite of videos.")
@click.option("--frames", default="4,8,16", show_default=True, callback=_numbers(int), help="Per video.")
@click.option("--nodes", default=24, show_default=True, help="Drafted nodes of a tree of fixed size.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--max-new-tokens", default=120, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads of all of it.")
@click.option("--result", type=OUT_FILE, help="Write the JSON line here too.")
def main(model: str, out: Path, training: str, minutes: float | None, steps: int | None, **options: Any) -> None:
    """Train the cells that are not trained yet, measure all, print a table and one JSON line."""
    if (minutes is None) == (steps is None):
        raise UserError(f"give minutes or steps: received {minutes} and {steps}")
    length = ["--minutes", f"{minutes:g}"] if steps is None else ["--steps", str(steps)]
    extra = ["--model", model, "--threads", str(options["threads"]), *shlex.split(training)]
    cells = grid(options["slots"], options["latents"], options["glancing"], options["levels"])
    errors = Console(stderr=True)
    for number, cell in enumerate(cells, start=1):
        errors.print(f"{number}/{len(cells)} {cell.name}", markup=False)
        train(cell, out, length, extra, options["levels"])
    _measure(model, out, cells, options, {"length": length, "training": training, "levels": options["levels"]})


def _measure(model: str, out: Path, cells: Sequence[Cell], options: dict[str, Any], about: dict[str, Any]) -> None:
    torch.set_num_threads(options["threads"])
    pipe = mmspec.load(model, drafter=None)
    calibrated = cost_table(pipe.target, refresh=True)
    drafters = {cell: trained(cell, out) for cell in cells}
    for drafter in drafters.values():
        drafter.attach(pipe.target)
    found = {
        suite: compare(pipe, drafters, asked, options)
        for suite, asked in requests(options["images"], options["videos"], options["frames"]).items()
    }
    console().print(table(found))
    over_all = summary(found)
    console().print(summary_table(over_all))
    figures = {name: options[name] for name in ("nodes", "rounds", "max_new_tokens", "images", "videos")}
    rows = [{"suite": suite, **row} for suite, rows in found.items() for row in rows]
    content = {"model": model, **describe(pipe.target), "calibrated_pass_seconds": calibrated(1), "first_scene": FIRST}
    print_result({**content, **about, **figures, "rows": rows, "over_suites": over_all}, options["result"])


if __name__ == "__main__":
    main()
