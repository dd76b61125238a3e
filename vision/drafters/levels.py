"""How a tree of a hidden-state drafter grows: some levels from passes of its layer, those between from its cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.drafters.growth import Reach
from vision.drafters.latents import take

if TYPE_CHECKING:
    from vision.drafters.msd import MSD


class Levels:
    """The levels of one tree. Each beam's states come from a pass of the layer, or from its cell where the pass that
    gave the beam's own has slots left."""

    def __init__(self, drafter: MSD, root: Tensor) -> None:
        self._drafter, self._states = drafter, root[:, None]
        self._slots = drafter.network.config.slots
        self._block: list[tuple[Tensor, Tensor, Tensor]] = []  # of each beam since the last pass: embeddings, states
        # that they were drafted from, and which entry of the beam before each descends from
        self._passes = 0
        self._reach = Reach(self._slots)
        self._allowed = torch.empty(0)

    def extend(self, beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        """See ``grow_tree``."""
        drafter = self._drafter
        embeds, states = drafter.target.embed(beam), take(self._states, origin)
        self._block.append((embeds, states, origin))
        if len(self._block) < self._slots:
            self._states = drafter.network.cell(embeds, states)
        else:
            self._states = self._feed()
        return drafter.children(self._states)

    def _feed(self) -> Tensor:
        """Pass the chains of tokens that the last pass gave through the layer; the states behind their ends."""
        drafter, slots = self._drafter, self._slots
        embeds, states, origin = _chains(self._block)
        self._block = []
        reach = self._reach(origin)
        nodes = reach.shape[1]
        x = drafter.network.combine(embeds, drafter.network.guess(states), None)
        rotation = drafter.rotation(self._passes * slots, slots, nodes // slots)
        outputs = drafter.forward(x, rotation, self._mask(reach))
        self._passes += 1
        drafter.cache.offset += nodes
        return drafter.network.begin(outputs[:, slots - 1 :: slots])

    def _mask(self, reach: Tensor) -> Tensor:
        """Of the prefix, which is the same for all passes, and ``reach``."""
        drafter = self._drafter
        prefix = drafter.cache.length
        if self._passes == 0:
            most = drafter.top_k * self._slots
            passes = -(-drafter.depth // self._slots) - 1
            self._allowed = drafter.allowed(reach.new_ones(len(reach), most, most * passes))
        mine = self._allowed[:, :, : reach.shape[1], : prefix + reach.shape[2]]
        mine[:, 0, :, prefix:] = reach
        return mine


def _chains(block: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The chain that ends in each entry of the last beam, one behind the other: embeddings and states, (batch, width *
    levels, hidden), and which entry of the beam before the block each chain descends from, (batch, width)."""
    if len(block) == 1:
        return block[0]
    embeds, states, place = [], [], None
    for embed, state, origin in reversed(block):
        embeds.append(embed if place is None else take(embed, place))
        states.append(state if place is None else take(state, place))
        place = origin if place is None else origin.gather(1, place)
    assert place is not None
    return torch.stack(embeds[::-1], dim=2).flatten(1, 2), torch.stack(states[::-1], dim=2).flatten(1, 2), place
