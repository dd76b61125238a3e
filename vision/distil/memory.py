"""What the passes of a training step read of each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Memory:
    """Keys and values of the passes so far, and attention over them.

    The first pass is over all entries. Later passes are over chains that continue it, each by one link of ``slots``
    entries per pass: an entry reads the first pass up to its chain's origin, the links before its own, and its own link
    up to itself.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._origin: Tensor | None = None

    def follow(self, origin: Tensor) -> None:
        """Name the chains, after the first pass: (batch, chains) int64, the entries that they continue."""
        self._origin = origin

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take in a pass, (batch, heads or kv_heads, entries, head_dim) each; what its queries read.

        Entries of a later pass stand chain by chain: (chains * slots).
        """
        groups = q.shape[1] // k.shape[1]
        k, v, q = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), q / math.sqrt(q.shape[-1])
        if self._origin is None:
            self._keys, self._values = [k], [v]
            ahead = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).triu(1)
            weights = (q @ k.transpose(2, 3)).masked_fill(ahead, -torch.inf).float().softmax(-1).to(v.dtype)
            return weights @ v
        links = self._origin.shape[1], q.shape[2] // self._origin.shape[1]
        self._keys.append(k.unflatten(2, links))
        self._values.append(v.unflatten(2, links))
        scores = self._scores(q, links)
        weights = torch.cat(scores, dim=-1).float().softmax(-1).to(v.dtype)
        first, *own = weights.split([part.shape[-1] for part in scores], dim=-1)
        read = first @ self._values[0]
        for part, value in zip(own, self._values[1:], strict=True):
            read = read + _times(part.unflatten(2, links), value).flatten(2, 3)
        return read

    def _scores(self, q: Tensor, links: tuple[int, int]) -> list[Tensor]:
        """Of each pass's keys, (batch, heads, chains * slots, keys)."""
        assert self._origin is not None
        first, slots = self._keys[0], links[1]
        behind = torch.arange(first.shape[2], device=q.device) > self._origin[..., None]
        behind = behind.repeat_interleave(slots, dim=1)[:, None]
        scores = [(q @ first.transpose(2, 3)).masked_fill(behind, -torch.inf)]
        scores += [_times(q.unflatten(2, links), keys.transpose(3, 4)).flatten(2, 3) for keys in self._keys[1:]]
        if slots > 1:
            ahead = torch.ones(slots, slots, dtype=torch.bool, device=q.device).triu(1).repeat(links[0], 1)
            scores[-1] = scores[-1].masked_fill(ahead, -torch.inf)
        return scores


def _times(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product over the last axes; for one slot it is a product of rows, which batches of tiny matrices are
    slow at."""
    if a.shape[-2] > 1:
        return a @ b
    return a * b if b.shape[-2] == 1 else (a * b.transpose(-1, -2)).sum(-1, keepdim=True)
