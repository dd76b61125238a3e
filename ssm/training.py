"""``mmspec train mamba``: objective and setup of network and drafter."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.pipeline import Pipeline
from mmspec.ssm.mamba import Mamba, MambaConfig, MambaNetwork
from mmspec.training.objectives import LossInput, LossOutput, TokenLoss, next_token_loss
from mmspec.training.options import NextTokenLoss, TreeOptions
from mmspec.training.tasks import DrafterTraining, TrainingTask
from mmspec.validation import options, part, with_fields_of


@options(kw_only=True)
@with_fields_of(MambaConfig)
class MambaOptions(NextTokenLoss, TreeOptions):
    """Options of ``mmspec train mamba``."""


def setup(options: MambaOptions, pipe: Pipeline, draft_ids: Tensor | None) -> TrainingTask:
    chosen = part(options, MambaConfig.__dataclass_fields__)
    network = MambaNetwork(MambaConfig(pipe.target.config.vocab_size, **chosen)).to(pipe.target.device, torch.float32)
    return TrainingTask(network, partial(distillation_loss, options.loss), Mamba, draft_ids)


def distillation_loss(kind: TokenLoss, network: MambaNetwork, given: LossInput) -> LossOutput:
    """Loss against the target's next-token distributions; deterministic."""

    def states() -> Tensor:
        return network(given.batch.tokens, given.batch.keep)[0]

    def head(hidden: Tensor) -> Tensor:
        return F.linear(hidden, network.head_rows(given.draft_ids))

    return next_token_loss(kind, given, states, head)


TRAINING = DrafterTraining(
    MambaOptions,
    setup,
    """Train a Mamba drafter: a small language model distilled from the target's next-token distribution.

    Its input is tokens only: images and videos in --data become placeholder tokens.""",
)
