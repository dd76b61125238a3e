"""Tree levels of a hidden-state drafter: from passes of its layer, or of its recurrent cell in between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec import ops
from mmspec.core.budget import Budget
from mmspec.core.tree import TokenTree
from mmspec.drafters.growth import Reach
from mmspec.drafters.hidden_state.entries import allowed_slots, take
from mmspec.drafters.hidden_state.layer import Rotation
from mmspec.drafters.hidden_state.native import Native
from mmspec.ops import cpu_growth, cpu_library
from mmspec.quantisation.blocks import LANES, BlockLinear
from mmspec.quantisation.linear import PackedLinear

if TYPE_CHECKING:
    from mmspec.drafters.hidden_state.drafter import HiddenStateDrafter


_MAX_RATIO = 4  # maximum draft vocabulary of a table, in hidden sizes; larger tables cost too much memory


class TokenLinear:
    """Linear layer over [embedding of a drafted token ; x]. For a small draft vocabulary, its product with the
    embeddings is tabulated.

    Attributes:
        table: (draft tokens, out), that product and the bias; None for a large vocabulary.
        over_x: the layer over x alone, if there is a table.
    """

    def __init__(
        self, layer: nn.Linear | PackedLinear, embed: Callable[[Tensor], Tensor], draft_ids: Tensor | None
    ) -> None:
        self._layer, self._embed, self._draft_ids = layer, embed, draft_ids
        self.table: Tensor | None = None
        self.over_x: nn.Linear | PackedLinear = layer
        width = layer.weight.shape[1] // 2
        if draft_ids is not None and len(draft_ids) <= _MAX_RATIO * width:
            self.table = F.linear(embed(draft_ids), layer.weight[:, :width], layer.bias)
            weight = layer.weight[:, width:]
            # In the memory layout of the layer's weight.
            by_row = layer.weight.stride(1) == 1
            weight = weight.contiguous() if by_row else weight.t().contiguous().t()
            if isinstance(layer, PackedLinear):
                self.over_x = type(layer)(weight)
            else:
                self.over_x = nn.Linear(width, len(weight), bias=False, device="meta")
                self.over_x.weight = nn.Parameter(weight, requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenLinear:
        # Forked drafters share weights.
        return self

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """(...) int64, draft-vocabulary indices, and (..., hidden) -> (..., out)."""
        if self.table is not None:
            return self.over_x(x) + F.embedding(tokens, self.table)
        tokens = tokens if self._draft_ids is None else self._draft_ids[tokens]
        return self._layer(torch.cat([self._embed(tokens), x], dim=-1))


class NativeCell(Native):
    """A network's cell in the C++ kernels: a tree is one call.

    Args:
        norm: the cell's.
        table: that of its ``into``.
        layers: ``into.over_x``, ``cell.out``, the layer that the head's inputs come from, and the head.
    """

    def __init__(self, norm: nn.LayerNorm, table: Tensor, layers: Sequence[BlockLinear]) -> None:
        super().__init__(norm, table, layers)
        self._table = table.float().contiguous()
        self._norm = copy.deepcopy(norm).float()
        self._weights = cpu_growth.cell_weights([layer.native for layer in layers], self._table, self._norm)

    @classmethod
    def of(cls, network: Any, into: TokenLinear, head: Any) -> NativeCell | None:
        """The native form of a network's cell, if the kernels are in use and take its layers.

        Args:
            into: of ``network.cell.into``.
            head: gives the draft vocabulary's logits of predicted states.
        """
        cell, config = network.cell, network.config
        if into.table is None or config.norm_output or config.confidence or config.hidden_size % LANES:
            return None
        if not cpu_library.in_use(torch.empty(0, device=into.table.device)):
            return None
        own = (cell.narrow, cell.head) if config.rank else (cell.guess, getattr(head, "linear", None))
        layers = [layer for layer in map(BlockLinear.of, (into.over_x, cell.out, *own)) if layer is not None]
        return cls(cell.norm, into.table, layers) if len(layers) == 4 else None

    def grow(
        self,
        drafter: HiddenStateDrafter,
        token: Tensor,
        carried: Tensor,
        first: tuple[Tensor, Tensor],
        budget: Budget,
        depth: int,
    ) -> TokenTree:
        """Grow a drafter's tree; see ``grow_tree``.

        Args:
            carried: (batch, hidden), the states that the first level was drafted from.
        """
        tokens, log_probs = first
        drafted, budget.levels = cpu_growth.draft_cells(
            *(self._weights, carried.float(), (tokens, log_probs.float()), token, drafter.draft_ids),
            *(drafter.top_k, depth, budget.least_gain, min(drafter.total_tokens, budget.nodes)),
        )
        tokens, parents, log_probs = drafted
        return TokenTree(tokens, parents, log_probs=log_probs, check=False)


class TreeGrower:
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
            carried, network = take(self._carried, origin), drafter.network
            self._carried = network.cell.carry(drafter.into(beam, carried), carried)
            if network.config.rank:
                tokens, log_probs = ops.top_log_probs(network.cell.scores(self._carried), drafter.top_k)
                return drafter.adjusted(tokens, log_probs, self._predicted, self._carried)
            self._predicted = network.guess(self._carried)
        else:
            self._predicted, self._carried = self._feed()
        return drafter.children(self._predicted, self._carried)

    def _feed(self) -> tuple[Tensor, Tensor]:
        """Run the layer on the chains of tokens drafted since its last pass; predictions after their ends."""
        drafter, slots = self._drafter, self._slots
        tokens, predicted, origin = _chains(self._block)
        self._block = []
        reach = self._reach(origin)
        x, rotation = drafter.fuse(tokens, predicted), self._rotation(reach.shape[1])
        outputs = drafter.run(x, rotation, self._mask(reach), drafter.cache)
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
        """See ``allowed_slots``; without a window, all passes share the prefix part."""
        drafter = self._drafter
        if drafter.static_shapes or drafter.window:
            return allowed_slots(drafter.cache, reach, drafter.window)
        prefix = drafter.cache.length
        if self._passes == 0:
            most = drafter.top_k * self._slots
            passes = -(-drafter.depth // self._slots) - 1
            self._allowed = allowed_slots(drafter.cache, reach.new_ones(len(reach), most, most * passes))
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
