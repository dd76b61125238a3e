"""``mmspec train msd`` and ``mmspec train flash``: set up the network, objective and drafter to train."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.checks import FLAG, POSITIVE, inherited, inherited_optional, option, whole, with_fields_of
from mmspec.drafters.shape import TREE
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.training.features import Features
from mmspec.training.options import HeadOptions, Passes, TreeOptions
from mmspec.training.tasks import DrafterSetup, DrafterTraining, head_weight, load_shared_weights, output_rows
from mmspec.vision.drafters.msd import MSD, Flash, MSDConfig, MSDNetwork
from mmspec.vision.training.objective import HiddenStateObjective, Losses, SlotLosses

_DEFAULT_SPAN = 256
"""Visual tokens that share latents, if the target's configuration does not state the number per image."""


@dataclass(frozen=True, kw_only=True)
@with_fields_of(MSDConfig)
class MSDOptions(Losses, HeadOptions):
    """Options of ``mmspec train msd``."""

    fit: bool = option(
        False,
        FLAG,
        "Initialise by ridge regression of the target's hidden states, unless with --start: for little data.",
    )
    hide_visual: bool | None = inherited_optional(MSDConfig, "hide_visual")


@dataclass(frozen=True, kw_only=True)
class FlashOptions(SlotLosses, MSDOptions):
    """Options of ``mmspec train flash``. Trees come from one pass; MSD's are wider and take a pass per level."""

    passes: int = inherited(Passes, "passes", default=1)
    top_k: int = inherited(TreeOptions, "top_k", default=4)
    depth: int = inherited(TreeOptions, "depth", default=12)
    slots: int = inherited(MSDConfig, "slots", "Tokens per forward pass; 1 as in MSD.", default=12)
    latents: int | None = inherited_optional(
        MSDConfig, "latents", "Latents per image; 0 keeps all visual tokens, as in MSD.", default_text="by --ratio"
    )
    ratio: float = option(9.0, POSITIVE, "Or visual tokens per latent.")
    span: int | None = inherited_optional(
        MSDConfig,
        "span",
        "Visual tokens per image; longer runs are split.",
        default_text="that of the target's configuration, or 256",
        rule=whole(1, 2**20),
    )
    rank: int | None = inherited_optional(
        MSDConfig, "rank", "Rank of an output layer of their own for the slots after the first; 0: the target's head."
    )


def _setup(kind: type[MSD], options: MSDOptions, pipe: Pipeline, draft_ids: Tensor | None) -> DrafterSetup:
    start, target = None, pipe.target
    if options.start is not None:
        start = MSD.from_checkpoint(options.start)
        start.attach(target)  # refuses drafters of other targets
    if draft_ids is None and start is not None:
        draft_ids = start.draft_ids
    tokens = output_rows(target) if draft_ids is None else len(draft_ids)
    network = MSDNetwork(_network_config(options, target, start, tokens)).to(target.device, torch.float32)
    config = network.config
    if config.rank and options.passes > 1:
        raise UserError(f"passes must be 1 with rank: got {options.passes}")
    if config.reads:
        nn.init.zeros_(network.read.weight)  # as without, at first
    if start is not None:
        load_shared_weights(start, network, options.start)
    if config.rank and (start is None or start.network.config.rank != config.rank):
        guess = start.network.cell.guess if start is not None and not start.network.config.rank else None
        init_low_rank_head(network, head_weight(target, draft_ids), guess)
    chosen = options.part(HiddenStateObjective.__dataclass_fields__)
    fit = partial(fit_projection, network) if options.fit and start is None else None
    tree = options.part(TREE)
    return DrafterSetup(network, HiddenStateObjective(**chosen), kind, draft_ids, tree, fit, layers=config.reads)


