"""The mamba drafter of scaled-up targets, its guesses unchanged. See `eval.scale_up.axes`.

Its norms are layer norms, which subtract a mean. On the stream, added features therefore carry the mean of the kept
ones, as in FLASH's cell, and a norm makes them zero. Inside of a layer a product follows the scan, whose mean no added
feature could carry; so the scan's heads are copied, which changes neither mean nor spread, and each copy writes its
share. Added numbers of a head's state are fed noise, and nothing reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.scale_up.axes import Axis, Weights, axis, grown, joined
from eval.scale_up.models import shape_of
from ssm.drafters.mamba import Mamba
from ssm.drafters.network import MambaConfig, MambaNetwork


@torch.no_grad()
def scale_up_mamba(drafter: Mamba, small: PreTrainedModel, big: PreTrainedModel, draft_ids: Tensor | None) -> Mamba:
    """The drafter of a small model for the same model in a bigger shape, of the same share of the target's sizes: of
    its width, of the channels of its scans and of their states (for a target without such: of its width).

    Args:
        drafter: made for ``small``.
        small, big: the targets, as `eval.scale_up.models.scale_up` takes and gives them.
        draft_ids: what may be drafted in the big vocabulary.
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
    given = dict(drafter.network.state_dict())
    weights = Weights(big.device, torch.float32, seed=1)
    network.load_state_dict(dict(_tensors(weights, given, have, wanted, filler)), assign=True)
    for layer in network.layers:
        layer.gated_norm.eps = have.norm_eps  # over copies, whose mean is that of the small one's
    settings = {name: getattr(drafter, name) for name in ("top_k", "depth", "total_tokens")}
    return Mamba(network, draft_ids, **settings)


def _tensors(
    weights: Weights, small: dict[str, Tensor], have: MambaConfig, wanted: MambaConfig, filler: int
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the big network."""
    stream = grown(have.hidden_size, wanted.hidden_size, "hidden", True, stream=True)
    inner, heads = (_copies(n, wanted.heads // have.heads) for n in (have.inner, have.heads))
    b, c = (grown(have.state, wanted.state, "state", silent) for silent in (False, True))
    channels, scale = joined(inner, b, c), (have.hidden_size / wanted.hidden_size) ** 0.5
    rows = {"in_proj": joined(inner, channels, heads), "gated_norm": inner, "a_log": heads, "d": heads, "norm": stream}
    for name, tensor in small.items():
        owner, leaf = name.split(".")[-2:]
        if owner == "embed":
            said = grown(have.vocab_size, wanted.vocab_size, "vocab").source
            table = _with_means(tensor.to(weights.device).T, stream).T
            yield name, table[torch.where(said < 0, filler, said).to(weights.device)].contiguous()
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
    return axis(torch.arange(features).repeat(times), features)


def _with_means(rows: Tensor, stream: Axis) -> Tensor:
    """Rows of the small model, one for each feature of its stream, and their mean as every added one."""
    added = stream.size - stream.small
    return torch.cat([rows, rows.mean(0, keepdim=True).expand(added, -1)])
