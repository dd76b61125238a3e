"""EAGLE drafter: declaration and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.checks import FLAG, NUMBERS, option, whole
from mmspec.drafters.shape import LayerShape
from mmspec.drafters.spec import DrafterSpec, published_as
from mmspec.errors import UserError


@dataclass(frozen=True)
class EagleConfig(LayerShape):
    """Configuration of an ``EagleNetwork``: a ``LayerShape`` of the target's hidden size, and

    Attributes:
        input_norm: RMSNorm before the attention; used by published drafters for Qwen2-VL, but not for LLaVA.
        qkv_bias: bias on queries, keys and values.
        slots: tokens drafted per pass of the layer (FLASH); 1 is EAGLE.
        reads: layers of the target whose inputs are normed, projected and added to its last hidden state (as EAGLE-3
            reads several layers, arXiv 2503.01840).
        norm_output: RMSNorm of predicted hidden states, before the head and before they are fed back (EAGLE-3.1).
        rank: of an output layer of the cell's own for the slots after the first, in place of the target's head
            (SlimSpec, arXiv 2605.10453); 0 uses the head. A tree is then at most ``slots`` levels deep.
        head: rows of that output layer, the draft vocabulary.
        confidence: an output that predicts the target's probability of a node's drafted children together (DSpark,
            arXiv 2607.05147).
    """

    input_norm: bool = option(False, FLAG)
    qkv_bias: bool = option(False, FLAG)
    slots: int = option(1, whole(1, 64))
    reads: list[int] = option(list, NUMBERS)
    norm_output: bool = option(False, FLAG)
    rank: int = option(0, whole(0, 2**16))
    head: int = option(0, whole(0, 2**24))
    confidence: bool = option(False, FLAG)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads and min(self.reads) < 0:
            raise UserError(f"reads must name layers, from 0 on: got {self.reads}")
        if bool(self.rank) != bool(self.head):
            raise UserError(f"rank and head must both be 0 or neither: got {self.rank} and {self.head}")
        if self.rank and self.slots == 1:
            raise UserError(f"rank must be 0 with one slot per pass: got {self.rank}")


SPEC = DrafterSpec(
    "eagle",
    "EAGLE",
    "EAGLE-1 and EAGLE-2 heads, which extrapolate the target's hidden states (arXiv 2401.15077)",
    "mmspec.drafters.eagle.drafter:Eagle",
    weights="required",
    recognises=published_as("eagle"),
    train="msd --no-decoupled",
)
