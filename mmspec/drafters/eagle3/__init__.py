"""EAGLE-3 drafter: declaration and configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.checks import FLAG, NUMBERS, option, optional, whole
from mmspec.drafters.shape import HeadShape
from mmspec.drafters.spec import DrafterSpec, published_as
from mmspec.errors import UserError

if TYPE_CHECKING:
    from mmspec.core.target import Feature


@dataclass(frozen=True)
class Eagle3Config(HeadShape):
    """Configuration of an ``Eagle3Network``: a ``HeadShape``, and

    Attributes:
        target_size: the target's hidden size; 0 is ``hidden_size``.
        states: number of the target's hidden states that a position reads.
        reads: layers of the target whose inputs these are, 0 to the target's number of layers; empty are EAGLE's 2, L/2
            and L - 3 of L layers.
        outputs: read the outputs of these layers, as the layers return them, in place of their inputs.
        norm_before_residual: the residual of the first layer is the normed state.
        norm_before_fc: RMSNorm over all states together before their projection.
        fc_norm: RMSNorm of each of them (3.1).
        norm_output: the state of the next level is normed (3.1).
        mask_token_id: the token of all levels after the first, which are one pass (P-EAGLE, arXiv 2602.01469); None
            passes through the layers once per level.
        window: entries that one attends to, itself included; 0 is all.
        head_rank: rank of the product that retrieves candidates of the output layer (EAGLE-4); 0 is without one.
        candidates: tokens that it retrieves, which the output layer scores.
    """

    target_size: int = option(0, whole(0, 2**16))
    states: int = option(3, whole(1, 64))
    reads: list[int] = option(list, NUMBERS)
    outputs: bool = option(False, FLAG)
    norm_before_residual: bool = option(False, FLAG)
    norm_before_fc: bool = option(False, FLAG)
    fc_norm: bool = option(False, FLAG)
    norm_output: bool = option(False, FLAG)
    mask_token_id: int | None = option(None, optional(whole(0, 2**24)))
    window: int = option(0, whole(0, 2**24))
    head_rank: int = option(0, whole(0, 2**16))
    candidates: int = option(0, whole(0, 2**24))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads and (len(self.reads) != self.states or min(self.reads) < 0):
            raise UserError(f"reads must name {self.states} layers, from 0 on: got {self.reads}")
        if not self.reads and self.states != 3:
            raise UserError(f"reads must name the {self.states} layers that the drafter was trained on: got none")
        if bool(self.head_rank) != bool(self.candidates) or self.candidates > self.head:
            raise UserError(
                f"candidates must be given with head_rank only, and at most the {self.head} tokens of the head: got "
                f"{self.candidates} with head_rank {self.head_rank}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise UserError("one of norm_before_fc and fc_norm must be false: got both true")

    @property
    def source(self) -> int:
        """The target's hidden size."""
        return self.target_size or self.hidden_size

    @property
    def parallel(self) -> bool:
        """Whether all levels are one pass (P-EAGLE)."""
        return self.mask_token_id is not None

    def inputs_read(self, layers: int) -> list[int]:
        """``reads`` of a target with ``layers`` layers; by default 2, L/2 and L - 3."""
        return self.reads or sorted(min(max(layer, 0), layers) for layer in (2, layers // 2, layers - 3))

    def features(self, layers: int) -> tuple[Feature, ...]:
        """The hidden states that the network reads of a target with ``layers`` layers.

        Raises:
            UserError: the target has too few layers.
        """
        from mmspec.core.target import output_of

        reads = self.inputs_read(layers)
        if max(reads) > layers - self.outputs:
            raise UserError(
                f"the drafter reads {'outputs' if self.outputs else 'inputs'} of layers {', '.join(map(str, reads))}: "
                f"the target has {layers} layers"
            )
        if self.outputs:
            return tuple(output_of(layer) for layer in reads)
        return tuple(layer if layer < layers else output_of(layer - 1) for layer in reads)


def parse_argument(argument: str) -> tuple[str, dict[str, Any]]:
    """Split the text after ``eagle3:`` into a folder and arguments of ``Eagle3.from_checkpoint``.

    ``FOLDER@2,16,29`` reads the inputs of these layers of the target, ``FOLDER@outputs:1,15,28`` the outputs.
    """
    folder, at, layers = argument.rpartition("@")
    if not at:
        return argument, {}
    kind, _, numbers = layers.rpartition(":")
    if kind not in ("", "inputs", "outputs") or not all(number.isdecimal() for number in numbers.split(",")):
        raise UserError(f"layers to read must be as in FOLDER@2,16,29 or FOLDER@outputs:1,15,28: got @{layers}")
    return folder, {"reads": [int(number) for number in numbers.split(",")], "outputs": kind == "outputs"}


SPEC = DrafterSpec(
    "eagle3",
    "EAGLE-3",
    "EAGLE-3, EAGLE-3.1, EAGLE-4 and P-EAGLE heads, which read several layers of the target (arXiv 2503.01840)",
    "mmspec.drafters.eagle3.drafter:Eagle3",
    weights="required",
    recognises=published_as("eagle3"),
    parse_argument=parse_argument,
    train="eagle3",
)
