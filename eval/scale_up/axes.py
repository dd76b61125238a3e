"""Function-preserving widening: where the features of a small model go in a big one, and the big one's weights.

A model built here has the small model's outputs and the big shape's cost: acceptance measured on it is the small
model's, time is the big shape's. Every table must say so.

Each axis of a weight is an ``Axis``: the small model's features, copied, among added ones. The residual stream is
padded with zeros; its norms are rescaled, since their mean is over more features. Added heads, MLP features and layers
are random and are computed, but the weights that would write them to the stream are zero, and so are the weights by
which a copied feature would read them. All other added weights are random, so that no zeros can be skipped and no
memory page is shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from mmspec.errors import UserError

_STD = 0.02  # standard deviation of added weights


@dataclass(frozen=True)
class Shape:
    """Sizes of a language model.

    Attributes:
        hidden: width of the residual stream.
        mlp: intermediate width of the gated MLP.
        layers: number of layers.
        heads, kv_heads, head_dim: of each attention layer.
        vocab: vocabulary size.
        mamba: sizes of the Mamba-2 layers, for hybrids.
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
    """Sizes of a hybrid's Mamba-2 layers.

    Attributes:
        heads, head_dim, state: of each layer; the state of a head is (head_dim, state).
        groups: of heads that share B and C.
        attending: indices of the layers with attention instead.
    """

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
"""The language models of TinyLlama, LLaVA-1.5-7B and -13B, and Bamba-9B, with transformers' vocabulary sizes."""


@dataclass(frozen=True)
class Axis:
    """An axis of a big model's weight.

    Attributes:
        source: (size,) int64, the small model's feature that each feature copies; -1 for added features.
        silent: (size,) bool, added features that are always zero. Other added features are noise.
        small: size of the small model's axis.
        stream: whether this is the residual stream.
    """

    source: Tensor
    silent: Tensor
    small: int
    stream: bool = False

    @property
    def size(self) -> int:
        return len(self.source)

    @property
    def copied(self) -> Tensor:
        """(size,) bool, features that copy the small model's."""
        return self.source >= 0

    @property
    def noisy(self) -> Tensor:
        """(size,) bool, added features that are not silent."""
        return ~self.copied & ~self.silent


def make_axis(source: Tensor, small: int, silent: Tensor | bool = False, *, stream: bool = False) -> Axis:
    """An axis given its sources.

    Args:
        silent: whether added features are silent, for all of them or by a mask, (size,).
    """
    return Axis(source, (source < 0) & silent, small, stream)


def grow_axis(small: int, big: int, name: str, silent: bool = False, *, stream: bool = False) -> Axis:
    """An axis with the small model's features first and added features after them.

    Raises:
        UserError: ``big`` is smaller than ``small``.
    """
    if big < small:
        raise UserError(f"a model can only grow: {name} must be at least {small}, got {big}")
    return make_axis(torch.cat([torch.arange(small), torch.full((big - small,), -1)]), small, silent, stream=stream)


def concat_axes(*parts: Axis) -> Axis:
    """The axis of stacked weights."""
    sources, before = [], 0
    for part in parts:
        sources.append(torch.where(part.copied, part.source + before, -1))
        before += part.small
    return Axis(torch.cat(sources), torch.cat([part.silent for part in parts]), before)


@dataclass(frozen=True)
class HeadAxes:
    """Axes of the attention projections.

    Attributes:
        queries, keys, values: outputs of the projections.
        output: input of the output projection.
        query_scale: factor of the query weights, since attention divides by the square root of a larger head size.
    """

    queries: Axis
    keys: Axis
    values: Axis
    output: Axis
    query_scale: float


