"""`mmspec train medusa`: sets up the network, objective and drafter to train."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from mmspec.distil.medusa_objective import MedusaObjective
from mmspec.distil.options import MedusaOptions
from mmspec.distil.start import head_weight
from mmspec.distil.tasks import DrafterSetup
from mmspec.drafters.medusa.config import MedusaConfig
from mmspec.drafters.medusa.drafter import Hydra, Medusa
from mmspec.drafters.medusa.network import MedusaNetwork
from mmspec.drafters.shape import TREE, RotaryShape
from mmspec.pipeline import Pipeline


def setup(options: MedusaOptions, pipe: Pipeline, draft_ids: Tensor | None) -> DrafterSetup:
    """What `train_drafter` trains with these options."""
    target = pipe.target
    head = head_weight(target, draft_ids)
    config = MedusaConfig(
        hidden_size=head.shape[1],
        head=len(head) * options.own_outputs,
        head_bias=options.own_outputs and options.grounded,  # as in the published ones
        prefix=asdict(RotaryShape.like(target.config)) if options.prefix else {},
        **options.part(("heads", "layers", "grounded")),
    )
    network = MedusaNetwork(config).to(target.device, torch.float32)
    network.start(head)
    objective = MedusaObjective(**options.part(MedusaObjective.__dataclass_fields__))
    return DrafterSetup(network, objective, Hydra if options.grounded else Medusa, draft_ids, options.part(TREE))
