"""DSpark's Markov head in the C++ kernels: a whole tree is one call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmspec.drafters.dflash.network import DFlashNetwork
from mmspec.ops import cpu_growth
from mmspec.quantisation.blocks import BlockLinear


class NativeMarkov:
    """See the module.

    Args:
        out: from a token's embedding to the draft vocabulary.
        table: (tokens, rank), embeddings of the target's tokens.
        draft_ids: (n,) int64, draft vocabulary; None is the target's.
    """

    def __init__(self, out: BlockLinear, table: Tensor, draft_ids: Tensor | None) -> None:
        self._arguments = out, table, draft_ids
        self._table, self._draft_ids = table.float().contiguous(), draft_ids
        self._weights = cpu_growth.markov_weights(out.native, self._table, draft_ids)

    @classmethod
    def of(cls, network: DFlashNetwork, draft_ids: Tensor | None) -> NativeMarkov | None:
        """The native form of a network's head; None where the kernels do not take it: it is gated or recurrent, or a
        confidence head adds to the scores."""
        config = network.config
        alone = config.markov_type == "vanilla" and config.confidence == "none"
        if not config.markov_rank or not alone or not isinstance(network.markov_out, BlockLinear):
            return None
        return cls(network.markov_out, network.markov_embed.weight.detach(), draft_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return NativeMarkov, self._arguments  # pointers belong to this process

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeMarkov:
        return self  # copies of a drafter share weights

    def __call__(self, scores: Tensor, last: Tensor, width: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``mmspec.ops.cpu_growth.draft_slots``; scores (batch, slots, draft tokens) of any dtype."""
        return cpu_growth.draft_slots(self._weights, scores.float(), last, width, nodes)
