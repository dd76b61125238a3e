"""A drafter's short view of images: a few latents in place of an image's visual tokens (FLASH, arXiv 2505.12728).

Learned queries A read the target's hidden states F of an image, ``softmax(A F^T) F``, and with the same weights its
visual features. The latents stand at entries spread evenly over the image's own; the others leave the sequence, and
what remains keeps its positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Images:
    """Runs of visual entries that latents replace. ``images`` counts those of all rows of a batch.

    Attributes:
        row: (images,) int64, each one's row.
        entry: (images, longest) int64, its entries; beyond its end the last one again.
        inside: (images, longest) bool, False beyond its end.
        spot: (images, latents) int64, the entries where its latents stand.
    """

    row: Tensor
    entry: Tensor
    inside: Tensor
    spot: Tensor

    def kept(self, like: Tensor) -> Tensor:
        """(batch, entries) bool, which entries remain; ``like`` has that shape."""
        kept = torch.ones_like(like, dtype=torch.bool)
        kept[self.row[:, None].expand_as(self.entry)[self.inside], self.entry[self.inside]] = False
        kept[self.row[:, None], self.spot] = True
        return kept


def find_images(visual: Tensor, latents: int, span: int) -> Images | None:
    """Where latents are to replace visual entries; None where nowhere.

    Args:
        visual: (batch, entries) bool.
        latents: per image; one of no more entries keeps them as they are.
        span: entries of an image at most: a longer run is several images, and cut evenly; 0 takes every run for one.
    """
    edge = F.pad(visual, (1, 1)).int().diff(dim=1)
    begins, ends = (edge == 1).nonzero().tolist(), (edge == -1).nonzero().tolist()
    found = []
    for (row, begin), (_, end) in zip(begins, ends, strict=True):
        pieces = -(-(end - begin) // span) if span else 1
        cuts = [begin + (end - begin) * piece // pieces for piece in range(pieces + 1)]
        found += [(row, a, b - a) for a, b in pairwise(cuts) if b - a > latents]
    if not found:
        return None
    row, begin, length = torch.tensor(found, device=visual.device).unbind(1)
    step = torch.arange(int(length.max()), device=visual.device)
    inside = step < length[:, None]
    entry = begin[:, None] + torch.minimum(step, length[:, None] - 1)
    middle = 2 * torch.arange(latents, device=visual.device) + 1
    return Images(row, entry, inside, begin[:, None] + middle * length[:, None] // (2 * latents))


class Latents(nn.Module):
    """The queries: (latents, hidden)."""

    def __init__(self, latents: int, width: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(latents, width))

    def forward(self, hidden: Tensor, images: Images) -> Tensor:
        """What each latent takes of its image's entries, (images, latents, longest), each row of them adding to one.

        Args:
            hidden: (batch, entries, hidden), the target's states.
        """
        own = hidden[images.row[:, None], images.entry]  # (images, longest, hidden)
        # The queries look at directions: hidden states of some targets are large enough to saturate the softmax.
        keys = F.rms_norm(own, own.shape[-1:])
        scores = self.queries.to(own.dtype) @ keys.transpose(1, 2) / own.shape[-1] ** 0.5
        return scores.masked_fill(~images.inside[:, None], -torch.inf).float().softmax(-1)


def compress(x: Tensor, weights: Tensor, images: Images) -> Tensor:
    """``x``, (batch, entries, hidden), with the latents' weighted means at their spots."""
    latents = weights.to(x.dtype) @ x[images.row[:, None], images.entry]
    return x.index_put((images.row[:, None].expand_as(images.spot), images.spot), latents.to(x.dtype))  # autocast


def packing(kept: Tensor, left: bool) -> tuple[Tensor, Tensor]:
    """Where kept entries go when the others leave.

    Args:
        kept: (batch, entries) bool.
        left: pad shorter rows on the left, else on the right.

    Returns:
        (batch, most) int64, which entry comes to stand in each place, in order; (batch, most) bool, False at padding.
    """
    most = int(kept.sum(1).max())
    order = (kept if left else ~kept).int().sort(dim=1, stable=True).indices
    order = order[:, kept.shape[1] - most :] if left else order[:, :most]
    return order, kept.gather(1, order)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Entries of each row: (batch, entries, hidden) and (batch, taken) int64 -> (batch, taken, hidden)."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
