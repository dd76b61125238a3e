"""A scaled-up pipeline with its drafters, and the resumable record of what was measured on it prompt by prompt."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import mmspec
from mmspec.compare import first_difference
from mmspec.core.drafter import Drafter
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.harness.timing import Method
from mmspec.eval.scale_up.axes import Shape
from mmspec.eval.scale_up.drafters import scale_up_drafter
from mmspec.eval.scale_up.models import scale_up
from mmspec.pipeline import Pipeline
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.vision.drafters.msd.drafter import MSD


def scaled_pipeline(
    model: str, shape: Shape, drafters: str, dtype: torch.dtype, device: torch.device
) -> tuple[Pipeline, dict[str, Drafter]]:
    """A model in a big shape, without a drafter, and its drafters by label, scaled up if they have a network.

    Args:
        drafters: as for ``parse_drafters``.
        device: the big model's.
    """
    small = mmspec.load(model, drafter=None, dtype="float32", device="cpu")
    big = scale_up(small.model, shape, device=device, dtype=dtype)
    scaled = {
        label: scale_up_drafter(drafter, small.model, big)
        for label, drafter in parse_drafters(drafters, small.model.config.name_or_path).items()
    }
    gc.collect()  # the small model
    return Pipeline(type(small.target)(big), small.io, name=model), scaled


def drafter_sizes(drafter: Drafter, target: TransformersTarget) -> dict[str, int]:
    """Number of weights of a drafter's network and of the head over its draft vocabulary."""
    if not isinstance(drafter, MSD):
        return {}
    vocab = target.config.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
    network = sum(parameter.numel() for parameter in drafter.network.parameters())
    return {"network": network, "head": vocab * target.config.hidden_size, "draft_vocabulary": vocab}


def prompt_tokens(pipe: Pipeline, request: Mapping[str, Any]) -> int:
    """KV slots that a prompt fills: masked tokens are not kept."""
    prompt = pipe.encode([request])
    length = prompt.input_ids.shape[1]
    return length if prompt.attention_mask is None else int(prompt.attention_mask.sum())


def prompt_record(pipe: Pipeline, request: Mapping[str, Any], methods: Sequence[Method]) -> dict[str, Any]:
    """Measurements of the last prompt, with the first difference of each unequal answer from transformers'."""
    reference = methods[0].answers[-1]
    return {
        "new_tokens": len(reference),
        "tokens": {method.name: method.tokens[-1] for method in methods},
        "prompt_tokens": prompt_tokens(pipe, request),
        "seconds": {method.name: method.seconds[-1] for method in methods},
        "lengths": {method.name: method.lengths[-1] for method in methods},
        "differences": {
            method.name: asdict(first_difference(pipe, request, {}, method.answers[-1], reference))
            for method in methods[1:]
            if method.answers[-1] != reference
        },
    }


def methods_from_records(names: Sequence[str], prompts: Sequence[Mapping[str, Any]]) -> list[Method]:
    """Methods with the measurements of all recorded prompts."""
    methods = [Method(name) for name in names]
    for method in methods:
        method.seconds = [prompt["seconds"][method.name] for prompt in prompts]
        method.lengths = [prompt["lengths"][method.name] for prompt in prompts]
        method.tokens = [prompt["tokens"][method.name] for prompt in prompts]
        method.equal = sum(method.name not in prompt["differences"] for prompt in prompts)
    return methods


def recorded_prompts(out: Path | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts that earlier calls with the same options have recorded."""
    try:
        content = json.loads(out.read_text()) if out is not None else {}
    except (OSError, ValueError):
        return []
    same = content.get("options") == options and all("tokens" in prompt for prompt in content["prompts"])
    return content["prompts"] if same else []
