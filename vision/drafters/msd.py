"""Hidden-state drafters of vision-language models: MSD, which decouples text and visual tokens (arXiv 2505.14260), and
FLASH, with compressed images and semi-autoregressive drafting (arXiv 2505.12728).

One class runs all networks; ``MSDConfig`` enables decoupling, compression and semi-autoregression separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.eagle import Eagle, EagleConfig, EagleNetwork, Entries
from mmspec.drafters.hidden_state import packing
from mmspec.drafters.layer import take
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError
from mmspec.validation import option, options


@options
class MSDConfig(EagleConfig):
    """Configuration of an ``MSDNetwork``: an ``EagleConfig``, and

    Attributes:
        decoupled: use the raw visual feature at visual positions (MSD); False fuses it with a hidden state, like text.
        visual_states: separate projection of feature and hidden state at visual positions, without cost per drafted
            token. False is MSD as published.
        latents: latents per image (FLASH); 0 disables compression.
        span: maximum visual tokens per image: longer runs are split into several images; 0 never splits.
        hide_visual: drop visual positions (HiViS, arXiv 2509.23928).
    """

    decoupled: bool = option(True, "Off: plain EAGLE.")
    visual_states: bool = option(
        False, "Visual positions also read the target's hidden states, with a separate projection."
    )
    latents: int = option(0, ge=0, le=2**12)
    span: int = option(0, ge=0, le=2**20)
    hide_visual: bool = option(False, "Visual positions are not read at all.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hide_visual and self.latents:
            raise UserError(f"one of hide_visual and latents must be off: got both, {self.latents} latents")


@dataclass(frozen=True)
class Images:
    """Runs of visual entries of all rows of a batch, to compress.

    Attributes:
        row: (images,) int64, row of each image.
        entry: (images, longest) int64, entries of each image, padded with its last entry.
        inside: (images, longest) bool, False at padding.
        spot: (images, latents) int64, entries replaced by latents.
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
    """Find the images to compress among ``visual`` entries, (batch, entries) bool: runs of more entries than
    ``latents``, split evenly into at most ``span`` each; 0 never splits. None if there are none."""
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
    """All runs of ``visual``, (batch, entries) bool; one latent replaces the last entry of each run."""
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
    """Create images from (row, first entry, length); ``spots`` gets first entries and lengths, (images, 1) each."""
    row, begin, length = torch.tensor(runs, dtype=torch.long, device=device).unbind(1)
    step = torch.arange(int(length.max()), device=device)
    inside = step < length[:, None]
    entry = begin[:, None] + torch.minimum(step, length[:, None] - 1)
    return Images(row, entry, inside, spots(begin[:, None], length[:, None]))


class Latents(nn.Module):
    """Learned queries, (latents, hidden)."""

    def __init__(self, latents: int, width: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(latents, width, dtype=torch.float32))

    def forward(self, hidden: Tensor, images: Images) -> Tensor:
        """Attention weights of each latent over its image's entries, (images, latents, longest). ``hidden``: (batch,
        entries, hidden), the target's hidden states."""
        own = hidden[images.row[:, None], images.entry]  # (images, longest, hidden)
        # Normalise: hidden states of some targets are large enough to saturate the softmax.
        keys = F.rms_norm(own, own.shape[-1:])
        scores = self.queries.to(own.dtype) @ keys.transpose(1, 2) / own.shape[-1] ** 0.5
        return scores.masked_fill(~images.inside[:, None], -torch.inf).float().softmax(-1)


def compress(x: Tensor, weights: Tensor, images: Images) -> Tensor:
    """Write the latents, weighted means of ``x``, (batch, entries, hidden), to their spots."""
    latents = weights.to(x.dtype) @ x[images.row[:, None], images.entry]
    return x.index_put((images.row[:, None].expand_as(images.spot), images.spot), latents.to(x.dtype))  # autocast