def grow_heads(small: Shape, big: Shape, rotary: float = 1.0) -> HeadAxes:
    """Place the small model's attention heads among the big one's.

    Where the big model's query groups are smaller, a KV head is copied for several groups.

    Args:
        rotary: share of a head's features with rotary embeddings. Frequency i of a small head becomes frequency
            i * ratio of a big head, with the ratio of the head sizes.

    Raises:
        UserError: too few KV heads, or a head size that is not a multiple of the small one.
    """
    group, wide = small.heads // small.kv_heads, big.heads // big.kv_heads
    each = ceil(group / wide)  # big KV heads per small one
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
    rotated = _rotary_source(small.head_dim, big.head_dim, rotary)
    plain = grow_axis(small.head_dim, big.head_dim, "head_dim").source
    return HeadAxes(
        _head_axis(queries, small.heads, rotated, small.head_dim, silent=True),
        _head_axis(keys, small.kv_heads, rotated, small.head_dim),
        _head_axis(keys, small.kv_heads, plain, small.head_dim),
        _head_axis(queries, small.heads, plain, small.head_dim),
        (big.head_dim / small.head_dim) ** 0.5,
    )


def _rotary_source(small: int, big: int, rotary: float) -> Tensor:
    """(big,) int64, the small head's feature with the same rotary frequency as each feature of a big head, or -1."""
    ratio, inner, outer = big // small, int(small * rotary), int(big * rotary)
    source = torch.full((big,), -1)
    half = torch.arange(inner // 2)
    source[half * ratio] = half
    source[outer // 2 + half * ratio] = inner // 2 + half
    source[outer : outer + small - inner] = torch.arange(inner, small)
    return source


def _head_axis(heads: Tensor, small_heads: int, within: Tensor, head_dim: int, silent: bool = False) -> Axis:
    """The axis of concatenated heads; ``silent`` silences features added to copied heads."""
    copied = (heads >= 0)[:, None] & (within >= 0)
    source = torch.where(copied, heads[:, None] * head_dim + within, -1)
    quiet = (heads >= 0)[:, None].expand(-1, len(within)) & silent
    return make_axis(source.flatten(), small_heads * head_dim, quiet.flatten())


class Weights:
    """Makes the big model's tensors, one at a time.

    Args:
        device, dtype: of the tensors.
        seed: of added weights.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def random(self, *size: int) -> Tensor:
        """Small random weights."""
        return torch.empty(size, device=self.device, dtype=self.dtype).normal_(0.0, _STD, generator=self._generator)

    def matrix(self, small: Tensor | None, out: Axis, into: Axis, scale: float = 1.0) -> Tensor:
        """A projection, (out, into), from the small model's; None for an added layer, which writes zeros."""
        big = self.random(out.size, into.size)
        if small is None:
            return big.zero_() if out.stream else big
        assert small.shape == (out.small, into.small), "axes must be those of the small model"
        where = self.device
        big[out.silent.to(where)] = 0
        rows = out.copied.nonzero()[:, 0]
        columns = into.copied.nonzero()[:, 0].to(where)
        noisy = into.noisy.to(where)
        # In pieces, so that large embedding tables need little extra memory.
        for piece in rows.split(4096):
            values = big[piece.to(where)]
            values[:, noisy] = 0
            source = small[out.source[piece].to(small.device)][:, into.source[into.copied].to(small.device)]
            values[:, columns] = (source.to(where).float() * scale).to(self.dtype)
            big[piece.to(where)] = values
        return big

    def vector(self, small: Tensor | None, size: torch.Size, out: Axis, scale: float = 1.0) -> Tensor:
        """A bias or another tensor of size (out, ...)."""
        big = self.random(*size)
        if small is None:
            return big.zero_() if out.stream else big
        big[out.silent.to(self.device)] = 0
        values = small[out.source[out.copied].to(small.device)].to(self.device).float() * scale
        big[out.copied.to(self.device)] = values.to(self.dtype)
        return big

    def norm(self, small: Tensor | None, out: Axis, scale: float) -> Tensor:
        """The weight of an RMSNorm over ``out``, whose added features must be silent."""
        big = torch.ones(out.size, device=self.device, dtype=self.dtype)
        if small is not None:
            big[out.copied.to(self.device)] = (small.to(self.device).float() * scale).to(self.dtype)
        return big
