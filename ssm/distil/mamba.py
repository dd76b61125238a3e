"""`mmspec train mamba`: sets up the network, objective and drafter to train."""

from __future__ import annotations

import torch

from mmspec.distil.data import Conversation
from mmspec.distil.run import draft_vocabulary, train_drafter
from mmspec.distil.tasks import DrafterSetup
from mmspec.drafters.shape import TREE
from mmspec.pipeline import Pipeline
from mmspec.ssm.distil.objective import forward_kl
from mmspec.ssm.distil.options import MambaOptions
from mmspec.ssm.drafters.mamba.config import MambaConfig
from mmspec.ssm.drafters.mamba.drafter import Mamba
from mmspec.ssm.drafters.mamba.network import MambaNetwork


def train_mamba(options: MambaOptions) -> None:
    """Trains with these options, or resumes the run in `options.out`."""
    train_drafter(options, _setup)


def _setup(options: MambaOptions, pipe: Pipeline, conversations: list[Conversation]) -> DrafterSetup:
    torch.manual_seed(options.seed)
    chosen = options.part(MambaConfig.__dataclass_fields__)
    network = MambaNetwork(MambaConfig(pipe.target.config.vocab_size, **chosen)).to(pipe.target.device, torch.float32)
    draft_ids = draft_vocabulary(options.draft_vocabulary, pipe, conversations)
    return DrafterSetup(network, forward_kl, Mamba, draft_ids, options.part(TREE))