class MSDNetwork(EagleNetwork):
    """Network of MSD and FLASH (arXiv 2505.14260, 2505.12728): an ``EagleNetwork`` for visual positions."""

    config: MSDConfig

    def __init__(self, config: MSDConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        if config.decoupled and config.visual_states:
            self.visual_fc = nn.Linear(2 * width, width)
        if config.latents:
            self.latents = Latents(config.latents, width)

    def combine(self, embeds: Tensor, hidden: Tensor, visual: Tensor | None = None) -> Tensor:
        """Layer inputs as in ``EagleNetwork.combine``, but at ``visual`` positions, (batch, nodes) bool, the raw visual
        feature or a separate projection (arXiv 2505.14260, section 3.2). None if all positions are text."""
        fused = super().combine(embeds, hidden)
        if visual is None or not self.config.decoupled:
            return fused
        apart = self.visual_fc(torch.cat([embeds, hidden], dim=-1)) if self.config.visual_states else embeds
        return torch.where(visual[..., None], apart, fused)

    def images(self, visual: Tensor) -> Images | None:
        """Images to compress among ``visual`` entries, (batch, entries) bool; None if there are none."""
        config = self.config
        return find_images(visual, config.latents, config.span) if config.latents else None

    def kept(self, visual: Tensor, images: Images | None) -> Tensor | None:
        """Mask of remaining entries, (batch, entries) bool; None if all remain; ``images`` come from ``visual``."""
        if self.config.hide_visual:
            return ~visual
        return None if images is None else images.kept(visual)

    def with_latents(self, embeds: Tensor, hidden: Tensor, images: Images) -> tuple[Tensor, Tensor]:
        """``embeds`` and ``hidden``, see ``combine``, with latents written to their spots; does not drop entries."""
        weights = self.latents(hidden, images)
        return compress(embeds, weights, images), compress(hidden, weights, images)


class MSD(Eagle):
    """MSD drafter, for any target that provides hidden states and the mask of visual positions; see ``Eagle``."""

    name: ClassVar[str] = "msd"
    config_class = MSDConfig
    network_class: ClassVar[type[EagleNetwork]] = MSDNetwork

    def prompt_states(self, embeds: Tensor, hidden: Tensor, images: Images | None) -> tuple[Tensor, Tensor]:
        """Embeddings and hidden states of a prompt's entries, (batch, entries, hidden) each, including latents."""
        return (embeds, hidden) if images is None else self.network.with_latents(embeds, hidden, images)

    def prompt_inputs(self, entries: Entries) -> Tensor:
        network: Any = self.network
        visual = entries.visual
        images = None if visual is None else network.images(visual)
        entries.embeds, entries.hidden = self.prompt_states(entries.embeds, entries.hidden, images)
        if visual is not None and (kept := network.kept(visual, images)) is not None:
            visual = _drop(entries, kept, visual)
        inputs: Tensor = network.combine(entries.embeds, entries.hidden, visual)
        return inputs


class Flash(MSD):
    """FLASH drafter (arXiv 2505.12728): MSD with latents or several slots."""

    name = "flash"


def _drop(entries: Entries, kept: Tensor, visual: Tensor) -> Tensor:
    """Keep only the entries ``kept``, (batch, entries) bool; returns ``visual`` for these entries."""
    mask = entries.mask
    order, mask = packing(kept if mask is None else kept & mask, left=True)
    entries.at = order if isinstance(entries.at, slice) else entries.at.gather(1, order)
    entries.embeds, entries.hidden = take(entries.embeds, order), take(entries.hidden, order)
    entries.mask = None if bool(mask.all()) else mask
    return visual.gather(1, order)


MSD_SPEC = DrafterSpec(
    "msd",
    "MSD",
    "a small trained layer on the target's hidden states, with separate text and images (arXiv 2505.14260)",
    MSD,
    weights="required",
    train="msd",
)
FLASH_SPEC = DrafterSpec(
    "flash",
    "FLASH",
    "MSD's small trained layer with compressed images, and several tokens per pass of it (arXiv 2505.12728)",
    Flash,
    weights="required",
    train="flash",
)
