"""Entries of a batch's rows: their order, their positions, and passes of layers over them and a drafter's KV cache.

Entry j of a row belongs to token j, or takes token j + 1 and the target's state at token j, as the drafter defines. A
growing tree has entries of its own, after those of accepted tokens (``TreeState``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec import ops
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.drafters.growth import Reach
from mmspec.drafters.hidden_state.layer import Rotation
from mmspec.ops.transfer import on_device


def packing(kept: Tensor, left: bool) -> tuple[Tensor, Tensor]:
    """Gather indices that pack the kept entries of each row.

    Args:
        kept: (batch, entries) bool.
        left: pad shorter rows on the left, else on the right.

    Returns:
        (batch, most) int64, entry at each new position, in order; (batch, most) bool, False at padding.
    """
    most = int(kept.sum(1).max())
    order = (kept if left else ~kept).int().sort(dim=1, stable=True).indices
    order = order[:, kept.shape[1] - most :] if left else order[:, :most]
    return order, kept.gather(1, order)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Gather entries of each row: (batch, entries, hidden), (batch, taken) int64 -> (batch, taken, hidden)."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))


def causal(batch: int, width: int, device: torch.device, kept: Tensor | None = None) -> Tensor:
    """What each of ``width`` entries attends to: itself and those before, (batch, width, width) bool.

    Args:
        kept: (batch, width) bool, False at padding, which attends to itself, so that no row of the mask is empty.
    """
    reach = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
    return reach if kept is None else reach & kept[:, None] | torch.eye(width, dtype=torch.bool, device=device)


def counted_positions(prompt: Prompt) -> tuple[Tensor | slice, Tensor]:
    """Positions that count a prompt's tokens, (batch, length) int64 or a slice, and those of the next tokens, (batch,)
    int64."""
    batch, length = prompt.input_ids.shape
    if prompt.attention_mask is None:
        return slice(0, length), torch.full((batch,), length, device=prompt.input_ids.device)
    mask = prompt.attention_mask.bool().long()
    return (mask.cumsum(1) - 1).clamp(min=0), mask.sum(1)


def axis_positions(prompt: Prompt, output: TargetOutput) -> tuple[Tensor, Tensor] | None:
    """The target's positions of a prompt's tokens, (3, batch, length) int64, and those of the next tokens, (batch,)
    int64; None if it has a single axis."""
    if output.positions is None or output.positions.ndim < 3:
        return None
    axes = output.positions[-3:].expand(3, *prompt.input_ids.shape)  # in front of them, a fourth axis counts tokens
    return axes, axes.amax((0, 2)) + 1


def last_tokens(history: list[list[int]], device: torch.device) -> Tensor:
    """The last token of each row, (batch, 1) int64."""
    return on_device([[row[-1]] for row in history], device)


def following_embeds(target: Target, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> Tensor:
    """The target's input embeddings, those of images and videos included, of the tokens after each of a prompt's,
    (batch, length, hidden); arguments as for ``Drafter.begin``."""
    fed = target.embed(prompt.input_ids) if output.embeds is None else output.embeds  # None for text
    return torch.cat([fed[:, 1:], target.embed(last_tokens(history, fed.device))], dim=1)


def allowed_slots(cache: TreeCache, reach: Tensor, window: int = 0) -> Tensor:
    """Attention mask, (batch, 1, nodes, slots) bool: ``reach``, after the prefix unless shapes are static.

    Args:
        reach: (batch, nodes, new) bool, the new entries that each node attends to, itself included.
        window: see ``HiddenStateDrafter.window``.
    """
    if cache.static_shapes:
        return reach[:, None]
    batch, nodes = reach.shape[:2]
    prefix = cache.attended[:, None, :] if cache.padded else reach.new_ones(1, 1, 1)
    if window:
        lengths = torch.tensor(cache.lengths, device=reach.device)[:, None, None]
        at = lengths + _depth(reach)[..., None]
        prefix = prefix & (at - torch.arange(cache.length, device=reach.device) < window)
    return torch.cat([prefix.expand(batch, nodes, cache.length), reach], dim=-1)[:, None]


def _depth(reach: Tensor) -> Tensor:
    """(batch, nodes) int64, entries between each node and the prefix: those that it attends to, but itself."""
    return reach.sum(-1) - 1


def attention(
    qkv: tuple[Tensor, Tensor, Tensor], cache: TreeCache, layer: int, allowed: Tensor | None, window: int, depth: Any
) -> Tensor:
    """Write the keys and values of new entries, and attend to them and the cache: (batch, heads, nodes, head_dim).

    Args:
        qkv: queries, keys and values of new entries, (batch, heads or kv_heads, nodes, head_dim) each.
        allowed, window: see ``run``.
        depth: (batch, nodes) int64, entries between each node and the prefix; None are those that a node attends to.
    """
    (q, k, v), entry = qkv, cast(Any, cache.layers[layer])
    keys, values = entry.update(k, v)
    if not cache.static_shapes:
        return F.scaled_dot_product_attention(q, keys, values, allowed, is_causal=allowed is None, enable_gqa=True)
    assert cache.bounds is not None
    assert allowed is not None
    bounds, reach = cache.bounds.first(len(q)), allowed[:, 0]
    slides: dict[str, Any] = {}
    if window:
        slides = {"depth": _depth(reach) if depth is None else depth, "window": window}
    return ops.tree_attention(q, keys, values, bounds.lengths, reach, start=bounds.start, **slides).transpose(1, 2)


def run(
    network: Any, x: Tensor, rotation: Rotation, allowed: Tensor | None, cache: TreeCache, window: int = 0
) -> Tensor:
    """Run a network on new entries and write them to the cache.

    Args:
        network: takes inputs, rotation and attention.
        x: (batch, nodes, any), inputs.
        allowed: attention mask, see ``allowed_slots``; None for a prompt without padding.
        window: of static shapes, whose mask has no prefix; see ``HiddenStateDrafter.window``.

    Returns:
        The network's outputs, (batch, nodes, any).
    """
    if cache.static_shapes:
        cache.set_write_slots(x.shape[1])

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
        return attention((q, k, v), cache, layer, allowed, window, None)

    return network(x, rotation, attend)


class TreeState:
    """State of one growing tree: predictions of its last level, and its entries in a drafter's cache.

    A node has a chain of ``slots`` entries, of the tokens drafted since the pass before. They follow the entries of
    accepted tokens, and ``end`` drops them.

    Args:
        cache: the drafter's.
        rotation: returns the rotation of the next positions of each row, (batch, positions, 1, head_dim) each.
        width: maximum number of nodes of a level.
        passes: maximum number of passes.
        slots: entries per node.
        window: see ``HiddenStateDrafter.window``.

    Attributes:
        predicted, carried: (batch, nodes, hidden), of the last level: states that predict its children, and states of
            the recurrent cell between slots; set by the drafter.
        block: of each level since the last pass: its tokens, the states that predicted them, and the node of the level
            before that each was drafted from.
    """

    predicted: Tensor
    carried: Tensor

    def __init__(
        self,
        cache: TreeCache,
        rotation: Callable[[], Rotation],
        width: int,
        passes: int,
        slots: int = 1,
        window: int = 0,
    ) -> None:
        self._cache, self._rotation, self._slots, self._window = cache, rotation, slots, window
        self._most = width * slots, width * slots * passes
        self._reach, self._passes = Reach(slots), 0
        self.block: list[tuple[Tensor, Tensor, Tensor]] = []
        cache.offset = 0

    def run(self, layers: Callable[..., Tensor], x: Tensor, origin: Tensor) -> Tensor:
        """Run layers on the entries of the next level, (batch, width * slots, any).

        Args:
            layers: called with inputs, rotation, attention mask and cache; see ``run``.
            origin: (batch, width) int64, the node of the pass before that each node descends from.
        """
        reach = self._reach(origin)
        outputs = layers(x, self._turned(origin.shape[1]), self._mask(reach), self._cache)
        self._passes += 1
        self._cache.offset += x.shape[1]
        return outputs

    def end(self) -> None:
        """Drop the tree's entries."""
        self._cache.offset = 0

    def chains(self) -> tuple[Tensor, Tensor, Tensor]:
        """Take ``block``: the chains that end in the nodes of its last level, concatenated.

        Returns:
            Tokens, (batch, width * levels); predicted states, (batch, width * levels, hidden); the node of the level
            before the block that each chain descends from, (batch, width).
        """
        block, self.block = self.block, []
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

    def _turned(self, width: int) -> Rotation:
        """Rotation of the next chains, which start at the same position within a row."""
        if self._passes == 0:
            self._rotations = self._rotation()
        begin = self._passes * self._slots
        cos, sin = (x[:, begin : begin + self._slots] for x in self._rotations)
        if self._slots == 1:
            return cos, sin  # broadcast
        return cos.repeat(1, width, 1, 1), sin.repeat(1, width, 1, 1)

    def _mask(self, reach: Tensor) -> Tensor:
        """See ``allowed_slots``; without a window, all passes share the prefix part."""
        if self._cache.static_shapes or self._window:
            return allowed_slots(self._cache, reach, self._window)
        if self._passes == 0:
            self._allowed = allowed_slots(self._cache, reach.new_ones(len(reach), *self._most))
        prefix = self._cache.length
        mine = self._allowed[:, :, : reach.shape[1], : prefix + reach.shape[2]]
        mine[:, 0, :, prefix:] = reach
        return mine
