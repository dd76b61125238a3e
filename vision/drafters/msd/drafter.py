"""Hidden-state drafters of vision-language models: MSD, which decouples text and visual tokens (arXiv 2505.14260), and
FLASH, with compressed images and semi-autoregressive drafting (arXiv 2505.12728).

One class runs all networks; ``MSDConfig`` enables decoupling, compression and semi-autoregression separately.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from mmspec.drafters.eagle.drafter import Eagle, Entries
from mmspec.drafters.eagle.network import EagleNetwork
from mmspec.drafters.hidden_state.entries import packing, take
from mmspec.vision.drafters.msd import MSDConfig
from mmspec.vision.drafters.msd.latents import Images
from mmspec.vision.drafters.msd.network import MSDNetwork


class MSD(Eagle):
    """MSD drafter, for any target that provides hidden states and the mask of visual positions; see ``Eagle``."""

    name: ClassVar[str] = "msd"
    layout: ClassVar[str | None] = "msd"
    config_class = MSDConfig
    network_class: ClassVar[type[EagleNetwork]] = MSDNetwork

    def prompt_states(self, embeds: Tensor, hidden: Tensor, images: Images | None) -> tuple[Tensor, Tensor]:
        """Embeddings and hidden states of a prompt's entries, (batch, entries, hidden) each, with its latents."""
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
    layout = None


def _drop(entries: Entries, kept: Tensor, visual: Tensor) -> Tensor:
    """Drop all entries but ``kept``, (batch, entries) bool; returns what remains of ``visual``."""
    mask = entries.mask
    order, mask = packing(kept if mask is None else kept & mask, left=True)
    entries.at = order if isinstance(entries.at, slice) else entries.at.gather(1, order)
    entries.embeds, entries.hidden = take(entries.embeds, order), take(entries.hidden, order)
    entries.mask = None if bool(mask.all()) else mask
    return visual.gather(1, order)
