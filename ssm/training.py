"""``mmspec train mamba``: objective and setup of network and drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.core.target import Target
from mmspec.pipeline import Pipeline
from mmspec.ssm.mamba import Mamba, MambaConfig, MambaNetwork
from mmspec.training.features import Features
from mmspec.training.objectives import LossOutput
from mmspec.training.options import TreeOptions
from mmspec.training.tasks import DrafterTraining, TrainingTask
from mmspec.validation import inherited, options, part


@options(kw_only=True)
class MambaOptions(TreeOptions):
    """Options of ``mmspec train mamba``: run and network."""

    hidden_size: int = inherited(MambaConfig, "hidden_size", "Width.")
    layers: int = inherited(MambaConfig, "layers", "Mamba-2 layers.")
    heads: int = inherited(MambaConfig, "heads", "Heads per layer.")
    head_dim: int = inherited(MambaConfig, "head_dim", "Channels per head.")
    state: int = inherited(MambaConfig, "state", "State size per channel.")
    window: int = inherited(MambaConfig, "window", "Width of its convolution.")


def setup(options: MambaOptions, pipe: Pipeline, draft_ids: Tensor | None) -> TrainingTask:
    chosen = part(options, MambaConfig.__dataclass_fields__)
    network = MambaNetwork(MambaConfig(pipe.target.config.vocab_size, **chosen)).to(pipe.target.device, torch.float32)
    return TrainingTask(network, forward_kl, Mamba, draft_ids)


def forward_kl(
    network: MambaNetwork, target: Target, batch: Features, draft_ids: Tensor | None = None, *_: Any
) -> LossOutput:
    """Mean KL(target || drafter) of the next token, over answer tokens followed by another answer token.

    Arguments: see ``mmspec.training.tasks.Objective``; deterministic.

    Returns:
        The loss in nats, and the metrics ``kl`` (the loss), ``agreement`` (share of positions where the drafter's
        argmax equals the target's) and ``right`` (where it equals the next token of the answer).
    """
    positions = batch.answer[:, :-1] & batch.answer[:, 1:]
    hidden, _ = network(batch.tokens, batch.keep)
    drafter_logits = F.linear(hidden[:, :-1][positions], network.head_rows(draft_ids)).float()
    with torch.no_grad():
        logits = target.head(batch.hidden[:, :-1][positions]).float()
        target_choice, next_token = logits.argmax(-1), batch.tokens[:, 1:][positions]
        truth = (logits if draft_ids is None else logits[:, draft_ids]).log_softmax(-1)
    count = max(1, len(drafter_logits))
    kl = F.kl_div(drafter_logits.log_softmax(-1), truth, reduction="sum", log_target=True) / count
    drafted = drafter_logits.detach().argmax(-1)
    drafted = drafted if draft_ids is None else draft_ids[drafted]
    references = {"agreement": target_choice, "right": next_token}
    shares = {name: float((drafted == token).sum()) / count for name, token in references.items()}
    return LossOutput(kl, {"kl": float(kl.detach()), **shares})


TRAINING = DrafterTraining(
    MambaOptions,
    setup,
    """Train a Mamba drafter: a small language model distilled from the target's next-token distribution.

    Its input is tokens only: images and videos in --data become placeholder tokens.""",
)
