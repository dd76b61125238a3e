"""How much faster than plain decoding in the shape of a big model: ``python -m eval.scaled``.

The embedded model and its drafters are widened and deepened without changing what they say (`eval.scale_up.axes`), and
decode held-out captions in the ways of `eval.speed`. Acceptance is therefore the small model's; time is the big
shape's. An image takes as many entries of the caches as in LLaVA-1.5: masked ones stand before the prompt, which are
read and weigh nothing. In bfloat16, where another order of sums may turn a near tie, every answer that differs from
transformers' is listed with the place and the margin between the two tokens.

With ``--out``, each prompt is written as soon as it is measured, and a later call with the same options goes on behind
it: a long measurement can be made in pieces (``--seconds``).
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch

import mmspec
from eval.harness.command import Measurement, commit, console, print_result, write_result
from eval.harness.drafters import named_drafters, tree_sizes
from eval.harness.prompts import held_out_requests
from eval.harness.timing import PLAIN, TRANSFORMERS, Way, measure
from eval.scale_up.axes import SHAPES
from eval.scale_up.drafters import scaled
from eval.scale_up.models import scale_up
from eval.speed import report
from mmspec.calibrate import cost_table, describe
from mmspec.cli.options import OUT_FILE
from mmspec.compare import first_difference
from mmspec.drafter import Drafter, fork
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.target import Prompt
from mmspec.transformers_target import TransformersTarget
from vision.drafters.msd import MSD
from vision.targets import VisionTarget

_WARM_UP = 8  # tokens of another caption that every way says first
CAVEAT = "a small trained model widened to this shape: acceptance is the small model's, time is the big shape's"


class LongPrompts(VisionTarget):
    """A target whose images take more entries than the model looks at: masked ones stand before the prompt.

    Attributes:
        image_tokens: entries of an image in all.
    """

    image_tokens = 0

    def encode(self, requests: Sequence[Mapping[str, Any]], **inputs: Any) -> Prompt:
        prompt = super().encode(requests, **inputs)
        ids, mask = prompt.input_ids, prompt.attention_mask
        mask = torch.ones_like(ids) if mask is None else mask
        images = int(self._is_visual(ids).sum(1).max()) // self.model.config.image_seq_length
        added = max(0, images * (self.image_tokens - self.model.config.image_seq_length))
        if added == 0:
            return prompt
        blank = ids.new_zeros(len(ids), added)
        return Prompt(torch.cat([blank, ids], 1), torch.cat([blank, mask], 1), prompt.inputs)


def scaled_pipeline(
    model: str, preset: str, drafters: str, dtype: str, image_tokens: int
) -> tuple[Pipeline, dict[str, Drafter]]:
    """The model in a big shape, without a drafter, and its drafters, scaled where they have weights of that kind."""
    if preset not in SHAPES:
        raise UserError(f"preset must be one of {', '.join(SHAPES)}: got {preset!r}")
    small = mmspec.load(model, drafter=None, dtype="float32")
    big = scale_up(small.model, SHAPES[preset], device=small.target.device, dtype=getattr(torch, dtype))
    target = LongPrompts(big, small.processor)
    target.image_tokens = image_tokens
    found = {
        name: scaled(drafter, small.model, big)
        for name, drafter in named_drafters(drafters, small.model.config.name_or_path).items()
    }
    gc.collect()  # the small model
    return Pipeline(target, name=f"{model} as {preset}"), found


def sizes_of(drafter: Drafter, target: Any) -> dict[str, int]:
    """Weights that a drafter reads: of its network, and of the head over its vocabulary."""
    if not isinstance(drafter, MSD):
        return {}
    vocab = target.config.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
    network = sum(parameter.numel() for parameter in drafter.network.parameters())
    return {"network": network, "head": vocab * target.config.hidden_size, "draft_vocabulary": vocab}


def differences(target: TransformersTarget, request: Mapping[str, Any], ways: Sequence[Way]) -> dict[str, Any]:
    """Where answers part from that of transformers, and the margin there, by way."""
    theirs = ways[0].answers[-1]
    found = {}
    for way in ways[1:]:
        ours = way.answers[-1]
        if ours != theirs:
            found[way.name] = asdict(first_difference(target, request, {}, ours, theirs))
    return found


def record(target: TransformersTarget, request: Mapping[str, Any], ways: Sequence[Way]) -> dict[str, Any]:
    """What was measured of the last prompt."""
    return {
        "new_tokens": len(ways[0].answers[-1]),
        "tokens": {way.name: way.tokens[-1] for way in ways},
        "prompt_tokens": target.encode([request]).input_ids.shape[1],
        "seconds": {way.name: way.seconds[-1] for way in ways},
        "lengths": {way.name: way.lengths[-1] for way in ways},
        "differences": differences(target, request, ways),
    }


def replay(names: Sequence[str], prompts: Sequence[Mapping[str, Any]]) -> list[Way]:
    """The ways as measured on all prompts, of this call and of earlier ones."""
    ways = [Way(name) for name in names]
    for way in ways:
        way.seconds = [prompt["seconds"][way.name] for prompt in prompts]
        way.lengths = [prompt["lengths"][way.name] for prompt in prompts]
        way.tokens = [prompt["tokens"][way.name] for prompt in prompts]
        way.equal = sum(way.name not in prompt["differences"] for prompt in prompts)
    return ways


def _earlier(out: Path | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts measured by earlier calls with the same options."""
    try:
        found = json.loads(out.read_text()) if out is not None else {}
    except (OSError, ValueError):
        return []
    same = found.get("options") == options and all("tokens" in prompt for prompt in found["prompts"])
    return found["prompts"] if same else []


