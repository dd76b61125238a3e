"""Speedup over plain decoding: ``python -m mmspec.eval speed``.

Every prompt is decoded with all methods, interleaved, for several rounds on one model in one process. A method's time
is its median over the rounds, and its output must equal that of transformers' ``generate``. Ratios are of whole
requests (vision tower and prefill included) and of decoding alone.

All methods first decode a few other prompts. A drafter that learns from earlier answers, and its budget, start every
round of a prompt in the same state, so no prompt is drafted from its own answer. With ``--prompts``, the prompts of a
file take the place of held-out captions; the first ones warm up.

A second table shows where the time goes: the shares of prefill, drafting, verification and commit in a whole request,
and the cost of drafting one tree in one-token passes of the target, timed on the same prompts.

With ``--shape``, model and drafters are widened and deepened without changing their function
(``mmspec.eval.scale_up``): acceptance is the small model's, time is the big shape's. ``--frames 16`` then fills as many
KV slots as an image of LLaVA-1.5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch

import mmspec
from mmspec.cli.options import FILE
from mmspec.engine.calibrate import cost_table, describe
from mmspec.eval.decoding.speed_tables import print_speed_tables
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.harness.output import benchmark, wide_console
from mmspec.eval.harness.prompts import held_out_requests, warm_up_requests
from mmspec.eval.harness.timing import PLAIN, TRANSFORMERS, Method, compare_methods, drafter_methods, warm_up_methods
from mmspec.eval.scale_up.axes import SHAPES
from mmspec.eval.scale_up.drafters import prompt_tokens, scaled_pipeline
from mmspec.eval.suite.tasks import TASKS
from mmspec.eval.tuning.race import read_requests
from mmspec.loading import pick_device


@benchmark
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), help="Scale the model up to this shape, in bfloat16.")
@click.option("--images", default=24, show_default=True, help="Held-out images.")
@click.option("--several", default=0, show_default=True, help="Held-out requests with two or three images.")
@click.option("--videos", default=8, show_default=True, help="Held-out videos.")
@click.option("--frames", default=8, show_default=True, help="Per video.")
@click.option("--warm-up", default=4, show_default=True, help="Other held-out images that all methods decode first.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--max-new-tokens", default=160, show_default=True)
@click.option(
    "--drafters",
    default="ngram,new:recycle,auto",
    show_default=True,
    help="Names or folders, optionally LABEL=SPEC; new:NAME ignores the checkpoint in the model's folder.",
)
@click.option("--nodes", default="default", show_default=True, help="Tree sizes, in addition to the adaptive one.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--prompts", type=FILE, help="A file as for mmspec tune, instead of captions; its first prompts warm up.")
def main(
    model: str, shape: str | None, dtype: str, drafters: str, nodes: str, prompts: Path | None, **options: Any
) -> dict[str, Any]:
    """Measure decoding speed on held-out captions: two tables, then one JSON line."""
    if prompts is None:
        warm_up = warm_up_requests(options["warm_up"], visual=True)
        requests = held_out_requests(options["images"], options["videos"], options["frames"])
        several = TASKS["scenes-images"].samples(None, options["several"])
        requests += [sample.conversation.request([]) for sample in several]
    else:
        every = read_requests(prompts)
        warm_up, requests = every[: options["warm_up"]], every[options["warm_up"] :]
    if shape is None:
        pipe = mmspec.load(model, drafter=None, dtype=dtype)
        loaded = parse_drafters(drafters, pipe.model.config.name_or_path)
        cost = cost_table(pipe.target, refresh=True)
    else:
        kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        pipe, loaded = scaled_pipeline(model, SHAPES[shape], drafters, kind, pick_device("auto"))
        cost = cost_table(pipe.target, refresh=True, prefix=max(prompt_tokens(pipe, request) for request in requests))
    methods = [Method(TRANSFORMERS), Method(PLAIN), *drafter_methods(loaded, nodes, pipe.target)]
    rounds, max_new_tokens = options["rounds"], options["max_new_tokens"]
    warm_up_methods(pipe, warm_up, methods, max_new_tokens)
    compare_methods(pipe, requests, methods, rounds, max_new_tokens)
    rows = print_speed_tables(methods, wide_console())
    about = {**describe(pipe.target), "shape": shape, "parameters": pipe.model.num_parameters(), "rounds": rounds}
    return {**about, "calibrated_pass_seconds": cost(1), "methods": rows}
