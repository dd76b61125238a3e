"""The scaled-up mamba drafter, which drafts the same trees. See ``mmspec.eval.scale_up.axes``.

Its norms are layer norms, which subtract a mean. On the residual stream, added features therefore carry the mean of the
copied ones, as in FLASH's cell, and a norm makes them zero. Inside a layer, the scan is followed by a product, whose
mean no added feature could carry; so the scan's heads are copied, which changes neither mean nor variance, and each
copy writes its share. Added state dimensions are fed noise, and nothing reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.eval.scale_up.axes import Axis, Weights, concat_axes, grow_axis, make_axis
from mmspec.eval.scale_up.models import shape_of
from mmspec.ssm.drafters.mamba.drafter import Mamba
from mmspec.ssm.drafters.mamba.network import MambaConfig, MambaNetwork


@torch.no_grad()
def scale_up_mamba(drafter: Mamba, small: PreTrainedModel, big: PreTrainedModel, draft_ids: Tensor | None) -> Mamba:
    """Scale up a mamba drafter by the same factors as its target: width, scan channels and states.

    For a target without Mamba-2 layers, the scan channels grow like the width.

    Args:
        drafter: of the small target.
        small, big: the targets, see ``mmspec.eval.scale_up.models.scale_up``.
        draft_ids: draft vocabulary of the big drafter.
    """
    was, now = shape_of(small.config.get_text_config()), shape_of(big.config.get_text_config())
    have, times = drafter.network.config, now.hidden // was.hidden
    copies, states = times, 1
    if was.mamba is not None and now.mamba is not None:
        copies = now.mamba.heads * now.mamba.head_dim // (was.mamba.heads * was.mamba.head_dim)
        states = now.mamba.state // was.mamba.state
    wanted = replace(
        have,
        vocab_size=now.vocab,
        hidden_size=have.hidden_size * times,
        heads=have.heads * copies,
        state=have.state * states,
        norm_eps=have.norm_eps / times,
    )
    filler = small.config.get_text_config().pad_token_id or 0
    with torch.device("meta"):
        network = MambaNetwork(wanted)
    tensors = dict(drafter.network.state_dict())
    weights = Weights(big.device, torch.float32, seed=1)
    network.load_state_dict(dict(_mamba_tensors(weights, tensors, have, wanted, filler)), assign=True)
    for layer in network.layers:
        layer.gated_norm.eps = have.norm_eps  # copies have the same mean
    settings = {name: getattr(drafter, name) for name in ("top_k", "depth", "total_tokens")}
    return Mamba(network, draft_ids, **settings)


def _mamba_tensors(
    weights: Weights, small: dict[str, Tensor], have: MambaConfig, wanted: MambaConfig, filler: int
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the big network, by name."""
    stream = grow_axis(have.hidden_size, wanted.hidden_size, "hidden", True, stream=True)
    inner, heads = (_copies(n, wanted.heads // have.heads) for n in (have.inner, have.heads))
    b, c = (grow_axis(have.state, wanted.state, "state", silent) for silent in (False, True))
    channels, scale = concat_axes(inner, b, c), (have.hidden_size / wanted.hidden_size) ** 0.5
    rows = {
        "in_proj": concat_axes(inner, channels, heads),
        "gated_norm": inner,
        "a_log": heads,
        "d": heads,
        "norm": stream,
    }
    for name, tensor in small.items():
        owner, leaf = name.split(".")[-2:]
        if owner == "embed":
            tokens = grow_axis(have.vocab_size, wanted.vocab_size, "vocab").source
            table = _with_means(tensor.to(weights.device).T, stream).T
            yield name, table[torch.where(tokens < 0, filler, tokens).to(weights.device)].contiguous()
        elif name.endswith("in_proj.weight"):
            yield name, weights.matrix(tensor, rows["in_proj"], stream)
        elif owner == "out_proj":
            share = wanted.heads // have.heads
            yield name, _with_means(tensor.to(weights.device), stream).repeat(1, share) / share
        elif leaf == "conv":
            size = torch.Size([channels.size, have.window, 1])
            yield name, weights.vector(tensor.permute(2, 0, 1), size, channels).permute(1, 2, 0).contiguous()
        else:
            out = rows[owner] if owner in rows else rows[leaf]
            factor = scale if owner == "norm" and leaf == "weight" else 1.0
            yield name, weights.vector(tensor, torch.Size([out.size, *tensor.shape[1:]]), out, factor)


def _copies(features: int, times: int) -> Axis:
    return make_axis(torch.arange(features).repeat(times), features)


def _with_means(rows: Tensor, stream: Axis) -> Tensor:
    """The small model's rows, one per feature of its stream, and their mean as every added row."""
    added = stream.size - stream.small
    return torch.cat([rows, rows.mean(0, keepdim=True).expand(added, -1)])
