"""Entries of a batch's rows: their order, their positions, and what those of prompts take."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.core.target import Prompt, Target, TargetOutput
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
