"""What a Mamba drafter is trained for: the target's distribution of each next token of its answers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.distil.features import Features
from mmspec.target import Target
from mmspec.training.loss import LossOutput
from ssm.drafters.network import MambaNetwork


def forward_kl(
    network: MambaNetwork,
    target: Target,
    batch: Features,
    draft_ids: Tensor | None = None,
    generator: torch.Generator | None = None,
    progress: float = 1.0,
) -> LossOutput:
    """The mean divergence KL(target || drafter) of the next token, behind each answer token that another one follows.

    Args:
        network: what is trained.
        target: for its head, frozen; its hidden states are those of ``batch``.
        batch: conversations; what is padding or not an answer has no part in the mean.
        draft_ids: (n,) int64, the tokens of a reduced draft vocabulary; distributions are over them alone.
        generator, progress: not used; the trainer tells them to every objective.

    Returns:
        The mean in nats, and the figures ``kl`` (the same), ``agreement`` (share of places where the drafter's
        likeliest token is the target's likeliest of all) and ``right`` (where it is the next token of the answer).
    """
    places = batch.answer[:, :-1] & batch.answer[:, 1:]
    read, _ = network(batch.tokens, batch.keep)
    guesses = F.linear(read[:, :-1][places], network.head_rows(draft_ids)).float()
    with torch.no_grad():
        logits = target.head(batch.hidden[:, :-1][places]).float()
        likeliest, said = logits.argmax(-1), batch.tokens[:, 1:][places]
        truth = (logits if draft_ids is None else logits[:, draft_ids]).log_softmax(-1)
    count = max(1, len(guesses))
    kl = F.kl_div(guesses.log_softmax(-1), truth, reduction="sum", log_target=True) / count
    drafted = guesses.detach().argmax(-1)
    drafted = drafted if draft_ids is None else draft_ids[drafted]
    right = {"agreement": likeliest, "right": said}
    shares = {name: float((drafted == token).sum()) / count for name, token in right.items()}
    return LossOutput(kl, {"kl": float(kl.detach()), **shares})
