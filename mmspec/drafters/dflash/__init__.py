"""DFlash drafter: declaration and configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmspec.checks import FLAG, NUMBERS, choice, option, required, whole
from mmspec.drafters.shape import HeadShape
from mmspec.drafters.spec import DrafterSpec, published_as
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
        causal: the layers whose positions do not attend to later ones of their block (JetSpec, arXiv 2606.18394).
        from_anchor: the last token's position predicts, too: position k gives the (k+1)-th token after the last.
        markov_rank: rank of the Markov head (DSpark, arXiv 2607.05147, formula 5); 0 is none.
        markov_inputs, markov_outputs: tokens that the Markov head corrects after, and those that it corrects.
        markov_type: of the Markov head: its correction depends on the token before alone, is gated by the position's
            state, or comes from a recurrent state over the block's tokens so far (rnn).
        confidence: what the confidence head reads, the state or the Markov head's embedding beside it (formula 7).
    """

    block_size: int = required(whole(2, 64))
    mask_token_id: int = required(whole(0, 2**24))
    target_layer_ids: list[int] = required(NUMBERS)
    sliding: list[int] = option(list, NUMBERS)
    window: int = option(0, whole(0, 2**24))
    causal: list[int] = option(list, NUMBERS)
    from_anchor: bool = option(False, FLAG)
    markov_rank: int = option(0, whole(0, 2**16))
    markov_inputs: int = option(0, whole(0, 2**24))
    markov_outputs: int = option(0, whole(0, 2**24))
    markov_type: str = option("vanilla", choice("vanilla", "gated", "rnn"))
    confidence: str = option("none", choice("none", "state", "markov"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= len(self.target_layer_ids) <= 64 or min(self.target_layer_ids) < 0:
            raise UserError(
                f"target_layer_ids must name 1 to 64 layers of the target, from 0 on: got {self.target_layer_ids}"
            )
        for name, named in (("sliding", self.sliding), ("causal", self.causal)):
            if any(not 0 <= layer < self.layers for layer in named):
                raise UserError(f"{name} must name layers below {self.layers}: got {named}")
        if bool(self.sliding) != bool(self.window):
            raise UserError(f"window must be given with sliding layers only: got {self.window} for {self.sliding}")
        for tokens in (self.markov_inputs, self.markov_outputs):
            if bool(tokens) != bool(self.markov_rank):
                raise UserError(f"markov_inputs and markov_outputs must be given with markov_rank only: got {tokens}")
        if self.markov_type != "vanilla" and not self.markov_rank:
            raise UserError(f"markov_rank must be positive for a {self.markov_type} Markov head: got 0")
        if self.head and self.markov_rank and self.markov_outputs != self.head:
            raise UserError(f"markov_outputs must be the {self.head} rows of the head: got {self.markov_outputs}")
        if self.confidence == "markov" and not self.markov_rank:
            raise UserError("markov_rank must be positive for a confidence head that reads the Markov head: got 0")

    @property
    def first(self) -> int:
        """The first position of a block that predicts a token."""
        return 0 if self.from_anchor else 1

    @property
    def dspark(self) -> bool:
        """Whether the network has a head of DSpark."""
        return bool(self.markov_rank) or self.confidence != "none"

    @property
    def drafts(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - self.first

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


SPEC = DrafterSpec(
    "dflash",
    "DFlash",
    "a block of tokens in one pass, verified as a tree (arXiv 2602.06036, 2604.12989)",
    "mmspec.drafters.dflash.drafter:DFlash",
    weights="required",
    recognises=published_as("dflash"),
    train="dflash",
)
