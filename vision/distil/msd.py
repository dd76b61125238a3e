"""What `mmspec train msd` and `train flash` put together: target, conversations, network, objective, trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmspec.distil.data import Conversation
from mmspec.distil.run import draft_vocabulary, in_bfloat16, train
from mmspec.distil.tasks import DrafterTask, Extract
from mmspec.errors import UserError
from vision.distil.objective import Objective
from vision.drafters.msd import MSD
from vision.drafters.network import MSDConfig, MSDNetwork


def run(options: Mapping[str, Any], kind: type[MSD] = MSD) -> None:
    """Trains as the options of `command.msd` or `command.flash` say, or goes on where `--out` was left.

    Args:
        kind: of drafter. Options that its command does not have keep the defaults of `Objective` and `MSDConfig`.
    """
    train(options, partial(_task, kind))


def _task(
    kind: type[MSD],
    options: Mapping[str, Any],
    target: Any,
    training: dict[str, list[Conversation]],
    held_out: list[Conversation],
    extract: Extract,
) -> DrafterTask:
    torch.manual_seed(options["seed"])
    start = None
    if options["start"] is not None:
        start = MSD.from_checkpoint(options["start"])
        start.attach(target)  # refuses drafters of other targets
    network = MSDNetwork(_shape(options, target, start)).to(target.device, torch.float32)
    draft_ids = draft_vocabulary(options["draft_vocabulary"], target, chain(*training.values()))
    if start is not None:
        _begin_from(start, network, options["start"])
        draft_ids = start.draft_ids if draft_ids is None else draft_ids
    settings = {name: options[name] for name in ("top_k", "depth", "total_tokens")}

    def drafter(network: nn.Module) -> MSD:
        return kind(network, draft_ids, **settings)  # type: ignore[arg-type]

    return DrafterTask(
        target,
        network,
        Objective(**{field.name: options[field.name] for field in fields(Objective) if field.name in options}),
        drafter,
        training,
        held_out,
        extract,
        draft_ids=draft_ids,
        batch=options["batch"],
        bfloat16=in_bfloat16(options["precision"], target),
        prompts=options["prompts"],
        max_new_tokens=options["max_new_tokens"],
    )


def _shape(options: Mapping[str, Any], target: Any, start: MSD | None) -> MSDConfig:
    given = {field.name: options[field.name] for field in fields(MSDConfig) if options.get(field.name) is not None}
    given |= _latents(options, target)
    return replace(start.network.config, **given) if start else MSDConfig.like(target.config, **given)


def _begin_from(start: MSD, network: MSDNetwork, folder: Path) -> None:
    """Take over the weights of another drafter; what it does not have stays random, what is not used is left out."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    shared = {name: tensor for name, tensor in start.network.state_dict().items() if name in wanted}
    for name, tensor in shared.items():
        if tuple(tensor.shape) != wanted[name]:
            raise UserError(f"{folder}: expected {name} {wanted[name]} to start from, received {tuple(tensor.shape)}")
    network.load_state_dict(shared, strict=False)


def _latents(options: Mapping[str, Any], target: Any) -> dict[str, int]:
    """`latents` and `span`, for drafters that compress images."""
    if "ratio" not in options:
        return {}
    # LLaVA's configurations tell how many tokens an image has; in other families it varies.
    span = options["span"] or getattr(target.model.config, "image_seq_length", None) or _SPAN
    latents = max(1, round(span / options["ratio"])) if options["latents"] is None else options["latents"]
    return {"latents": latents, "span": span if latents else 0}


_SPAN = 256
"""Visual tokens that share latents where a target's configuration does not tell how many an image has."""
