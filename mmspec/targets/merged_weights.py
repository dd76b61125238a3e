"""Weights of merged decoder layers: linear layers and norms, from those of transformers."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from mmspec.quantisation.formats import StoredRows, concatenated


class Norm(nn.Module):
    """RMSNorm in float32, in few operations.

    Args:
        gain: (..., features) float32.
        epsilon: added to the mean square.
    """

    weight: Tensor
    epsilon: Tensor

    def __init__(self, gain: Tensor, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("weight", gain, persistent=False)
        self.register_buffer("epsilon", torch.tensor([epsilon]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.epsilon, length, length, value=1 / x.shape[-1]).rsqrt_() * self.weight

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        return self  # stays in float32


def norm_of(norm: Any) -> Norm:
    """An RMSNorm of transformers, whose gain is its weight or, in Gemma, 1 more."""
    gain = norm.weight.detach().float()
    applied = copy.deepcopy(norm).float()(torch.ones_like(gain))  # in bfloat16, a large gain and 1 more are the same
    if (applied - gain - 1).abs().max() < (applied - gain).abs().max():
        gain = gain + 1
    return Norm(gain, _epsilon(norm))


def head_norm(attention: Any, heads: int, kv_heads: int, head_dim: int) -> Norm:
    """The norms of queries' and keys' heads, whose features are paired, as one: gains (heads + kv_heads, head_dim)."""
    order = pair_order(head_dim)
    parts = [(attention.q_norm, heads), (attention.k_norm, kv_heads)]
    gains = [norm_of(norm).weight[order].expand(count, -1) for norm, count in parts]
    return Norm(torch.cat(gains), _epsilon(attention.q_norm))


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


def pair_order(head_dim: int) -> Tensor:
    """A head's features in the order in which j and j + head_dim / 2, which are rotated together, are neighbours."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


def paired(layer: nn.Linear, head_dim: int) -> nn.Linear:
    """The layer with the features of each head in ``pair_order``."""
    order = (torch.arange(0, layer.out_features, head_dim)[:, None] + pair_order(head_dim)).flatten()
    bias = None if layer.bias is None else layer.bias.detach()[order]
    return _linear(layer.weight.detach()[order], bias, [rows.ordered(order) for rows in _stored(layer)])


def merged(parts: list[nn.Linear]) -> nn.Linear:
    """One linear layer with the outputs of several."""
    weight = torch.cat([part.weight.detach() for part in parts])
    zeros = [weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
    bias = torch.cat(zeros) if any(part.bias is not None for part in parts) else None
    stored = [_stored(part) for part in parts]
    return _linear(weight, bias, concatenated(chain(*stored)) if all(stored) else [])


def _linear(weight: Tensor, bias: Tensor | None, stored: list[StoredRows]) -> nn.Linear:
    layer: Any = nn.Linear(weight.shape[1], len(weight), bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    layer.stored = stored
    return layer


def _stored(layer: Any) -> list[StoredRows]:
    """The layer's rows as a GGUF file has them; none if it is not from one."""
    return getattr(layer, "stored", [])
