"""Attention weights of a prompt's last tokens.

Attention kernels do not return weights. After an unchanged prefill, the queries of a prompt's last tokens are
recomputed from one layer's input and multiplied by the cached keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mmspec.core.target import TargetOutput
from mmspec.targets.attention import window_of
from mmspec.targets.decoder import Decoder
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.targets.tree_layers import ATTENTION

_NAME = "mmspec_queries"


def attention_layers(config: Any) -> list[int]:
    """Layers with full attention and unshared keys and values."""
    layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    full = ATTENTION - {"chunked_attention", "indexed_attention"}  # windows are excluded below
    return [layer for layer in range(layers) if kinds[layer] in full and window_of(config, layer) is None]


@torch.inference_mode()
def prompt_attention(
    target: TransformersTarget, layer: int, output: TargetOutput, first: int, queries: int
) -> Tensor | None:
    """Attention weights of the last tokens of prompts.

    Args:
        target: has the prompts in its cache, without any answer tokens.
        layer: a full-attention layer.
        output: the prefill's output, with the layer's input (feature ``layer``).
        first: cache row of the first prompt.
        queries: number of last tokens.

    Returns:
        (batch, queries, length) float32, the mean over heads; undefined at padding tokens. None if the layer does not
        compute a softmax of scaled scores by an attention function of transformers, or the decoder takes no positions.
    """
    states, positions = output.features[layer], output.positions
    batch, length = states.shape[:2]
    found = None
    if positions is not None and target.decoder.attention.name != "sdpa":  # the layers compute their own masks
        found = _queries(target.decoder, layer, states[:, -queries:], positions[..., -queries:])
    if found is None:
        return None
    known = target.keys_values(layer, first + batch)
    keys, lengths = known.keys[first:], known.lengths[first:, None]
    grouped = found.query.unflatten(1, (keys.shape[1], -1))  # (batch, kv_heads, group, queries, head_dim)
    scores = grouped.float() @ keys[:, :, None].float().mT * found.scale
    if found.softcap is not None:
        scores = found.softcap * torch.tanh(scores / found.softcap)
    seen = (lengths - queries + 1 + torch.arange(queries, device=keys.device)).clamp(min=1)  # (batch, queries)
    later = torch.arange(keys.shape[2], device=keys.device) >= seen[:, :, None]
    weights = scores.masked_fill_(later[:, None, None], -torch.inf).softmax(-1).mean((1, 2))
    # Prompts are left-padded, the cache is not.
    slot = torch.arange(length, device=keys.device) - (length - lengths)
    return weights.gather(2, slot.clamp(min=0)[:, None].expand(-1, queries, -1)) * (slot >= 0)[:, None]


def _queries(decoder: Decoder, layer: int, hidden: Tensor, positions: Tensor) -> _AttentionReachedError | None:
    """Arguments of a layer's attention function for the layer's input, (batch, tokens, hidden)."""
    inputs = {"inputs_embeds": hidden, "attention_mask": hidden.new_ones(hidden.shape[:2], dtype=torch.long)}
    if decoder.takes_positions:
        inputs["position_ids"] = positions
    try:
        decoder.run_layer(layer, inputs, _NAME)
    except _AttentionReachedError as reached:
        return reached if reached.usual else None
    return None


class _AttentionReachedError(Exception):
    """Raised in a decoder's forward when a layer calls its attention function, to capture the arguments.

    Args:
        query: (batch, heads, tokens, head_dim).
        scale, softcap: scale and soft cap of the scores.
        usual: whether the layer computes a plain softmax, without sinks or biases.
    """

    def __init__(self, query: Tensor, scale: float, softcap: float | None, usual: bool) -> None:
        self.query, self.scale, self.softcap, self.usual = query, scale, softcap, usual


def _stop(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function with the signature that transformers calls."""
    usual = all(options.get(name) is None for name in ("position_bias", "s_aux"))
    raise _AttentionReachedError(query, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, usual)


AttentionInterface.register(_NAME, _stop)
AttentionMaskInterface.register(_NAME, sdpa_mask)
