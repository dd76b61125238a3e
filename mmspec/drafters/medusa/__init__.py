"""Medusa and Hydra drafters: declarations and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.checks import FLAG, OBJECT, Checked, option, required, whole
from mmspec.drafters.shape import RotaryShape
from mmspec.drafters.spec import DrafterSpec, published_as
from mmspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(Checked):
    """Configuration of a ``MedusaNetwork``.

    Attributes:
        hidden_size: the target's.
        heads: number of heads; head i, from 0 on, drafts the (i+1)-th token after the last one.
        layers: residual layers of each head.
        bias: whether these have a bias.
        grounded: whether a head reads the embeddings of the tokens before its own (Hydra, arXiv 2402.05109).
        head: rows of each head's output layer, the draft vocabulary; 0 is the target's output layer.
        head_bias: whether these output layers have a bias.
        prefix: fields of a ``RotaryShape``, a decoder layer that the target's states pass before the heads (Hydra++);
            empty for none.
    """

    hidden_size: int = required(whole(1, 2**16))
    heads: int = required(whole(1, 64))
    layers: int = option(1, whole(1, 64))
    bias: bool = option(True, FLAG)
    grounded: bool = option(False, FLAG)
    head: int = option(0, whole(0, 2**24))
    head_bias: bool = option(False, FLAG)
    prefix: dict = option(dict, OBJECT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer.hidden_size != self.hidden_size:
            raise UserError(f"prefix must have hidden_size {self.hidden_size}: got {self.layer.hidden_size}")

    @property
    def layer(self) -> RotaryShape:
        """Shape of the decoder layer; the least one where there is none."""
        least = {"hidden_size": self.hidden_size, "heads": 1, "kv_heads": 1, "head_dim": 2, "mlp": 1}
        return RotaryShape.read(self.prefix or least, "prefix")


MEDUSA = DrafterSpec(
    "medusa",
    "Medusa",
    "heads on the target's last state, one per token ahead, verified as a tree (arXiv 2401.10774)",
    "mmspec.drafters.medusa.drafter:Medusa",
    weights="required",
    recognises=published_as("medusa"),
    train="medusa",
)
HYDRA = DrafterSpec(
    "hydra",
    "Hydra",
    "Medusa's heads, which also read the tokens drafted before (arXiv 2402.05109)",
    "mmspec.drafters.medusa.drafter:Hydra",
    weights="required",
    recognises=published_as("hydra"),
    train="medusa --grounded",
)
