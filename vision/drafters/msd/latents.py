"""Visual token compression: each image's visual tokens are replaced by a few latents (FLASH, arXiv 2505.12728).

Learned queries A pool the target's hidden states F of an image, ``softmax(A F^T) F``, and with the same weights its
visual features. The latents replace evenly spaced visual entries; the other ones are dropped, and remaining entries
keep their positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Images:
    """Runs of visual entries to compress; ``images`` counts those of all rows of a batch.

    Attributes:
        row: (images,) int64, row of each image.
        entry: (images, longest) int64, its entries, padded with the last one.
        inside: (images, longest) bool, False at padding.
        spot: (images, latents) int64, entries that its latents replace.
    """

    row: Tensor
    entry: Tensor
    inside: Tensor
    spot: Tensor

    def kept(self, like: Tensor) -> Tensor:
        """Mask of remaining entries, (batch, entries) bool; ``like`` has that shape."""
        kept = torch.ones_like(like, dtype=torch.bool)
        kept[self.row[:, None].expand_as(self.entry)[self.inside], self.entry[self.inside]] = False
        kept[self.row[:, None], self.spot] = True
        return kept


def find_images(visual: Tensor, latents: int, span: int) -> Images | None:
    """Find the images to compress; None if there are none.

    Args:
        visual: (batch, entries) bool.
        latents: latents per image; images with no more entries than that are not compressed.
        span: maximum entries per image: longer runs are split evenly; 0 never splits.
    """
    runs = []
    for row, begin, end in _runs(visual):
        pieces = -(-(end - begin) // span) if span else 1
        cuts = [begin + (end - begin) * piece // pieces for piece in range(pieces + 1)]
        runs += [(row, a, b - a) for a, b in pairwise(cuts) if b - a > latents]
    if not runs:
        return None
    middle = 2 * torch.arange(latents, device=visual.device) + 1
    return _images(runs, lambda begin, length: begin + middle * length // (2 * latents), visual.device)


def find_runs(visual: Tensor) -> Images | None:
    """All runs of ``visual``, (batch, entries) bool, each with one latent in place of its last entry."""
    runs = [(row, begin, end - begin) for row, begin, end in _runs(visual)]
    return _images(runs, lambda begin, length: begin + length - 1, visual.device) if runs else None


def _runs(visual: Tensor) -> list[tuple[int, int, int]]:
    """Row, first entry and end of each run."""
    edge = F.pad(visual, (1, 1)).int().diff(dim=1)
    begins, ends = (edge == 1).nonzero().tolist(), (edge == -1).nonzero().tolist()
    return [(row, begin, end) for (row, begin), (_, end) in zip(begins, ends, strict=True)]


def _images(
    runs: list[tuple[int, int, int]], spots: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> Images:
    """Images of given row, first entry and length; ``spots`` takes the latter two, (images, 1) each."""
    row, begin, length = torch.tensor(runs, device=device).unbind(1)
    step = torch.arange(int(length.max()), device=device)
    inside = step < length[:, None]
    entry = begin[:, None] + torch.minimum(step, length[:, None] - 1)
    return Images(row, entry, inside, spots(begin[:, None], length[:, None]))


class Latents(nn.Module):
    """Learned queries, (latents, hidden)."""

    def __init__(self, latents: int, width: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(latents, width))

    def forward(self, hidden: Tensor, images: Images) -> Tensor:
        """Attention weights of each latent over its image's entries, (images, latents, longest).

        Args:
            hidden: (batch, entries, hidden), the target's hidden states.
        """
        own = hidden[images.row[:, None], images.entry]  # (images, longest, hidden)
        # Normalise: hidden states of some targets are large enough to saturate the softmax.
        keys = F.rms_norm(own, own.shape[-1:])
        scores = self.queries.to(own.dtype) @ keys.transpose(1, 2) / own.shape[-1] ** 0.5
        return scores.masked_fill(~images.inside[:, None], -torch.inf).float().softmax(-1)


def compress(x: Tensor, weights: Tensor, images: Images) -> Tensor:
    """Write the latents' weighted means of ``x``, (batch, entries, hidden), to their spots."""
    latents = weights.to(x.dtype) @ x[images.row[:, None], images.entry]
    return x.index_put((images.row[:, None].expand_as(images.spot), images.spot), latents.to(x.dtype))  # autocast
