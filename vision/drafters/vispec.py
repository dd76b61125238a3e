"""ViSpec drafter (arXiv 2509.15235): EAGLE with one token per image, and an image vector in its text states.

Two learned queries attend to the visual features of an image, a run of visual tokens. The first result replaces the
image's visual entries, at the position of the last entry; the second is combined with the hidden states of the text up
to the next image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.cache.rows import RowTensor
from mmspec.core.target import Target
from mmspec.drafters.captured import RowState
from mmspec.drafters.spec import DrafterSpec
from mmspec.vision.drafters.msd import MSD, Images, MSDConfig, MSDNetwork, find_runs


class Adaptor(nn.Module):
    """Attention of two learned queries to an image's visual features."""

    def __init__(self, config: MSDConfig) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.heads
        self.queries = nn.Parameter(torch.randn(2, heads, width // heads, dtype=torch.float32))
        self.key = nn.Linear(width, width, bias=config.qkv_bias)
        self.value = nn.Linear(width, width, bias=config.qkv_bias)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, embeds: Tensor, images: Images) -> tuple[Tensor, Tensor]:
        """Tokens and vectors of images, (images, hidden) each, from input embeddings, (batch, entries, hidden)."""
        own = embeds[images.row[:, None], images.entry]  # (images, longest, hidden)
        heads = self.queries.shape[1]
        keys, values = (part(own).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (self.key, self.value))
        queries = self.queries.transpose(0, 1).expand(len(own), -1, -1, -1)
        read = F.scaled_dot_product_attention(queries, keys, values, images.inside[:, None, None])
        token, vector = self.out(read.transpose(1, 2).flatten(2)).unbind(1)
        return token, vector


class ViSpecNetwork(MSDNetwork):
    """``MSDNetwork`` with an ``Adaptor``: an image's token replaces its visual positions, and its vector is combined
    with the hidden states of the following text."""

    def __init__(self, config: MSDConfig) -> None:
        super().__init__(config)
        self.adaptor = Adaptor(config)
        self.img_fc = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def images(self, visual: Tensor) -> Images | None:
        return find_runs(visual)

    def with_image(self, hidden: Tensor, vector: Tensor) -> Tensor:
        """Hidden states with an image's vector, both (batch, nodes, hidden), as inputs of ``combine``."""
        return self.img_fc(torch.cat([hidden, vector], dim=-1))

    def with_tokens(self, embeds: Tensor, images: Images | None) -> tuple[Tensor, Tensor]:
        """``embeds`` with each image's token at its spot, and per entry the vector of the last image before it, 0
        before the first image: (batch, entries, hidden) each."""
        if images is None:
            return embeds, torch.zeros_like(embeds)
        token, vector = self.adaptor(embeds, images)
        at = images.row, images.spot[:, 0]
        # Images are ordered by row and entry, so a running maximum of image numbers gives the last image of each entry.
        number = torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device)
        number[at] = torch.arange(1, len(token) + 1, device=embeds.device)
        vectors = torch.cat([torch.zeros_like(vector[:1]), vector])[number.cummax(dim=1).values]
        return embeds.index_put(at, token), vectors


class ViSpec(MSD):
    """ViSpec drafter; see ``MSD``."""

    name = "vispec"
    network_class = ViSpecNetwork

    def reset(self, static: bool = False) -> None:
        super().reset(static)
        self._image = RowTensor(static)  # (rows, hidden), vector of each row's last image

    @property
    def parts(self) -> tuple[RowState, ...]:
        return *super().parts, self._image

    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        head = super().scoring(target)
        self._fc, self.node_inputs = self.node_inputs, self._node_inputs
        return head

    def _node_inputs(self, tokens: Tensor, predicted: Tensor, origin: Tensor | None) -> Tensor:
        return self._fc(tokens, self._with_image(predicted), origin)

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        return super().inputs(tokens, self._with_image(states))

    def _with_image(self, states: Tensor) -> Tensor:
        return self.network.with_image(states, self._image.data[: len(states), None].expand_as(states))

    def prompt_states(self, embeds: Tensor, hidden: Tensor, images: Images | None) -> tuple[Tensor, Tensor]:
        embeds, vectors = self.network.with_tokens(embeds, images)
        self._image.append(vectors[:, -1])
        return embeds, self.network.with_image(hidden, vectors)


SPEC = DrafterSpec(
    "vispec",
    "ViSpec",
    "EAGLE with one token per image, and an image vector in its text states (arXiv 2509.15235)",
    ViSpec,
    weights="required",
)
