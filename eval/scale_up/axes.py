"""Small trained models in big shapes, their function unchanged.

A big model made here says what the small one says and costs what its shape costs: acceptance measured on it is the
small model's, time is the big shape's. That is what it can stand for, and every table has to say so.

Each axis of a weight is an `Axis`: the small model's features, copied, among added ones. The residual stream is padded
with zeros; its norms are rescaled, since their mean is over more. Added heads, MLP features and layers are random and
are computed, and whatever would write them to the stream is zero. So is everything a kept feature would read of them.
All else is random: no zero could be skipped, nor is a page of memory shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from mmspec.errors import UserError

_STD = 0.02  # of added weights


@dataclass(frozen=True)
class Shape:
    """Sizes of a language model.

    Attributes:
        hidden: the residual stream's width.
        mlp: width inside the gated MLP.
        heads, kv_heads, head_dim: of each attention.
        vocab: tokens.
        mamba: of the Mamba-2 layers, for hybrids.
    """

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    mamba: MambaShape | None = None


@dataclass(frozen=True)
class MambaShape:
    """Sizes of the Mamba-2 layers of a hybrid: ``heads`` of ``head_dim`` with ``state`` numbers each, which share B and
    C in ``groups``; ``attending`` are the layers that have attention in their place."""

    heads: int
    head_dim: int
    state: int
    groups: int
    attending: tuple[int, ...]


SHAPES = {
    "1b": Shape(2048, 5632, 22, 32, 4, 64, 32064),
    "7b": Shape(4096, 11008, 32, 32, 32, 128, 32064),
    "13b": Shape(5120, 13824, 40, 40, 40, 128, 32064),
    "8b-hybrid": Shape(4096, 14336, 32, 32, 8, 128, 128256, MambaShape(128, 64, 128, 1, (9, 18, 27))),
}
"""TinyLlama's language model, those of LLaVA-1.5-7B and -13B, and Bamba-9B; all in transformers' vocabularies."""


@dataclass(frozen=True)
class Axis:
    """Features of a big model.

    Attributes:
        source: (size,) int64, the small model's feature that each one copies; -1 if it is an added one.
        silent: (size,) bool, added ones that are always zero. Other added ones are noise.
        small: features of the small model.
        stream: of the residual stream.
    """

    source: Tensor
    silent: Tensor
    small: int
    stream: bool = False

    @property
    def size(self) -> int:
        return len(self.source)

    @property
    def kept(self) -> Tensor:
        """(size,) bool, those that copy the small model's."""
        return self.source >= 0

    @property
    def noisy(self) -> Tensor:
        """(size,) bool, added ones that are not silent."""
        return ~self.kept & ~self.silent


def axis(source: Tensor, small: int, silent: Tensor | bool = False, *, stream: bool = False) -> Axis:
    """An axis whose added features are silent or not, all of them or by a mask, (size,)."""
    return Axis(source, (source < 0) & silent, small, stream)


def grown(small: int, big: int, what: str, silent: bool = False, *, stream: bool = False) -> Axis:
    """The small model's features first, added ones behind.

    Raises:
        UserError: ``big`` is the smaller.
    """
    if big < small:
        raise UserError(f"a model can only grow: {what} must be at least {small}, got {big}")
    return axis(torch.cat([torch.arange(small), torch.full((big - small,), -1)]), small, silent, stream=stream)


def joined(*parts: Axis) -> Axis:
    """Axes one behind the other, as stacked weights have them."""
    sources, before = [], 0
    for part in parts:
        sources.append(torch.where(part.kept, part.source + before, -1))
        before += part.small
    return Axis(torch.cat(sources), torch.cat([part.silent for part in parts]), before)


@dataclass(frozen=True)
class Heads:
    """Axes of an attention's projections: queries, keys, values, and what the queries read."""

    queries: Axis
    keys: Axis
    values: Axis
    read: Axis
    query_scale: float
    """Attention divides by the root of the big head size where the small model divided by that of the small one."""


