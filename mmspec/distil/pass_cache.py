"""Attention across the forward passes of a training step."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.drafters.hidden_state.layer import rotary_of
from mmspec.drafters.shape import RotaryShape


class PassCache:
    """KV cache of the passes so far, with attention over them.

    The first pass has all entries. Later passes extend chains that start at entries of the first, by one link of
    ``slots`` entries per pass. An entry attends to the first pass up to its chain's start, to the chain's earlier
    links, and causally within its own link.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._starts: Tensor | None = None

    def start_chains(self, starts: Tensor) -> None:
        """Sets the entries at which chains start, after the first pass: (batch, chains) int64."""
        self._starts = starts

    def keep_chains(self, places: Tensor) -> None:
        """Drops all chains but those at these places, (batch, kept) int64."""
        assert self._starts is not None, "start_chains comes first"
        self._starts = self._starts.gather(1, places)
        for parts in (self._keys, self._values):
            for number, part in enumerate(parts[1:], start=1):
                index = places[:, None, :, None, None].expand(-1, part.shape[1], -1, *part.shape[3:])
                parts[number] = part.gather(2, index)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends the keys and values of a pass; returns the attention output of its queries.

        Args:
            q: (batch, heads, entries, head_dim). The entries of later passes are ordered by chain: chains * slots.
            k, v: (batch, kv_heads, entries, head_dim).
        """
        groups = q.shape[1] // k.shape[1]
        k, v, q = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), q / math.sqrt(q.shape[-1])
        if self._starts is None:
            self._keys, self._values = [k], [v]
            future = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).triu(1)
            weights = (q @ k.transpose(2, 3)).masked_fill(future, -torch.inf).float().softmax(-1).to(v.dtype)
            return weights @ v
        links = self._starts.shape[1], q.shape[2] // self._starts.shape[1]
        self._keys.append(k.unflatten(2, links))
        self._values.append(v.unflatten(2, links))
        scores = self._scores(q, links)
        weights = torch.cat(scores, dim=-1).float().softmax(-1).to(v.dtype)
        first, *own = weights.split([part.shape[-1] for part in scores], dim=-1)
        output = first @ self._values[0]
        for part, value in zip(own, self._values[1:], strict=True):
            output = output + _matmul(part.unflatten(2, links), value).flatten(2, 3)
        return output

    def _scores(self, q: Tensor, links: tuple[int, int]) -> list[Tensor]:
        """Masked attention scores over the keys of each pass, (batch, heads, chains * slots, keys)."""
        assert self._starts is not None
        first, slots = self._keys[0], links[1]
        after_start = torch.arange(first.shape[2], device=q.device) > self._starts[..., None]
        after_start = after_start.repeat_interleave(slots, dim=1)[:, None]
        scores = [(q @ first.transpose(2, 3)).masked_fill(after_start, -torch.inf)]
        scores += [_matmul(q.unflatten(2, links), keys.transpose(3, 4)).flatten(2, 3) for keys in self._keys[1:]]
        if slots > 1:
            future = torch.ones(slots, slots, dtype=torch.bool, device=q.device).triu(1).repeat(links[0], 1)
            scores[-1] = scores[-1].masked_fill(future, -torch.inf)
        return scores


def causal_pass(network: Any, shape: RotaryShape, x: Tensor) -> Tensor:
    """Outputs of a network with layers of this shape over whole sequences, (batch, length, hidden)."""
    rotary, _ = rotary_of(shape)
    rotary.reserve(x.shape[1], x)
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return network(x, rotary(slice(0, x.shape[1])), attend)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product; for a single slot elementwise, which is faster than many tiny matrix products."""
    if a.shape[-2] > 1:
        return a @ b
    return a * b if b.shape[-2] == 1 else (a * b.transpose(-1, -2)).sum(-1, keepdim=True)
