"""Options of training commands; the command line is generated from their fields."""

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
    option,
    required,
    settable,
    several,
    whole,
    with_fields_of,
)
from mmspec.drafters.shape import LayerShape, TreeShape
from mmspec.errors import UserError
from mmspec.plugins import DEFAULT_MODEL, default_model


@dataclass(frozen=True)
class Schedule(Checked):
    """Length, learning-rate schedule and intervals of a training run.

    Attributes:
        minutes: total time, including earlier parts of a resumed run.
        hold: progress after which the learning rate decays linearly to zero.
        checkpoint_minutes: interval between checkpoints, the most that a killed run loses.
    """

    steps: int | None = option(None, settable(whole(1)), "Length of the run in optimiser steps.")
    minutes: float | None = option(None, settable(POSITIVE), "Or in minutes of wall clock.")
    warmup: int = option(50, whole(1), "Steps of linear warm-up.")
    hold: float = option(0.4, SHARE, "Share of the run before decay.")
    seed: int = option(0, whole(0, 2**22), "Seed of the order of examples, initial weights and noise.")
    checkpoint_minutes: float = option(5.0, NOT_NEGATIVE, "Between checkpoints.")
    report_minutes: float = option(5.0, NOT_NEGATIVE, "Minutes between evaluations on held-out examples.")


@dataclass(frozen=True)
class TrainingPlan(Schedule):
    """A ``Schedule`` with exactly one of ``steps`` and ``minutes``.

    Raises:
        UserError: both or neither are given, or a value is out of range.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.minutes is None):
            raise UserError(f"give one of steps and minutes: received steps={self.steps}, minutes={self.minutes}")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Schedule):
    """Options common to all training commands."""

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
    dtype: str = option("auto", TEXT, "Dtype of the target, as in `mmspec generate`.")
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
        "Dtype of the drafter's forward passes; auto: bfloat16 on GPUs that support it, else float32.",
    )
    threads: int = option(1, whole(1), "CPU threads.")
    prompts: int = option(8, whole(0), "Decoded per evaluation.")
    max_new_tokens: int = option(96, whole(2), "Per decoded prompt.")
    tensorboard: bool = option(False, FLAG, "Log to OUT/tensorboard too.")


@dataclass(frozen=True, kw_only=True)
class TreeOptions(RunOptions):
    """``RunOptions`` with the draft vocabulary and tree limits to save with a drafter."""

    draft_vocabulary: int | None = option(None, settable(whole(1)), "Draft only this number of most frequent tokens.")
    top_k: int = inherited(TreeShape, "top_k", "Saved: nodes per tree level.", default=10)
    depth: int = inherited(TreeShape, "depth", "Saved: tree depth.", default=6)
    total_tokens: int = inherited(TreeShape, "total_tokens", "Saved: maximum tree nodes.", default=59)


@dataclass(frozen=True)
class Passes(Checked):
    """Settings of an objective over several passes."""

    passes: int = option(3, whole(1), "Forward passes over a batch, each fed with the previous predictions.")
    decay: float = option(0.8, POSITIVE, "Weight of a pass to the one before.")
    loss: Literal["kl", "lk", "tv"] = option(
        "kl",
        choice("kl", "lk", "tv"),
        "Token loss: cross-entropy, or mixed with the expected acceptance (LK, arXiv 2602.23881) or the total "
        "variation (DSpark, arXiv 2607.05147).",
    )


@dataclass(frozen=True, kw_only=True)
@with_fields_of(LayerShape)
class NetworkOptions(TreeOptions):
    """Options of drafters that read the target's hidden states; None keeps the network's default."""

    start: Path | None = option(
        None,
        settable(FOLDER),
        "Initialise from this drafter: its settings, draft vocabulary and weights, unless options differ.",
    )


@dataclass(frozen=True, kw_only=True)
class HeadOptions(Passes, NetworkOptions):
    """Options of drafters that are trained over several passes."""


@dataclass(frozen=True)
class NextTokenLoss(Checked):
    """Settings of a next-token objective."""

    loss: Literal["kl", "lk", "tv"] = inherited(Passes, "loss")
