"""Options of commands that train drafters, without torch: the command line derives its options from their fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmspec.checks import (
    FILE,
    FLAG,
    FOLDER,
    NOT_NEGATIVE,
    OUT_FOLDER,
    POSITIVE,
    SHARE,
    TEXT,
    Checked,
    choice,
    inherited,
    inherited_optional,
    option,
    required,
    settable,
    several,
    whole,
)
from mmspec.drafters.dflash import DFlashConfig
from mmspec.drafters.eagle3 import Eagle3Config
from mmspec.drafters.kangaroo import KangarooConfig
from mmspec.drafters.medusa import MedusaConfig
from mmspec.drafters.shape import LayerShape, TreeShape
from mmspec.plugins import DEFAULT_MODEL, default_model
from mmspec.training.plan import Schedule


@dataclass(frozen=True, kw_only=True)
class RunOptions(Schedule):
    """Options that all commands have that train drafters."""

    target: str = option(
        default_model, TEXT, "Target model.", declared=("--model", "--target"), default_text=DEFAULT_MODEL
    )
    text: tuple[Path, ...] = option((), several(FILE), "Conversations without media (stage 1); repeatable.")
    data: tuple[Path, ...] = option((), several(FILE), "Conversations with images or videos; repeatable.")
    images: Path | None = option(None, settable(FOLDER), "Folder of the media; by default the folder of each file.")
    out: Path = required(OUT_FOLDER, "Folder of the run.")
    held_out: float = option(0.02, NOT_NEGATIVE, "Held-out conversations: share or number.")
    recorded: tuple[Path, ...] = option((), several(FOLDER), "Features that `make-data --record` wrote; repeatable.")
    cache: Path | None = option(None, settable(OUT_FOLDER), "Cache the target's features in this folder.")
    device: str = option("auto", TEXT, "auto, cpu or cuda.")
    dtype: str = option("auto", TEXT, "Of the target, as in `mmspec generate`.")
    epochs: float | None = option(None, settable(POSITIVE), "Or in passes over all data.", default_text="1")
    text_share: float = option(0.3, SHARE, "Share of stage 1 in the run.")
    batch: int = option(16, whole(1), "Over all processes.")
    optimiser: Literal["muon", "adamw"] = option("muon", choice("muon", "adamw"), "Trains the network.")
    rate: float | None = option(
        None, settable(POSITIVE), "Learning rate.", default_text="3e-3 with muon, 5e-5 with adamw"
    )
    precision: str = option(
        "auto",
        choice("auto", "float32", "bfloat16"),
        "Of the drafter's forward passes; auto: bfloat16 on GPUs that support it, else float32.",
    )
    threads: int = option(1, whole(1), "CPU threads.")
    prompts: int = option(8, whole(0), "Decoded per evaluation.")
    max_new_tokens: int = option(96, whole(2), "Per decoded prompt.")
    tensorboard: bool = option(False, FLAG, "Log to OUT/tensorboard too.")


@dataclass(frozen=True, kw_only=True)
class TreeOptions(RunOptions):
    """The same with what is saved with a drafter: its draft vocabulary and the limits of its trees."""

    draft_vocabulary: int | None = option(None, settable(whole(1)), "Draft so many of the most frequent tokens only.")
    top_k: int = inherited(TreeShape, "top_k", "Saved: nodes per tree level.", default=10)
    depth: int = inherited(TreeShape, "depth", "Saved: tree depth.", default=6)
    total_tokens: int = inherited(TreeShape, "total_tokens", "Saved: maximum tree nodes.", default=59)


@dataclass(frozen=True)
class Passes(Checked):
    """Settings of an objective over several passes.

    Attributes:
        loss: of tokens, as for ``token_loss``.
    """

    passes: int = option(3, whole(1), "Forward passes over a batch, each fed with the predictions before.")
    decay: float = option(0.8, POSITIVE, "Weight of a pass to the one before.")
    loss: Literal["kl", "lk", "tv"] = option(
        "kl",
        choice("kl", "lk", "tv"),
        "Token loss: cross-entropy, or mixed with the expected acceptance (LK, arXiv 2602.23881) or the total "
        "variation (DSpark, arXiv 2607.05147).",
    )


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(TreeOptions):
    """Options of drafters that read the target's hidden states; settings of the network that are None are its own."""

    start: Path | None = option(
        None,
        settable(FOLDER),
        "Initialise from this drafter: its settings, draft vocabulary and weights, unless options differ.",
    )
    heads: int | None = inherited_optional(LayerShape, "heads", "Attention heads; by default the target's.")
    kv_heads: int | None = inherited_optional(LayerShape, "kv_heads", "By default the target's.")
    head_dim: int | None = inherited_optional(LayerShape, "head_dim", "By default the target's.")
    mlp: int | None = inherited_optional(LayerShape, "mlp", "Intermediate size of the MLP; by default the target's.")


@dataclass(frozen=True, kw_only=True)
class HeadOptions(Passes, NetworkOptions):
    """The same of drafters that are trained over several passes."""


