"""Speedup over plain decoding in the shape of a big model: ``python -m mmspec.eval scaled``.

The embedded model and its drafters are widened and deepened without changing their function (``mmspec.eval.scale_up``),
and decode captions of held-out clips with the methods of ``mmspec.eval.speed``. So acceptance is the small model's, and
time is the big shape's. The 16 frames of a clip occupy as many KV slots as an image of LLaVA-1.5. In bfloat16, where
another order of summation may flip a near tie, every answer that differs from transformers' is recorded with the
position and the margin between the two tokens.

With ``--out``, results are written after every prompt, and a later call with the same options resumes, so that a long
measurement can be split into several calls (``--seconds``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch

from mmspec.cli.options import OUT_FILE
from mmspec.engine.calibrate import cost_table, describe
from mmspec.errors import UserError
from mmspec.eval.decoding.speed_tables import print_speed_tables
from mmspec.eval.harness.output import BenchmarkCommand, git_commit, print_result, wide_console, write_result
from mmspec.eval.harness.prompts import held_out_requests
from mmspec.eval.harness.timing import PLAIN, TRANSFORMERS, Method, compare_methods, drafter_methods, warm_up_methods
from mmspec.eval.scale_up.axes import SHAPES
from mmspec.eval.scale_up.pipeline import (
    drafter_sizes,
    methods_from_records,
    prompt_record,
    prompt_tokens,
    recorded_prompts,
    scaled_pipeline,
)
from mmspec.loading import pick_device
from mmspec.pipeline import Pipeline

CAVEAT = "a small trained model widened to this shape: acceptance is the small model's, time is the big shape's"
_WARM_UP_TOKENS = 8


@click.command(cls=BenchmarkCommand)
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--preset", default="1b", show_default=True, help=f"{', '.join(SHAPES)}.")
@click.option("--drafters", default="msd,flash=auto", show_default=True, help="As for mmspec.eval.speed.")
@click.option("--nodes", default="16,32", show_default=True, help="Tree sizes, in addition to the adaptive one.")
@click.option("--videos", default=8, show_default=True, help="Held-out clips.")
@click.option("--frames", default=16, show_default=True, help="Frames of a clip, of 36 tokens each in tiny-llava.")
@click.option("--max-new-tokens", default=160, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--threads", default=0, help="CPU threads; 0 keeps torch's default.")
@click.option("--seconds", default=0, help="Start no prompt after this time; 0: no limit.")
@click.option("--out", type=OUT_FILE, help="Also write the JSON result to this file.")
def main(threads: int, seconds: int, out: Path | None, **options: Any) -> None:
    """Measure decoding speed in a big shape: two tables, then one JSON line."""
    start = clock()
    if threads:
        torch.set_num_threads(threads)
    model, preset = options["model"], options["preset"]
    if preset not in SHAPES:
        raise UserError(f"preset must be one of {', '.join(SHAPES)}: got {preset!r}")
    dtype = getattr(torch, options["dtype"])
    pipe, drafters = scaled_pipeline(model, SHAPES[preset], options["drafters"], dtype, pick_device("auto"))
    methods = [Method(TRANSFORMERS), Method(PLAIN), *drafter_methods(drafters, options["nodes"], pipe.target)]
    options["threads"] = torch.get_num_threads()
    prompts = recorded_prompts(out, options)
    requests = held_out_requests(0, options["videos"], options["frames"])
    prefix = max(prompt_tokens(pipe, request) for request in requests)
    cost = cost_table(pipe.target, refresh=not prompts, prefix=prefix)
    content: dict[str, Any] = {
        "caveat": CAVEAT,
        **describe(pipe.target),
        "parameters": pipe.model.num_parameters(),
        "drafters": {label: drafter_sizes(drafter, pipe.target) for label, drafter in drafters.items()},
        "commit": git_commit(),
        "pass_tokens": cost.tokens,
        "pass_seconds": cost.seconds,
        "options": options,
        "prompts": prompts,
    }
    _measure_prompts(pipe, requests, methods, content, out, start + seconds if seconds else None)
    console = wide_console()
    console.print(f"{model} as {preset}, {len(prompts)} of {len(requests)} prompts: {CAVEAT}")
    measured = methods_from_records([method.name for method in methods], prompts)
    content["methods"] = print_speed_tables(measured, console)
    print_result(content, out)


def _measure_prompts(
    pipe: Pipeline,
    requests: Sequence[dict[str, Any]],
    methods: Sequence[Method],
    content: dict[str, Any],
    out: Path | None,
    deadline: float | None,
) -> None:
    """Measure the prompts that are not recorded in ``content`` yet, at least one, and write it after each."""
    prompts, max_new_tokens = content["prompts"], content["options"]["max_new_tokens"]
    warm_up = held_out_requests(0, 1, content["options"]["frames"], first=4000)
    warm_up_methods(pipe, warm_up, methods, min(max_new_tokens, _WARM_UP_TOKENS))
    start = clock()
    for request in requests[len(prompts) :]:
        if prompts and deadline is not None and clock() > deadline:
            break
        for method in methods:
            method.clear()
        compare_methods(pipe, [request], methods, 1, max_new_tokens)
        prompts.append(prompt_record(pipe, request, methods))
        click.echo(f"{len(prompts)} of {len(requests)} prompts after {clock() - start:.0f} s", err=True)
        if out is not None:
            write_result(content, out)


if __name__ == "__main__":
    main()