@torch.no_grad()
def init_low_rank_head(network: MSDNetwork, head: Tensor, guess: nn.Linear | None = None) -> None:
    """Initialises the output layer of ``MSDConfig.rank`` as the best approximation of the target's head.

    Args:
        network: to initialise.
        head: (draft tokens, hidden), weight of the target's head.
        guess: predicts the head's inputs from carried states; None is the identity.
    """
    whole = head if guess is None else head @ guess.weight.to(head)
    left, values, right = torch.linalg.svd(whole.float(), full_matrices=False)
    kept = values[: network.config.rank].sqrt()
    network.cell.head.weight.zero_()
    network.cell.narrow.weight.zero_()
    network.cell.head.weight[:, : len(kept)] = left[:, : len(kept)] * kept
    network.cell.narrow.weight[: len(kept)] = kept[:, None] * right[: len(kept)]
    network.cell.head.bias.copy_(torch.zeros(len(head)) if guess is None else head @ guess.bias.to(head))


@torch.no_grad()
def fit_projection(network: MSDNetwork, batches: Iterable[Features], ridge: float = 0.01) -> None:
    """Initialises a network as the best linear guess of the target's next hidden state, by ridge regression.

    The projection of token embedding and hidden state is fitted; attention and MLP add nothing at first.

    Args:
        network: to initialise.
        batches: features of conversations.
        ridge: weight of the penalty, relative to the mean square of the inputs.
    """
    width = network.config.hidden_size
    moments = torch.zeros(2 * width + 1, 3 * width + 1, dtype=torch.float64)
    for batch in batches:
        chosen = batch.answer[:, 1:] & batch.answer[:, :-1]
        inputs = torch.cat([batch.embeds[:, 1:], batch.hidden[:, :-1]], dim=-1)[chosen].double().cpu()
        inputs = F.pad(inputs, (0, 1), value=1.0)
        moments += inputs.t() @ torch.cat([inputs, batch.hidden[:, 1:][chosen].double().cpu()], dim=1)
    square, product = moments.split([2 * width + 1, width], dim=1)
    scale = square.diagonal()[:-1]
    penalty = torch.cat([scale[:width].mean().expand(width), scale[width:].mean().expand(width), scale.new_zeros(1)])
    if bool((penalty[:-1] == 0).any()):
        return  # no answers
    solved = torch.linalg.solve(square + torch.diag(ridge * penalty), product)
    network.fc.weight.copy_(solved[:-1].t())
    network.fc.bias.copy_(solved[-1])
    for branch in (network.out, network.down):
        branch.weight.zero_()


def _network_config(options: MSDOptions, target: Any, start: MSD | None, tokens: int) -> MSDConfig:
    fields = options.part(MSDConfig.__dataclass_fields__)
    fields |= _latents(options, target)
    rank = fields.get("rank", start.network.config.rank if start else 0)
    fields |= {"rank": rank, "head": tokens if rank else 0}
    return replace(start.network.config, **fields) if start else MSDConfig.like(target.config, **fields)


def _latents(options: MSDOptions, target: Any) -> dict[str, int]:
    """Values of ``MSDConfig.latents`` and ``span`` for commands that have ``--ratio``."""
    if not isinstance(options, FlashOptions):
        return {}
    # LLaVA's configurations state the number of tokens per image; in other families it varies.
    span = options.span or getattr(target.model.config, "image_seq_length", None) or _DEFAULT_SPAN
    latents = max(1, round(span / options.ratio)) if options.latents is None else options.latents
    if options.hide_visual:
        latents = 0
    return {"latents": latents, "span": span if latents else 0}


MSD_TRAINING = DrafterTraining(
    MSDOptions,
    partial(_setup, MSD),
    "Train an MSD drafter: first on text, then on a growing share of images and videos.",
)
FLASH_TRAINING = DrafterTraining(
    FlashOptions,
    partial(_setup, Flash),
    """Train a FLASH drafter: MSD with images compressed to latents and several tokens per forward pass.

    --latents 0 turns off the compression, --slots 1 the semi-autoregression. All else is as in `train msd`.""",
)
