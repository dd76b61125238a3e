"""``mmspec train kangaroo``: objective and setup of network and drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.core.target import output_of
from mmspec.drafters.early_exit import Kangaroo, KangarooConfig, KangarooNetwork
from mmspec.pipeline import Pipeline
from mmspec.targets.transformers_target import FirstLayers
from mmspec.training.objectives import LossInput, LossOutput, causal_pass, next_token_loss
from mmspec.training.options import NextTokenLoss, TreeOptions
from mmspec.training.tasks import DrafterTraining, TrainingTask
from mmspec.validation import inherited, options


@options
class KangarooObjective(NextTokenLoss):
    """Loss against the target's next-token distributions at the same positions (arXiv 2404.18911, formula 2). One pass
    trains all levels of a tree, because the target's first layers also run over drafted tokens."""

    def __call__(self, network: KangarooNetwork, given: LossInput) -> LossOutput:
        """The loss; ``layers`` of the batch are states at the exit layer."""

        def states() -> Tensor:
            assert given.batch.layers is not None, "the extractor reads the network's exit layer"
            return causal_pass(network, network.config, given.batch.layers)

        return next_token_loss(self.loss, given, states)


@options(kw_only=True)
class KangarooOptions(KangarooObjective, TreeOptions):
    exit_layer: int = inherited(KangarooConfig, "exit_layer", "The target's first layers that draft.")


def setup(options: KangarooOptions, pipe: Pipeline, draft_ids: Tensor | None) -> TrainingTask:
    target = pipe.target
    FirstLayers(target, options.exit_layer)  # raises if the target has too few
    config = KangarooConfig.like(target.config, mlp=0, rope_theta=10000.0, exit_layer=options.exit_layer)
    network = KangarooNetwork(config).to(target.device, torch.float32)
    return TrainingTask(network, options, Kangaroo, draft_ids, (output_of(options.exit_layer - 1),))


TRAINING = DrafterTraining(
    KangarooOptions,
    setup,
    "Train a Kangaroo adapter, an attention layer between the target's first layers and its output layer.",
)
