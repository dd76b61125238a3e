"""Tree levels of a hidden-state drafter: from passes of its layer, or of its recurrent cell in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.growth import Reach
from mmspec.quantisation.linear import PackedLinear
from vision.drafters.latents import take
from vision.drafters.layer import Rotation

if TYPE_CHECKING:
    from vision.drafters.hidden_state import HiddenStateDrafter


_MAX_RATIO = 4  # maximum draft vocabulary of a table, in hidden sizes; larger tables cost too much memory


class TokenLinear:
    """Linear layer over [embedding of a drafted token ; x]. For a small draft vocabulary, its product with the
    embeddings is tabulated."""

    def __init__(
        self, layer: nn.Linear | PackedLinear, embed: Callable[[Tensor], Tensor], draft_ids: Tensor | None
    ) -> None:
        self._layer, self._embed, self._draft_ids = layer, embed, draft_ids
        self._table: Tensor | None = None
        width = layer.weight.shape[1] // 2
        if draft_ids is not None and len(draft_ids) <= _MAX_RATIO * width:
            self._table = F.linear(embed(draft_ids), layer.weight[:, :width], layer.bias)
            weight = layer.weight[:, width:]
            # In the memory layout of the layer's weight.
            by_row = layer.weight.stride(1) == 1
            weight = weight.contiguous() if by_row else weight.t().contiguous().t()
            if isinstance(layer, PackedLinear):
                self._product: Callable[[Tensor], Tensor] = type(layer)(weight)
            else:
                self._product = partial(F.linear, weight=weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenLinear:
        # Forked drafters share weights.
        return self

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """(...) int64, draft-vocabulary indices, and (..., hidden) -> (..., out)."""
        if self._table is not None:
            return self._product(x) + F.embedding(tokens, self._table)
        tokens = tokens if self._draft_ids is None else self._draft_ids[tokens]
        return self._layer(torch.cat([self._embed(tokens), x], dim=-1))


class Levels:
    """Levels of one tree. A beam's predictions come from the cell while the last pass of the layer has slots left,
    else from a new pass. Tokens are draft-vocabulary indices."""

    def __init__(self, drafter: HiddenStateDrafter, predicted: Tensor, carried: Tensor) -> None:
        self._drafter, self._predicted, self._carried = drafter, predicted[:, None], carried[:, None]
        self._slots = drafter.slots
        self._block: list[tuple[Tensor, Tensor, Tensor]] = []  # of each beam since the last pass: its tokens, the
        # states that predicted it, and the entry of those that each token was drafted from
        self._passes = 0
        self._reach = Reach(self._slots)
        self._allowed = torch.empty(0)

    def extend(self, beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        """See ``grow_tree``."""
        drafter = self._drafter
        self._block.append((beam, self._predicted, origin))
        if len(self._block) < self._slots:
            carried, cell = take(self._carried, origin), drafter.network.cell
            self._carried = cell.carry(drafter.into(beam, carried), carried)
            self._predicted = cell.guess(self._carried)
        else:
            self._predicted, self._carried = self._feed()
        return drafter.children(self._predicted)

    def _feed(self) -> tuple[Tensor, Tensor]:
        """Run the layer on the chains of tokens drafted since its last pass; predictions after their ends."""
        drafter, slots = self._drafter, self._slots
        tokens, predicted, origin = _chains(self._block)
        self._block = []
        reach = self._reach(origin)
        x, rotation = drafter.fuse(tokens, predicted), self._rotation(reach.shape[1])
        outputs = drafter.forward(x, rotation, self._mask(reach), drafter.cache)
        self._passes += 1
        drafter.cache.offset += reach.shape[1]
        return drafter.network.begin(outputs[:, slots - 1 :: slots])

    def _rotation(self, nodes: int) -> Rotation:
        """Rotation of the next pass's chains, which start at the same position within a row."""
        if self._passes == 0:
            self._rotations = self._drafter.rotation(len(self._predicted), self._drafter.depth)
        begin = self._passes * self._slots
        cos, sin = (x[:, begin : begin + self._slots] for x in self._rotations)
        if self._slots == 1:
            return cos, sin  # broadcast
        chains = nodes // self._slots
        return cos.repeat(1, chains, 1, 1), sin.repeat(1, chains, 1, 1)

    def _mask(self, reach: Tensor) -> Tensor:
        """See ``HiddenStateDrafter.allowed``; all passes share the prefix part."""
        drafter = self._drafter
        if drafter.static:
            return drafter.allowed(reach)
        prefix = drafter.cache.length
        if self._passes == 0:
            most = drafter.top_k * self._slots
            passes = -(-drafter.depth // self._slots) - 1
            self._allowed = drafter.allowed(reach.new_ones(len(reach), most, most * passes))
        mine = self._allowed[:, :, : reach.shape[1], : prefix + reach.shape[2]]
        mine[:, 0, :, prefix:] = reach
        return mine


def _chains(block: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Chains that end in the entries of the last beam, concatenated.

    Returns:
        Tokens, (batch, width * levels); predicted states, (batch, width * levels, hidden); the entry of the beam before
        the block that each chain descends from, (batch, width).
    """
    if len(block) == 1:
        tokens, predicted, origin = block[0]
        return tokens, take(predicted, origin), origin
    chains, states, place = [], [], None
    for tokens, predicted, origin in reversed(block):
        chains.append(tokens if place is None else tokens.gather(1, place))
        place = origin if place is None else origin.gather(1, place)
        states.append(take(predicted, place))
    assert place is not None
    return torch.stack(chains[::-1], dim=2).flatten(1), torch.stack(states[::-1], dim=2).flatten(1, 2), place