@click.command(cls=Measurement)
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--preset", default="1b", show_default=True, help=f"{', '.join(SHAPES)}.")
@click.option("--drafters", default="msd,flash=auto", show_default=True, help="As for eval.speed.")
@click.option("--nodes", default="16,32", show_default=True, help="Fixed tree sizes, beside the adaptive one.")
@click.option("--images", default=8, show_default=True, help="Held-out images.")
@click.option("--image-tokens", default=576, show_default=True, help="Entries of an image, masked ones included.")
@click.option("--max-new-tokens", default=160, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--threads", default=0, help="Of the CPU; 0 leaves them.")
@click.option("--seconds", default=0, help="Begin no prompt after so many; 0: no limit.")
@click.option("--out", type=OUT_FILE, help="Write the JSON line here too.")
def main(threads: int, seconds: int, out: Path | None, **options: Any) -> None:
    """Measure decoding speed in a big shape: two tables, then one JSON line."""
    start = clock()
    if threads:
        torch.set_num_threads(threads)
    pipe, drafters = scaled_pipeline(*(options[k] for k in ("model", "preset", "drafters", "dtype", "image_tokens")))
    ways = [Way(TRANSFORMERS), Way(PLAIN)]
    for name, drafter in drafters.items():
        for size in dict.fromkeys(tree_sizes(drafter, options["nodes"]).values()):
            ways.append(Way(f"{name}, {size} nodes", fork(drafter, pipe.target), size))
        ways.append(Way(f"{name}, adaptive", drafter, None))
    options["threads"] = torch.get_num_threads()
    prompts = _earlier(out, options)
    cost = cost_table(pipe.target, refresh=not prompts, prefix=max(128, options["image_tokens"]))
    measure(pipe, held_out_requests(1, 0, first=4000), ways, 1, min(options["max_new_tokens"], _WARM_UP))
    content: dict[str, Any] = {
        "caveat": CAVEAT,
        **describe(pipe.target),
        "parameters": pipe.model.num_parameters(),
        "drafters": {name: sizes_of(drafter, pipe.target) for name, drafter in drafters.items()},
        "commit": commit(),
        "pass_tokens": cost.tokens,
        "pass_seconds": cost.seconds,
        "options": options,
        "prompts": prompts,
    }
    requests = held_out_requests(options["images"], 0)
    while len(prompts) < len(requests) and not (prompts and 0 < seconds < clock() - start):
        request = requests[len(prompts)]
        for way in ways:
            way.clear()
        measure(pipe, [request], ways, 1, options["max_new_tokens"])
        prompts.append(record(pipe.target, request, ways))
        click.echo(f"{len(prompts)} of {len(requests)} prompts after {clock() - start:.0f} s", err=True)
        if out is not None:
            write_result(content, out)
    wide = console()
    wide.print(f"{pipe.name}, {len(prompts)} of {len(requests)} prompts: {CAVEAT}")
    content["ways"] = report(replay([way.name for way in ways], prompts), wide)
    print_result(content, out)


if __name__ == "__main__":
    main()
