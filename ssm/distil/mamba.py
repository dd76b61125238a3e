"""What `mmspec train mamba` puts together: target, conversations, network, objective, trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
from torch import nn

from mmspec.distil.data import Conversation
from mmspec.distil.run import draft_vocabulary, in_bfloat16, train
from mmspec.distil.tasks import DrafterTask, Extract
from ssm.distil.objective import forward_kl
from ssm.drafters.mamba import Mamba
from ssm.drafters.network import MambaConfig, MambaNetwork


def run(options: Mapping[str, Any]) -> None:
    """Trains as the options of `command.mamba` say, or goes on where `--out` was left."""
    train(options, _task)


def _task(
    options: Mapping[str, Any],
    target: Any,
    training: dict[str, list[Conversation]],
    held_out: list[Conversation],
    extract: Extract,
) -> DrafterTask:
    torch.manual_seed(options["seed"])
    chosen = {field.name: options[field.name] for field in fields(MambaConfig) if field.name in options}
    network = MambaNetwork(MambaConfig(target.config.vocab_size, **chosen)).to(target.device, torch.float32)
    draft_ids = draft_vocabulary(options["draft_vocabulary"], target, chain(*training.values()))
    settings = {name: options[name] for name in ("top_k", "depth", "total_tokens")}

    def drafter(network: nn.Module) -> Mamba:
        return Mamba(network, draft_ids, **settings)  # type: ignore[arg-type]

    return DrafterTask(
        target,
        network,
        forward_kl,
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
