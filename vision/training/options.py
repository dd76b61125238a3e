"""Options of ``mmspec train msd`` and ``mmspec train flash``; see ``mmspec.training.options``."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.checks import FLAG, NOT_NEGATIVE, POSITIVE, SHARE, inherited, inherited_optional, option, whole
from mmspec.training.options import HeadOptions, Passes, TreeOptions
from mmspec.vision.drafters.msd import MSDConfig


@dataclass(frozen=True)
class Losses(Passes):
    """Settings of MSD's objective.

    Attributes:
        hidden_weight, token_weight: of the smooth L1 distance to the target's hidden state, and of the cross-entropy
            with its next-token distribution. The papers of MSD and EAGLE weight the two 1 and 0.1.
        noise: amplitude of uniform noise, times 512 / length, on the hidden states of the first pass.
    """

    hidden_weight: float = option(0.1, NOT_NEGATIVE, "Weight of the hidden-state loss.")
    token_weight: float = option(1.0, NOT_NEGATIVE, "Weight of the token loss.")
    noise: float = option(0.1, NOT_NEGATIVE, "Noise on the input hidden states.")


@dataclass(frozen=True)
class SlotLosses(Losses):
    """Settings of FLASH's objective.

    Attributes:
        glancing: predictions are replaced by the target's states before the next pass (Falcon, arXiv 2412.12639,
            replaces tokens: here the tokens of a block are the true ones anyway).
    """

    slot_decay: float = option(1.0, POSITIVE, "Weight of a slot to the one before.")
    glancing: float = option(0.0, SHARE, "Share of wrong predictions replaced by the truth, decaying to 0.")


@dataclass(frozen=True, kw_only=True)
class MSDOptions(Losses, HeadOptions):
    """Options of ``mmspec train msd``."""

    fit: bool = option(
        False,
        FLAG,
        "Initialise by ridge regression of the target's hidden states, unless with --start: for little data.",
    )
    decoupled: bool | None = inherited_optional(MSDConfig, "decoupled", "Off: plain EAGLE.")
    visual_states: bool | None = inherited_optional(
        MSDConfig, "visual_states", "Visual positions take the target's hidden states too, by their own projection."
    )
    hide_visual: bool | None = inherited_optional(MSDConfig, "hide_visual", "Visual positions are not read at all.")
    reads: list[int] | None = inherited_optional(
        MSDConfig, "reads", "Also read the inputs of these layers of the target.", default_text="none"
    )
    norm_output: bool | None = inherited_optional(MSDConfig, "norm_output", "Norm of predicted hidden states.")
    confidence: bool | None = inherited_optional(
        MSDConfig, "confidence", "Predict the target's probability of a node's children together."
    )


@dataclass(frozen=True, kw_only=True)
class FlashOptions(SlotLosses, MSDOptions):
    """Options of ``mmspec train flash``. Trees come from one pass; MSD's are wider and take a pass per level."""

    passes: int = inherited(Passes, "passes", default=1)
    top_k: int = inherited(TreeOptions, "top_k", default=4)
    depth: int = inherited(TreeOptions, "depth", default=12)
    slots: int = inherited(MSDConfig, "slots", "Tokens per forward pass; 1 as in MSD.", default=12)
    latents: int | None = inherited_optional(
        MSDConfig, "latents", "Latents per image; 0 keeps all visual tokens, as in MSD.", default_text="by --ratio"
    )
    ratio: float = option(9.0, POSITIVE, "Or visual tokens per latent.")
    span: int | None = inherited_optional(
        MSDConfig,
        "span",
        "Visual tokens per image; longer runs are split.",
        default_text="that of the target's configuration, or 256",
        rule=whole(1, 2**20),
    )
    rank: int | None = inherited_optional(
        MSDConfig, "rank", "Rank of an output layer of their own for the slots after the first; 0: the target's head."
    )
