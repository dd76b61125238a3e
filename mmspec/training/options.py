"""Options of training commands; the command line is generated from their fields."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import DirectoryPath, FilePath

from mmspec.drafters.spec import LayerShape, TreeShape
from mmspec.errors import UserError
from mmspec.plugins import DEFAULT_MODEL, default_model
from mmspec.validation import Many, inherited, option, options, part, with_fields_of


@options
class Schedule:
    """Length of a training run, by one of ``steps`` and ``minutes``, which include earlier parts of a resumed run;
    learning-rate schedule, which decays linearly to zero after ``hold``; and intervals."""

    steps: int | None = option(None, "Length of the run in optimiser steps.", ge=1)
    minutes: float | None = option(None, "Or in minutes of wall clock.", gt=0)
    warmup: int = option(50, "Steps of linear warm-up.", ge=1)
    hold: float = option(0.4, "Share of the run before decay.", ge=0, le=1)
    seed: int = option(0, "Seed of the order of examples, initial weights and noise.", ge=0, le=2**22)
    checkpoint_minutes: float = option(5.0, "Between checkpoints.", ge=0)
    report_minutes: float = option(5.0, "Minutes between evaluations on held-out examples.", ge=0)


@options(kw_only=True)
class RunOptions(Schedule):
    target: str = option(default_model, "Target model.", names=("--model", "--target"), default_text=DEFAULT_MODEL)
    text: Many[FilePath] = option((), "Conversations without media (stage 1); repeatable.")
    data: Many[FilePath] = option((), "Conversations with images or videos; repeatable.")
    images: DirectoryPath | None = option(None, "Folder of the media; by default the folder of each file.")
    out: Path = option(..., "Folder of the run.")
    held_out: float = option(0.02, "Held-out conversations: share or number.", ge=0)
    recorded: Many[DirectoryPath] = option((), "Features that `make-data --record` wrote; repeatable.")
    cache: Path | None = option(None, "Cache the target's features in this folder.")
    device: str = option("auto", "auto, cpu or cuda.")
    dtype: str = option("auto", "Dtype of the target, as in `mmspec generate`.")
    epochs: float | None = option(None, "Or in passes over all data.", default_text="1", gt=0)
    text_share: float = option(0.3, "Share of stage 1 in the run.", ge=0, le=1)
    batch: int = option(16, "Over all processes.", ge=1)
    optimiser: Literal["muon", "adamw"] = option("muon", "Trains the network.")
    rate: float | None = option(None, "Learning rate.", default_text="3e-3 with muon, 5e-5 with adamw", gt=0)
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Dtype of the drafter's forward passes; auto: bfloat16 on GPUs that support it, else float32."
    )
    threads: int = option(1, "CPU threads.", ge=1)
    prompts: int = option(8, "Decoded per evaluation.", ge=0)
    max_new_tokens: int = option(96, "Per decoded prompt.", ge=2)
    tensorboard: bool = option(False, "Log to OUT/tensorboard too.")

    def __post_init__(self) -> None:
        if len(lengths := part(self, ("steps", "minutes", "epochs"))) > 1:
            raise UserError(f"give one of steps, minutes and epochs: received {lengths}")


@options(kw_only=True)
class TreeOptions(RunOptions):
    """``RunOptions`` with the draft vocabulary and tree limits to save with a drafter."""

    draft_vocabulary: int | None = option(None, "Draft only this number of most frequent tokens.", ge=1)
    top_k: int = inherited(TreeShape, "top_k", "Saved: nodes per tree level.", default=10)
    depth: int = inherited(TreeShape, "depth", "Saved: tree depth.", default=6)
    total_tokens: int = inherited(TreeShape, "total_tokens", "Saved: maximum tree nodes.", default=59)


@options
class NextTokenLoss:
    """Settings of a next-token objective."""

    loss: Literal["kl", "lk", "tv"] = option(
        "kl",
        "Token loss: cross-entropy, or mixed with the expected acceptance (LK, arXiv 2602.23881) or the total "
        "variation (DSpark, arXiv 2607.05147).",
    )


@options
class Passes(NextTokenLoss):
    """Settings of an objective over several passes."""

    passes: int = option(3, "Forward passes over a batch, each fed with the previous predictions.", ge=1)
    decay: float = option(0.8, "Weight of a pass to the one before.", gt=0)


@options(kw_only=True)
@with_fields_of(LayerShape)
class NetworkOptions(TreeOptions):
    """Options of drafters that read the target's hidden states; None keeps the network's default."""

    start: DirectoryPath | None = option(
        None, "Initialise from this drafter: its settings, draft vocabulary and weights, unless options differ."
    )
