"""`mmspec train mamba`: sets up the network, objective and drafter to train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from mmspec.distil.data import Conversation
from mmspec.distil.run import draft_vocabulary, train_drafter, tree_settings
from mmspec.distil.tasks import DrafterSetup
from mmspec.pipeline import Pipeline
from mmspec.ssm.distil.objective import forward_kl
from mmspec.ssm.drafters.mamba.config import MambaConfig
from mmspec.ssm.drafters.mamba.drafter import Mamba
from mmspec.ssm.drafters.mamba.network import MambaNetwork


def train_mamba(options: Mapping[str, Any]) -> None:
    """Trains with the options of `command.mamba`, or resumes the run in `options["out"]`."""
    train_drafter(options, _setup)


def _setup(options: Mapping[str, Any], pipe: Pipeline, conversations: list[Conversation]) -> DrafterSetup:
    torch.manual_seed(options["seed"])
    chosen = {field.name: options[field.name] for field in fields(MambaConfig) if field.name in options}
    network = MambaNetwork(MambaConfig(pipe.target.config.vocab_size, **chosen)).to(pipe.target.device, torch.float32)
    draft_ids = draft_vocabulary(options["draft_vocabulary"], pipe, conversations)
    return DrafterSetup(network, forward_kl, Mamba, draft_ids, tree_settings(options))
