"""An MSD network by hand: random weights for a target, and the plain layer that its own is compared with."""

from __future__ import annotations

import math

import torch

from vision.drafters.network import MSDConfig, MSDNetwork


def network_for(model, seed=0, **changes):
    torch.manual_seed(seed)
    network = MSDNetwork(MSDConfig.like(model.config.get_text_config(), **changes))
    for parameter in network.parameters():
        parameter.data.normal_(std=0.2)
    return network


def plain_layer(network, x):
    """The network over one sequence of inputs, (length, hidden), head by head, positions 0, 1, ..."""
    c, state = network.config, dict(network.named_parameters())
    norm = lambda y, w: y / (y.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * w  # noqa: E731
    y = norm(x, state["input_norm.weight"]) if c.input_norm else x
    qkv = y @ state["qkv.weight"].T + state.get("qkv.bias", 0.0)
    parts = qkv.split([c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, c.head_dim)) for part in parts)

    def turn(z):
        half = c.head_dim // 2
        spin = torch.arange(len(x))[:, None] * c.rope_theta ** (-torch.arange(half) / half)
        turned = torch.complex(z[..., :half], z[..., half:]) * torch.polar(torch.ones_like(spin), spin)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    q, k = turn(q), turn(k)
    heads = []
    for head in range(c.heads):
        own = head * c.kv_heads // c.heads
        scores = q[:, head] @ k[:, own].T / math.sqrt(c.head_dim)
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[:, own])
    x = x + torch.cat(heads, dim=-1) @ state["out.weight"].T
    gate, up = (norm(x, state["post_norm.weight"]) @ state["gate_up.weight"].T).split(c.mlp, dim=-1)
    return x + (gate * gate.sigmoid() * up) @ state["down.weight"].T
