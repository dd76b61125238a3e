"""Entries of a batch's rows: their order, their positions, and passes of layers over them and a drafter's KV cache."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec import ops
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.target import Prompt, Target, TargetOutput
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
