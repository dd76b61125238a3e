"""``mmspec train medusa``, including Hydra: objective and setup of network and drafter."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from mmspec.drafters.medusa import Hydra, Medusa, MedusaConfig, MedusaNetwork
from mmspec.drafters.spec import RotaryShape
from mmspec.pipeline import Pipeline
from mmspec.training.objectives import LossInput, LossOutput, TokenLosses, causal_pass
from mmspec.training.options import NextTokenLoss, Passes, TreeOptions
from mmspec.training.tasks import DrafterTraining, OnlineLearner, TrainingTask, head_weight
from mmspec.validation import inherited, option, options, part


@options
class MedusaObjective(NextTokenLoss):
    """Loss of heads against the target's next-token distributions: the sum of ``decay ** i`` times the loss of head i
    (arXiv 2401.10774, section 2.2.1, which trains on tokens; arXiv 2402.05109, section 3.1).

    Head i reads the target's state before an answer token, and predicts the (i+1)-th token after that answer token.

    The metrics ``token_k`` and ``right_k`` are loss and accuracy of the k-th head.
    """

    decay: float = inherited(Passes, "decay", "Weight of a head to the one before.")

    def __call__(self, network: MedusaNetwork, given: LossInput) -> LossOutput:
        """The losses; deterministic."""
        batch = given.batch
        followed = batch.answer[:, 1:-1] & batch.answer[:, 2:]
        losses = TokenLosses(self.loss, given, batch.hidden[:, 1:-1], followed)
        if not losses.count:
            return losses.output
        positions = torch.arange(followed.shape[1], device=followed.device).expand_as(followed)
        states, wanted = network.state(causal_pass(network, network.config.layer, batch.hidden)), followed
        for number, chain in enumerate(network.heads):
            length = followed.shape[1] - number
            wanted = wanted[:, :length] & followed[:, number:]
            if not bool(wanted.any()):
                break
            before = number + 1 if network.config.grounded else 0
            read = [states[:, :length], *(batch.embeds[:, 1 + k : 1 + k + length] for k in range(before))]
            scores = network.scores(number, [chain(torch.cat([x[wanted] for x in read], dim=-1))], losses.head)
            losses.add(number + 1, scores, losses.goals(wanted, positions[:, number:]), self.decay**number)
        return losses.output


@options(kw_only=True)
class MedusaOptions(MedusaObjective, TreeOptions):
    """Options of ``mmspec train medusa``, including Hydra."""

    heads: int = inherited(MedusaConfig, "heads", "Heads, one per drafted token.", default=4)
    layers: int = inherited(MedusaConfig, "layers", "Residual layers per head.")
    own_outputs: bool = option(
        True, "Separate output layers, initialised from the target's.", names=("--own-outputs/--shared-output",)
    )
    grounded: bool = inherited(MedusaConfig, "grounded", "Heads also read previously drafted tokens (Hydra).")
    prefix: bool = option(False, "A decoder layer between the target's states and the heads (Hydra++).")


def setup(options: MedusaOptions, pipe: Pipeline, draft_ids: Tensor | None) -> TrainingTask:
    target = pipe.target
    head = head_weight(target, draft_ids)
    config = MedusaConfig(
        hidden_size=head.shape[1],
        head=len(head) * options.own_outputs,
        head_bias=options.own_outputs and options.grounded,  # like published heads
        prefix=asdict(RotaryShape.like(target.config)) if options.prefix else {},
        **part(options, ("heads", "layers", "grounded")),
    )
    network = MedusaNetwork(config).to(target.device, torch.float32)
    network.start(head)
    return TrainingTask(network, options, Hydra if options.grounded else Medusa, draft_ids)


TRAINING = DrafterTraining(
    MedusaOptions, setup, "Train Medusa or Hydra heads, one per token ahead, on the target's last state."
)
online = partial(OnlineLearner, MedusaObjective(loss="lk"))