@dataclass(frozen=True)
class Eagle3Passes(Passes):
    """Settings of EAGLE-3's objective."""

    passes: int = inherited(Passes, "passes", "Levels of a tree that are trained, a forward pass each.", default=5)
    keep: float = option(
        1.0, SHARE, "Share of the chains that each further pass keeps (conditional drop-token, arXiv 2602.01469)."
    )


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(Eagle3Passes, HeadOptions):
    """Options of ``mmspec train eagle3``."""

    depth: int = inherited(TreeOptions, "depth", default=8)
    layers: int | None = inherited_optional(Eagle3Config, "layers", "Decoder layers of the head.")
    reads: list[int] | None = inherited_optional(
        Eagle3Config, "reads", "Layers of the target whose inputs the head reads; by default 2, L/2 and L-3 of L."
    )
    outputs: bool | None = inherited_optional(
        Eagle3Config,
        "outputs",
        "Read the outputs of these layers.",
        default_text="inputs",
        declared=("--outputs/--inputs",),
    )
    parallel: bool | None = option(
        None,
        settable(FLAG),
        "Draft all levels in one pass (P-EAGLE): further levels have a mask token and a learnt state.",
        default_text="one pass per level",
        declared=("--parallel/--sequential",),
    )
    norm_before_residual: bool | None = inherited_optional(
        Eagle3Config, "norm_before_residual", "The residual of the first layer is the normed state."
    )
    norm_before_fc: bool | None = inherited_optional(
        Eagle3Config, "norm_before_fc", "Norm of the states that are read, together."
    )
    fc_norm: bool | None = inherited_optional(
        Eagle3Config, "fc_norm", "Norm of each of them (EAGLE-3.1).", default_text="on, unless they are normed together"
    )
    norm_output: bool | None = inherited_optional(
        Eagle3Config, "norm_output", "Feed normed states to the next level (EAGLE-3.1).", default_text="on"
    )


@dataclass(frozen=True)
class BlockLoss(Checked):
    """Settings of DFlash's objective."""

    anchors: int = option(24, whole(1), "Blocks per conversation.")
    gamma: float = option(4.0, POSITIVE, "Slots have weights exp(-(k-1)/gamma).")
    loss: Literal["kl", "lk", "tv"] = inherited(Passes, "loss")


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(BlockLoss, NetworkOptions):
    """Options of ``mmspec train dflash``."""

    depth: int = inherited(TreeOptions, "depth", default=15)
    block_size: int | None = inherited_optional(
        DFlashConfig, "block_size", "Tokens per block, with the last one.", default_text="8"
    )
    layers: int | None = inherited_optional(DFlashConfig, "layers", "Decoder layers.", default_text="2")
    target_layer_ids: list[int] | None = inherited_optional(
        DFlashConfig,
        "target_layer_ids",
        "Layers of the target whose outputs are read; by default five, evenly spaced.",
        declared=("--reads",),
    )
    mask_token_id: int | None = inherited_optional(
        DFlashConfig, "mask_token_id", "Token that masks have; by default an unused one."
    )
    causal: list[int] | None = inherited_optional(
        DFlashConfig, "causal", "Layers without attention to later positions of a block (JetSpec)."
    )
    from_anchor: bool | None = inherited_optional(
        DFlashConfig,
        "from_anchor",
        "The last token's position predicts, too (DSpark).",
        declared=("--from-anchor/--from-masks",),
    )
    markov_rank: int | None = inherited_optional(
        DFlashConfig, "markov_rank", "Rank of the correction by the token before (DSpark); 0: none."
    )
    markov_type: Literal["vanilla", "gated", "rnn"] | None = inherited_optional(
        DFlashConfig,
        "markov_type",
        "Correct by that token alone, gated by the state, or by all tokens of the block (rnn).",
    )
    confidence: Literal["none", "state", "markov"] | None = inherited_optional(
        DFlashConfig, "confidence", "What a head of the acceptance probability reads (DSpark)."
    )
    from_target: bool = option(False, FLAG, "Start as the target's last layers, if they are like its own.")


@dataclass(frozen=True)
class HeadLoss(Checked):
    """Settings of the objective of Medusa and Hydra."""

    decay: float = inherited(Passes, "decay", "Weight of a head to the one before.")
    loss: Literal["kl", "lk", "tv"] = inherited(Passes, "loss")


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(HeadLoss, TreeOptions):
    """Options of ``mmspec train medusa``, Hydra's included."""

    heads: int = inherited(MedusaConfig, "heads", "Heads, one per drafted token.", default=4)
    layers: int = inherited(MedusaConfig, "layers", "Residual layers per head.")
    own_outputs: bool = option(
        True,
        FLAG,
        "Output layers of their own, which start as the target's.",
        declared=("--own-outputs/--shared-output",),
    )
    grounded: bool = inherited(MedusaConfig, "grounded", "Heads read the tokens before, too (Hydra).")
    prefix: bool = option(False, FLAG, "A decoder layer between the target's states and the heads (Hydra++).")


@dataclass(frozen=True)
class NextTokenLoss(Checked):
    """Settings of an objective of next tokens."""

    loss: Literal["kl", "lk", "tv"] = inherited(Passes, "loss")


@dataclass(frozen=True, kw_only=True)
class KangarooOptions(NextTokenLoss, TreeOptions):
    """Options of ``mmspec train kangaroo``."""

    exit_layer: int = inherited(KangarooConfig, "exit_layer", "The target's first layers that draft.")


@dataclass(frozen=True, kw_only=True)
class SmallOptions(NextTokenLoss, RunOptions):
    """Options of ``mmspec train small``."""

    layers: int = option(4, whole(1, 256), "Decoder layers of the draft model.")
    hidden: int | None = option(
        None,
        settable(whole(2, 2**16)),
        "Its width; embeddings start as the target's if it is the same.",
        default_text="the target's",
    )
    from_target: bool = option(False, FLAG, "Start as the target's first layers, embeddings and output layer.")
