"""`mmspec train dflash`: sets up the network, objective and drafter to train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.distil.dflash_objective import DFlashObjective
from mmspec.distil.options import DFlashOptions
from mmspec.distil.start import decoder_weights, load_shared_weights, mask_token, output_rows
from mmspec.distil.tasks import DrafterSetup
from mmspec.drafters.dflash.config import DFlashConfig, default_layer_ids
from mmspec.drafters.dflash.drafter import DFlash
from mmspec.drafters.dflash.network import DFlashNetwork
from mmspec.drafters.dflash.published import published_parts
from mmspec.drafters.hidden_state.rope import rotary_of
from mmspec.drafters.parts import shapes_of, stack
from mmspec.drafters.shape import TREE
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline

_OWN = ("fc.", "hidden_norm.", "markov_", "confidence.")  # modules that no target has
_OPTIONAL = ("q_norm.weight", "k_norm.weight")


def setup(options: DFlashOptions, pipe: Pipeline, draft_ids: Tensor | None) -> DrafterSetup:
    """What `train_drafter` trains with these options."""
    target, start = pipe.target, None
    if options.start is not None:
        start = DFlash.from_checkpoint(options.start)
        start.attach(target)  # refuses drafters of other targets
        if start.network.config.head or rotary_of(start.network.config)[1] is not None:
            raise UserError(
                f"{options.start}: expected a drafter with the target's output layer and plain rotary positions"
            )
        draft_ids = start.draft_ids if draft_ids is None else draft_ids
    config = _network_config(options, pipe, start, output_rows(target) if draft_ids is None else len(draft_ids))
    network = DFlashNetwork(config).to(target.device, torch.float32)
    if config.markov_rank:
        nn.init.zeros_(network.markov_out.weight)  # no correction at first
    if start is not None:
        load_shared_weights(start, network, options.start)
    elif options.from_target:
        copy_last_layers(network, target)
    chosen = options.part(DFlashObjective.__dataclass_fields__)
    layers = config.features(target.config.num_hidden_layers)
    return DrafterSetup(network, DFlashObjective(**chosen), DFlash, draft_ids, options.part(TREE), layers=layers)


def _network_config(options: DFlashOptions, pipe: Pipeline, start: DFlash | None, drafts: int) -> DFlashConfig:
    given, decoder = options.part(DFlashConfig.__dataclass_fields__), pipe.target.config
    if "markov_rank" in given:
        has = given["markov_rank"] > 0
        given |= {"markov_inputs": has * decoder.vocab_size, "markov_outputs": has * drafts}
    if start is not None:
        return replace(start.network.config, **given)
    new = {"block_size": 8, "layers": 2, "target_layer_ids": default_layer_ids(decoder.num_hidden_layers), **given}
    if "mask_token_id" not in new:
        new["mask_token_id"] = mask_token(pipe)
    return DFlashConfig.like(decoder, **new)


@torch.no_grad()
def copy_last_layers(network: DFlashNetwork, target: Any) -> None:
    """Initialises the layers and the last norm as the target's last ones, which read the last of the states that the
    drafter reads. Norms of queries and keys that the target does not have are kept.

    Raises:
        UserError: the target's layers are of another architecture or shape.
    """
    last = range(target.config.num_hidden_layers)[-network.config.layers :]
    theirs, own = decoder_weights(target, last), network.state_dict()
    parts = {
        ours: some
        for ours, some in published_parts(network.config).items()
        if not ours.startswith(_OWN) and (some[0] in theirs or not ours.endswith(_OPTIONAL))
    }
    for name, expected in shapes_of(own, parts, network.config).items():
        if (received := tuple(theirs[name].shape) if name in theirs else "none") != expected:
            raise UserError(
                f"--from-target needs layers like the drafter's: expected {name} {expected}, received {received}"
            )
    for ours, weight in stack(theirs, parts).items():
        own[ours].copy_(weight)
    network.hidden_norm.weight.copy_(own["layers.0.input_norm.weight"])
    network.fc.weight.zero_()[:, -network.config.hidden_size :].fill_diagonal_(1.0)
