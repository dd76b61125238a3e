"""`mmspec train mamba`: sets up the network, objective and drafter to train."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.distil.tasks import DrafterSetup
from mmspec.drafters.shape import TREE
from mmspec.pipeline import Pipeline
from mmspec.ssm.distil.objective import forward_kl
from mmspec.ssm.distil.options import MambaOptions
from mmspec.ssm.drafters.mamba.config import MambaConfig
from mmspec.ssm.drafters.mamba.drafter import Mamba
from mmspec.ssm.drafters.mamba.network import MambaNetwork


def setup(options: MambaOptions, pipe: Pipeline, draft_ids: Tensor | None) -> DrafterSetup:
    """What `train_drafter` trains with these options."""
    chosen = options.part(MambaConfig.__dataclass_fields__)
    network = MambaNetwork(MambaConfig(pipe.target.config.vocab_size, **chosen)).to(pipe.target.device, torch.float32)
    return DrafterSetup(network, forward_kl, Mamba, draft_ids, options.part(TREE))
