"""Drafters of scaled-up targets: those with weights in the big shape, their guesses unchanged. See `axes`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.scale_up.axes import Axis, Shape, Weights, axis, grow_heads, grown, joined
from eval.scale_up.mamba import scale_up_mamba
from eval.scale_up.models import shape_of
from mmspec.drafter import Drafter
from ssm.drafters.mamba import Mamba
from vision.drafters.msd import MSD
from vision.drafters.network import MSDConfig, MSDNetwork

LEAST_VOCABULARY = 0.25
"""Share of the big vocabulary that may be drafted at least, if the drafter has a reduced one."""

WHOLE_VOCABULARY = 65536
"""Tokens that a vocabulary may have for all of it to be drafted from. Published drafters of greater ones reduce it."""


def scaled(drafter: Drafter, small: PreTrainedModel, big: PreTrainedModel) -> Drafter:
    """A drafter for a scaled-up target: one with weights is scaled, too, others serve as they are."""
    if isinstance(drafter, MSD):
        return scale_up_drafter(drafter, small, big)
    if isinstance(drafter, Mamba):
        was, now = (shape_of(model.config.get_text_config()) for model in (small, big))
        return scale_up_mamba(drafter, small, big, draft_vocabulary(drafter.draft_ids, was, now))
    return drafter


@torch.no_grad()
def scale_up_drafter(drafter: MSD, small: PreTrainedModel, big: PreTrainedModel) -> MSD:
    """MSD or FLASH of a small model for the same model in a bigger shape.

    Its layer becomes one of the big model's, as in published drafters, or the same share of one where it had fewer
    heads or a narrower MLP than a layer of its target.

    Args:
        drafter: made for ``small``.
        small, big: the targets, as `eval.scale_up.models.scale_up` takes and gives them.

    Raises:
        UserError: it does not fit.
    """
    was, now = shape_of(small.config.get_text_config()), shape_of(big.config.get_text_config())
    have = drafter.network.config
    wanted = replace(
        have,
        hidden_size=now.hidden,
        heads=max(1, now.heads * have.heads // was.heads),
        kv_heads=max(1, now.kv_heads * have.kv_heads // was.kv_heads),
        head_dim=now.head_dim,
        mlp=now.mlp * have.mlp // was.mlp,
        norm_eps=have.norm_eps * was.hidden / now.hidden,
    )
    weights = Weights(big.device, big.dtype, seed=1)
    with torch.device("meta"):
        network = MSDNetwork(wanted)
    tensors = dict(_tensors(weights, dict(drafter.network.state_dict()), have, wanted))
    network.load_state_dict(tensors, assign=True)
    settings = {name: getattr(drafter, name) for name in ("top_k", "depth", "total_tokens")}
    return type(drafter)(network, draft_vocabulary(drafter.draft_ids, was, now), **settings)


def draft_vocabulary(ids: Tensor | None, was: Shape, now: Shape) -> Tensor | None:
    """The tokens that may be drafted in the big vocabulary: the small drafter's, and added ones up to the least share.
    None, which allows all, becomes that share of a vocabulary that is greater than what anybody drafts from."""
    if ids is None and now.vocab <= WHOLE_VOCABULARY:
        return None
    ids = torch.arange(was.vocab) if ids is None else ids
    most = max(len(ids), int(now.vocab * LEAST_VOCABULARY))
    added = torch.arange(was.vocab, now.vocab, device=ids.device)[: most - len(ids)]
    return torch.cat([ids, added])


def _attention_shape(config: MSDConfig) -> Shape:
    return Shape(config.hidden_size, config.mlp, 1, config.heads, config.kv_heads, config.head_dim, 0)


def _tensors(
    weights: Weights, small: dict[str, Tensor], have: MSDConfig, wanted: MSDConfig
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the big network."""
    stream = grown(have.hidden_size, wanted.hidden_size, "hidden", True, stream=True)
    both = joined(stream, stream)
    mlp = grown(have.mlp, wanted.mlp, "mlp")
    heads = grow_heads(_attention_shape(have), _attention_shape(wanted))
    linear = {"fc": (stream, both), "visual_fc": (stream, both), "out": (stream, heads.read), "down": (stream, mlp)}
    linear |= {"gate_up": (joined(mlp, mlp), stream), "cell.guess": (stream, stream)}
    norm_scale = (have.hidden_size / wanted.hidden_size) ** 0.5
    for name, tensor in small.items():
        owner, _, leaf = name.rpartition(".")
        if owner == "qkv":
            sizes = [part.small for part in (heads.queries, heads.keys, heads.values)]
            parts = zip(tensor.split(sizes), (heads.queries, heads.keys, heads.values), strict=True)
            scales = (heads.query_scale, 1.0, 1.0)
            stacked = [
                weights.matrix(part, out, stream, scale)
                if leaf == "weight"
                else weights.vector(part, torch.Size([out.size]), out, scale)
                for (part, out), scale in zip(parts, scales, strict=True)
            ]
            yield name, torch.cat(stacked)
        elif owner in linear:
            out, into = linear[owner]
            size = torch.Size([out.size])
            yield name, weights.matrix(tensor, out, into) if leaf == "weight" else weights.vector(tensor, size, out)
        elif owner in ("input_norm", "post_norm"):
            yield name, weights.norm(tensor, stream, norm_scale)
        elif owner == "latents":
            # Their keys' norm grows as the root that scores are divided by.
            alike = grown(tensor.shape[0], tensor.shape[0], "latents")
            yield name, weights.matrix(tensor, alike, stream)
        elif not owner.startswith("cell."):
            raise AssertionError(f"unknown tensor {name}")
    if have.slots > 1:
        yield from _cell(weights, small, stream, both)


def _cell(weights: Weights, small: dict[str, Tensor], stream: Axis, both: Axis) -> Iterator[tuple[str, Tensor]]:
    """FLASH's cell, whose layer norm subtracts a mean: added features must be that mean, and the norm makes them zero.

    ``first`` gives it there. So does ``out`` for what it adds; the mean of the carried vector itself, r, passes through
    two added features of ``into``, as silu(r) - silu(-r) = r.
    """
    width, added = stream.small, stream.size - stream.small
    scale = (stream.small / stream.size) ** 0.5

    def with_means(tensor: Tensor) -> Tensor:
        """Rows of the small model, and their mean as every added one."""
        return torch.cat([tensor, tensor.mean(0, keepdim=True).expand(added, *tensor.shape[1:])])

    alike = axis(torch.arange(stream.size), stream.size)
    yield "cell.first.weight", weights.matrix(with_means(small["cell.first.weight"]), alike, both)
    yield "cell.first.bias", with_means(small["cell.first.bias"]).to(weights.device, weights.dtype)
    inner = grown(width, stream.size, "hidden")
    into = weights.matrix(small["cell.into.weight"], inner, both)
    bias = weights.vector(small["cell.into.bias"], torch.Size([stream.size]), inner)
    out = weights.matrix(with_means(small["cell.out.weight"]), alike, inner)
    if added:
        into[width : width + 2] = 0
        into[width, stream.size : stream.size + width] = 1 / width
        into[width + 1, stream.size : stream.size + width] = -1 / width
        bias[width : width + 2] = 0
        out[width:, width], out[width:, width + 1] = 1, -1
    yield "cell.into.weight", into
    yield "cell.into.bias", bias
    yield "cell.out.weight", out
    for part, factor in (("weight", scale), ("bias", 1.0)):
        yield f"cell.norm.{part}", weights.vector(small[f"cell.norm.{part}"], torch.Size([stream.size]), stream, factor)