def grow_heads(small: Shape, big: Shape, rotary: float = 1.0) -> Heads:
    """Where attention heads go. Groups that are smaller in the big model take several copies of a key-value head.

    Args:
        rotary: share of a head's features that positions turn. Frequency i of a small head is number i * ratio of a big
            one, the ratio being that of the head sizes.

    Raises:
        UserError: too few key-value heads, or a head size that is no multiple of the small one.
    """
    group, wide = small.heads // small.kv_heads, big.heads // big.kv_heads
    each = ceil(group / wide)  # big key-value heads per small one
    if big.heads % big.kv_heads or each * small.kv_heads > big.kv_heads or big.head_dim % small.head_dim:
        raise UserError(
            f"heads must be grouped evenly, with at least {each * small.kv_heads} key-value heads of a multiple of "
            f"{small.head_dim} features: got {big.heads} and {big.kv_heads} of {big.head_dim}"
        )
    queries, keys = torch.full((big.heads,), -1), torch.full((big.kv_heads,), -1)
    for head in range(small.heads):
        kv, place = divmod(head, group)
        at = kv * each + place // wide
        keys[at] = kv
        queries[at * wide + place % wide] = head
    turned = _turned(small.head_dim, big.head_dim, rotary)
    plain = grown(small.head_dim, big.head_dim, "head_dim").source
    return Heads(
        _features(queries, small.heads, turned, small.head_dim, silent=True),
        _features(keys, small.kv_heads, turned, small.head_dim),
        _features(keys, small.kv_heads, plain, small.head_dim),
        _features(queries, small.heads, plain, small.head_dim),
        (big.head_dim / small.head_dim) ** 0.5,
    )


def _turned(small: int, big: int, rotary: float) -> Tensor:
    """(big,) int64, the features of a small head at those of a big one with the same frequency."""
    ratio, inner, outer = big // small, int(small * rotary), int(big * rotary)
    source = torch.full((big,), -1)
    half = torch.arange(inner // 2)
    source[half * ratio] = half
    source[outer // 2 + half * ratio] = inner // 2 + half
    source[outer : outer + small - inner] = torch.arange(inner, small)
    return source


def _features(heads: Tensor, small_heads: int, within: Tensor, head_dim: int, silent: bool = False) -> Axis:
    """Features of heads one behind the other; ``silent``: those added to kept heads are."""
    kept = (heads >= 0)[:, None] & (within >= 0)
    source = torch.where(kept, heads[:, None] * head_dim + within, -1)
    quiet = (heads >= 0)[:, None].expand(-1, len(within)) & silent
    return axis(source.flatten(), small_heads * head_dim, quiet.flatten())


class Weights:
    """Makes the big model's tensors, one at a time.

    Args:
        device, dtype: where they are made, and in which precision.
        seed: of what is random.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def random(self, *size: int) -> Tensor:
        """Small random numbers; written, so that the memory is there."""
        return torch.empty(size, device=self.device, dtype=self.dtype).normal_(0.0, _STD, generator=self._generator)

    def matrix(self, small: Tensor | None, out: Axis, into: Axis, scale: float = 1.0) -> Tensor:
        """A projection, (out, into), from the small model's; None for an added layer, which adds zeros to it."""
        big = self.random(out.size, into.size)
        if small is None:
            return big.zero_() if out.stream else big
        assert small.shape == (out.small, into.small), "axes must be those of the small model"
        where = self.device
        big[out.silent.to(where)] = 0
        rows = out.kept.nonzero()[:, 0]
        columns = into.kept.nonzero()[:, 0].to(where)
        noisy = into.noisy.to(where)
        # A table of many rows, in pieces that take little memory.
        for piece in rows.split(4096):
            values = big[piece.to(where)]
            values[:, noisy] = 0
            source = small[out.source[piece].to(small.device)][:, into.source[into.kept].to(small.device)]
            values[:, columns] = (source.to(where).float() * scale).to(self.dtype)
            big[piece.to(where)] = values
        return big

    def vector(self, small: Tensor | None, size: torch.Size, out: Axis, scale: float = 1.0) -> Tensor:
        """A bias, or anything else by feature of ``out``: ``size`` is (out, ...)."""
        big = self.random(*size)
        if small is None:
            return big.zero_() if out.stream else big
        big[out.silent.to(self.device)] = 0
        values = small[out.source[out.kept].to(small.device)].to(self.device).float() * scale
        big[out.kept.to(self.device)] = values.to(self.dtype)
        return big

    def norm(self, small: Tensor | None, out: Axis, scale: float) -> Tensor:
        """The weight of an RMSNorm over ``out``, whose added features are silent."""
        big = torch.ones(out.size, device=self.device, dtype=self.dtype)
        if small is not None:
            big[out.kept.to(self.device)] = (small.to(self.device).float() * scale).to(self.dtype)
        return big
