"""`mmspec train eagle3`: sets up the network, objective and drafter to train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmspec.distil.eagle3_objective import Eagle3Objective
from mmspec.distil.options import Eagle3Options
from mmspec.distil.start import head_weight, load_shared_weights, mask_token, output_rows
from mmspec.distil.tasks import DrafterSetup
from mmspec.drafters.eagle3.config import Eagle3Config
from mmspec.drafters.eagle3.drafter import Eagle3
from mmspec.drafters.eagle3.network import Eagle3Network
from mmspec.drafters.hidden_state.rope import rotary_of
from mmspec.drafters.shape import TREE
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline


def setup(options: Eagle3Options, pipe: Pipeline, draft_ids: Tensor | None) -> DrafterSetup:
    """What `train_drafter` trains with these options."""
    target, start = pipe.target, None
    if options.start is not None:
        start = Eagle3.from_checkpoint(options.start)
        if start.network.config.window or start.network.config.candidates:
            raise UserError(f"{options.start}: expected an EAGLE-3 head without a sliding window, received EAGLE-4's")
        start.attach(target)  # refuses drafters of other targets
        draft_ids = start.draft_ids if draft_ids is None else draft_ids
        if rotary_of(start.network.config)[1] is not None:
            raise UserError(f"{options.start}: expected a head with plain rotary positions, received M-RoPE")
    config = _network_config(options, pipe, draft_ids, start)
    network = Eagle3Network(config).to(target.device, torch.float32)
    if start is not None:
        load_shared_weights(start, network, options.start)
    else:
        with torch.no_grad():
            network.lm_head.weight.copy_(head_weight(target, draft_ids))
    chosen = options.part(Eagle3Objective.__dataclass_fields__)
    layers = config.features(target.config.num_hidden_layers)
    tree = options.part(TREE)
    return DrafterSetup(network, Eagle3Objective(**chosen), Eagle3, draft_ids, tree, layers=layers)


def _network_config(
    options: Eagle3Options, pipe: Pipeline, draft_ids: Tensor | None, start: Eagle3 | None
) -> Eagle3Config:
    given: dict[str, Any] = options.part(Eagle3Config.__dataclass_fields__)
    given |= {"states": len(given["reads"])} if "reads" in given else {}
    before = None if start is None else start.network.config
    mask = None if before is None else before.mask_token_id
    if options.parallel is not None:
        mask = (mask_token(pipe) if mask is None else mask) if options.parallel else None
    head = output_rows(pipe.target) if draft_ids is None else len(draft_ids)
    if before is not None:
        return replace(before, **given, head=head if before.head else 0, mask_token_id=mask)
    new = {"fc_norm": not given.get("norm_before_fc"), "norm_output": True, **given}
    return Eagle3Config.like(pipe.target.config, **new, head=head, mask_token_id=mask)
