"""Configuration of DFlash's network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmspec.checks import NUMBERS, option, required, whole
from mmspec.drafters.shape import HeadShape
from mmspec.errors import UserError

if TYPE_CHECKING:
    from mmspec.core.target import Feature


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadShape):
    """Configuration of a ``DFlashNetwork``: a ``HeadShape``, and

    Attributes:
        block_size: positions of a block, the last token included.
        mask_token_id: token of the target whose embedding all other positions have.
        target_layer_ids: layers of the target whose outputs the context consists of.
        sliding: the layers that attend to the last ``window`` tokens only.
        window: largest distance of positions that such a layer attends to; 0 without any.
    """

    block_size: int = required(whole(2, 64))
    mask_token_id: int = required(whole(0, 2**24))
    target_layer_ids: list[int] = required(NUMBERS)
    sliding: list[int] = option(list, NUMBERS)
    window: int = option(0, whole(0, 2**24))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= len(self.target_layer_ids) <= 64 or min(self.target_layer_ids) < 0:
            raise UserError(
                f"target_layer_ids must name 1 to 64 layers of the target, from 0 on: got {self.target_layer_ids}"
            )
        if any(not 0 <= layer < self.layers for layer in self.sliding):
            raise UserError(f"sliding must name layers below {self.layers}: got {self.sliding}")
        if bool(self.sliding) != bool(self.window):
            raise UserError(f"window must be given with sliding layers only: got {self.window} for {self.sliding}")

    def features(self, layers: int) -> tuple[Feature, ...]:
        """The hidden states that the network reads of a target with ``layers`` layers, whose last output is normed.

        Raises:
            UserError: the target has too few layers.
        """
        from mmspec.core.target import output_of

        if max(self.target_layer_ids) >= layers:
            read = ", ".join(map(str, self.target_layer_ids))
            raise UserError(f"the drafter reads outputs of layers {read}: the target has {layers} layers")
        return tuple("last" if layer == layers - 1 else output_of(layer) for layer in self.target_layer_ids)


def default_layer_ids(layers: int) -> list[int]:
    """Layers that a drafter reads of a target with ``layers`` layers: five, evenly spaced, or those that it has."""
    first, last = (1, layers - 3) if layers > 4 else (0, layers - 1)
    return sorted({round(first + (last - first) * step / 4) for step in range(5)})
