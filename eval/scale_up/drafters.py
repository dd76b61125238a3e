"""Scaled-up drafters, which draft the same trees, and pipelines with them. See ``mmspec.eval.scale_up.models``."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import mmspec
from mmspec.core.drafter import Drafter
from mmspec.errors import UserError
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.scale_up.models import (
    Axis,
    Shape,
    Weights,
    concat_axes,
    grow_axis,
    grow_heads,
    layer_in,
    make_axis,
    scale_up,
    shape_of,
)
from mmspec.pipeline import Pipeline
from mmspec.vision.drafters.msd import MSD, MSDConfig, MSDNetwork

MIN_DRAFT_SHARE = 0.25
"""Least share of the big vocabulary in a reduced draft vocabulary."""

MAX_FULL_VOCABULARY = 65536
"""Largest vocabulary that is drafted from in full. Published drafters reduce larger ones."""

_NEVER = -1e4  # logit


def scale_up_drafter(drafter: Drafter, small: PreTrainedModel, big: PreTrainedModel) -> Drafter:
    """The drafter for a scaled-up target; drafters without a network are returned unchanged.

    Args:
        drafter: of the small target.
        small, big: the targets, see ``mmspec.eval.scale_up.models.scale_up``.

    Raises:
        UserError: a network other than MSD's and FLASH's.
    """
    if isinstance(drafter, MSD):
        return scale_up_msd(drafter, small, big)
    if isinstance(drafter.network, nn.Module):
        raise UserError(f"only MSD's and FLASH's networks can be scaled up: got a {type(drafter).__name__}")
    return drafter


@torch.no_grad()
def scale_up_msd(drafter: MSD, small: PreTrainedModel, big: PreTrainedModel) -> MSD:
    """Scale up an MSD or FLASH drafter.

    Its layer gets the shape of the big model's, as in published drafters, or the same fraction of it if the drafter has
    fewer heads or a narrower MLP than its target.

    Raises:
        UserError: the shapes do not fit.
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
        reads=[layer_in(now, layer, was) for layer in have.reads],
    )
    draft_ids = draft_vocabulary(drafter.draft_ids, was, now)
    if have.rank:
        tokens = now.vocab if draft_ids is None else len(draft_ids)
        wanted = replace(wanted, rank=have.rank * now.hidden // was.hidden, head=tokens)
    weights = Weights(big.device, big.dtype, seed=1)
    with torch.device("meta"):
        network = MSDNetwork(wanted)
    tensors = dict(_msd_tensors(weights, dict(drafter.network.state_dict()), have, wanted))
    network.load_state_dict(tensors, assign=True)
    settings = {name: getattr(drafter, name) for name in ("top_k", "depth", "total_tokens")}
    return type(drafter)(network, draft_ids, **settings)


def draft_vocabulary(ids: Tensor | None, was: Shape, now: Shape) -> Tensor | None:
    """The draft vocabulary of a scaled-up drafter: the small one's, and added tokens up to ``MIN_DRAFT_SHARE``.

    None, the full vocabulary, is reduced to that share above ``MAX_FULL_VOCABULARY`` tokens.
    """
    if ids is None and now.vocab <= MAX_FULL_VOCABULARY:
        return None
    ids = torch.arange(was.vocab) if ids is None else ids
    size = max(len(ids), int(now.vocab * MIN_DRAFT_SHARE))
    added = torch.arange(was.vocab, now.vocab, device=ids.device)[: size - len(ids)]
    return torch.cat([ids, added])


def _attention_shape(config: MSDConfig) -> Shape:
    return Shape(config.hidden_size, config.mlp, 1, config.heads, config.kv_heads, config.head_dim, 0)


def _msd_tensors(
    weights: Weights, small: dict[str, Tensor], have: MSDConfig, wanted: MSDConfig
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the big network, by name."""
    stream = grow_axis(have.hidden_size, wanted.hidden_size, "hidden", True, stream=True)
    both = concat_axes(stream, stream)
    mlp = grow_axis(have.mlp, wanted.mlp, "mlp")
    heads = grow_heads(_attention_shape(have), _attention_shape(wanted))
    linear = {"fc": (stream, both), "visual_fc": (stream, both), "out": (stream, heads.output), "down": (stream, mlp)}
    linear |= {"gate_up": (concat_axes(mlp, mlp), stream), "cell.guess": (stream, stream)}
    if have.reads:
        linear["read"] = stream, concat_axes(*[stream] * len(have.reads))
    if have.rank:
        linear["cell.narrow"] = grow_axis(have.rank, wanted.rank, "rank"), stream
    linear["confidence"] = grow_axis(1, 1, "confidence"), stream
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
        elif owner in ("input_norm", "post_norm", "norm") or owner.startswith("read_norms."):
            yield name, weights.norm(tensor, stream, norm_scale)
        elif owner == "latents":
            # The norm of their keys grows like the square root that scores are divided by.
            same = grow_axis(tensor.shape[0], tensor.shape[0], "latents")
            yield name, weights.matrix(tensor, same, stream)
        elif owner == "cell.head":
            yield name, _own_head(weights, tensor, leaf, have, wanted)
        elif not owner.startswith("cell."):
            raise AssertionError(f"unknown tensor {name}")
    if have.slots > 1:
        yield from _cell(weights, small, stream, both)


def _own_head(weights: Weights, small: Tensor, leaf: str, have: MSDConfig, wanted: MSDConfig) -> Tensor:
    """Weight or bias of the cell's output layer; added tokens have a bias that excludes them."""
    tokens = grow_axis(have.head, wanted.head, "head")
    if leaf == "weight":
        return weights.matrix(small, tokens, grow_axis(have.rank, wanted.rank, "rank"))
    bias = weights.vector(small, torch.Size([wanted.head]), tokens)
    bias[have.head :] = _NEVER
    return bias


def _cell(weights: Weights, small: dict[str, Tensor], stream: Axis, both: Axis) -> Iterator[tuple[str, Tensor]]:
    """Tensors of FLASH's cell, whose layer norm subtracts a mean: added features equal that mean, so they become zero.

    ``first`` and ``out`` have the mean of their rows as every added row. The mean r of the carried vector passes
    through two added features of ``into``, since silu(r) - silu(-r) = r.
    """
    width, added = stream.small, stream.size - stream.small
    scale = (stream.small / stream.size) ** 0.5

    def with_means(tensor: Tensor) -> Tensor:
        """The small model's rows, and their mean as every added row."""
        return torch.cat([tensor, tensor.mean(0, keepdim=True).expand(added, *tensor.shape[1:])])

    same = make_axis(torch.arange(stream.size), stream.size)
    yield "cell.first.weight", weights.matrix(with_means(small["cell.first.weight"]), same, both)
    yield "cell.first.bias", with_means(small["cell.first.bias"]).to(weights.device, weights.dtype)
    inner = grow_axis(width, stream.size, "hidden")
    into = weights.matrix(small["cell.into.weight"], inner, both)
    bias = weights.vector(small["cell.into.bias"], torch.Size([stream.size]), inner)
    out = weights.matrix(with_means(small["cell.out.weight"]), same, inner)
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


def scaled_pipeline(
    model: str, shape: Shape, drafters: str, dtype: torch.dtype, device: torch.device
) -> tuple[Pipeline, dict[str, Drafter]]:
    """A model in a big shape, without a drafter, and its drafters by label, scaled up if they have a network.

    Args:
        drafters: as for ``parse_drafters``.
        device: the big model's.
    """
    small = mmspec.load(model, drafter=None, dtype="float32", device="cpu")
    big = scale_up(small.model, shape, device=device, dtype=dtype)
    scaled = {
        label: scale_up_drafter(drafter, small.model, big)
        for label, drafter in parse_drafters(drafters, small.model.config.name_or_path).items()
    }
    gc.collect()  # the small model
    return Pipeline(type(small.target)(big), small.processor, name=model), scaled


def prompt_tokens(pipe: Pipeline, request: Mapping[str, Any]) -> int:
    """KV slots that a prompt fills: masked tokens are not kept."""
    prompt = pipe.encode([request])
    length = prompt.input_ids.shape[1]
    return length if prompt.attention_mask is None else int(prompt.attention_mask.sum())
