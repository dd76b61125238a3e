"""The run of a drafter's training command: target, conversations, trainer; what is trained is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from mmspec.distil import data
from mmspec.distil.data import Conversation
from mmspec.distil.features import Extractor, FeatureCache
from mmspec.distil.options import FREE
from mmspec.distil.tasks import DrafterTask, Extract, frequent
from mmspec.errors import UserError
from mmspec.pipeline import load
from mmspec.training.order import MIXED, TEXT
from mmspec.training.plan import Plan
from mmspec.training.stopping import stoppable
from mmspec.training.trainer import DRAFTER, Trainer

RATES = {"muon": 3e-3, "adamw": 5e-5}
"""Default learning rates; AdamW's is that of arXiv 2505.14260."""


MakeTask = Callable[[Mapping[str, Any], Any, dict[str, list[Conversation]], list[Conversation], Extract], DrafterTask]
"""From options, target, conversations to train on by kind, conversations held out, and what gives their features."""


def train(options: Mapping[str, Any], make_task: MakeTask) -> None:
    """Trains as options say, those of `mmspec.distil.options` among them, or goes on where `--out` was left."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    plan = _plan(options)
    accelerator = _accelerator(options)
    console = Console(stderr=True, quiet=not accelerator.is_main_process, highlight=False, soft_wrap=True)
    training, held_out = _conversations(options, console)
    target = load(options["target"], None, str(accelerator.device), options["dtype"]).target
    target.model.requires_grad_(False)
    extract = _extract(options, accelerator, target, [*chain(*training.values()), *held_out], console)
    task = make_task(options, target, training, held_out, extract)
    # A file that has grown is other data: places in it are not what they were.
    counts = {kind: len(found) for kind, found in training.items()} | {"held-out": len(held_out)}
    settings = _settings(options) | {"conversations": counts}
    with _bar(console) as notify, stoppable() as stopped:
        trainer = Trainer(options["out"], plan, task, accelerator, settings, notify)
        trainer.train(stopped)
    if options["tensorboard"]:
        accelerator.end_training()
    for reason, count in getattr(extract, "skipped", {}).items():
        console.print(f"{count} times a conversation was left out: {reason}", markup=False)
    ended = f"the drafter lies in {options['out'] / DRAFTER}"
    left = f"stopped at step {trainer.step}; the same command goes on from here"
    console.print(ended if trainer.done else left, markup=False)


def _accelerator(options: Mapping[str, Any]) -> Accelerator:
    if options["device"] not in ("auto", "cpu", "cuda"):
        raise UserError(f"device must be auto, cpu or cuda: received {options['device']!r}")
    if options["device"] == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: expected a GPU that torch can use, received none")
    tracker = {"log_with": "tensorboard", "project_dir": options["out"]} if options["tensorboard"] else {}
    accelerator = Accelerator(cpu=options["device"] == "cpu", mixed_precision="no", **tracker)
    if tracker:
        accelerator.init_trackers("tensorboard")
    return accelerator


def _plan(options: Mapping[str, Any]) -> Plan:
    chosen = {field.name: options[field.name] for field in fields(Plan)}
    if all(chosen[name] is None for name in ("steps", "minutes", "epochs")):
        chosen["epochs"] = 1.0
    chosen["rate"] = chosen["rate"] or RATES[chosen["optimiser"]]
    return Plan(**chosen)


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the run what it is, as JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value.resolve())
        return [plain(one) for one in value] if isinstance(value, tuple) else value

    return {name: plain(value) for name, value in options.items() if name not in FREE}


def _conversations(options: Mapping[str, Any], console: Console) -> tuple[dict[str, list], list[Conversation]]:
    """Conversations to train on, by kind, and those held out."""
    if not options["text"] and not options["data"]:
        raise UserError("expected conversations in --text or --data, received neither")
    found = {kind: _read(options[name], options["images"], console) for kind, name in _KINDS.items()}
    if media := [conversation for conversation in found[TEXT] if conversation.media]:
        raise UserError(f"--text takes conversations without media: {media[0].id} has some; give its file as --data")
    if not found[TEXT]:
        console.print("no --text: stage 1 is left out, all training is on --data")
    elif not found[MIXED]:
        console.print("no --data: all training is on --text")
    total, held = sum(map(len, found.values())), options["held_out"]
    share = held if held < 1 else held / total
    if share >= 1:
        raise UserError(f"held-out must leave conversations to train on: there are {total}, received {held:g}")
    parts = {kind: data.split(usable, share) for kind, usable in found.items() if usable}
    return {kind: train for kind, (train, _) in parts.items()}, [one for _, rest in parts.values() for one in rest]


_KINDS = {TEXT: "text", MIXED: "data"}


def _read(paths: tuple[Path, ...], images: Path | None, console: Console) -> list[Conversation]:
    found: list[Conversation] = []
    for number, path in enumerate(paths):
        file = data.read(path, images)
        for reason, count in file.skipped.items():
            console.print(f"{path}: {count} records passed over: {reason}", markup=False)
        # Ids are unique in a file; two files may both count from 1.
        prefix = f"{number}/" if len(paths) > 1 else ""
        found += [replace(conversation, id=prefix + conversation.id) for conversation in file.conversations]
    return found


def _extract(
    options: Mapping[str, Any],
    accelerator: Accelerator,
    target: Any,
    usable: list[Conversation],
    console: Console,
) -> Extract:
    """What gives features: the target itself, or a cache that all processes fill together first."""
    extractor = Extractor(target)
    if options["cache"] is None:
        return extractor
    with accelerator.main_process_first():
        cache = FeatureCache(options["cache"], extractor, usable)
    with Progress(console=console, disable=console.quiet) as bar:
        task = bar.add_task("features", total=None)
        show = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        cache.fill(options["batch"], accelerator.process_index, accelerator.num_processes, show)
    accelerator.wait_for_everyone()
    return cache


def in_bfloat16(precision: str, target: Any) -> bool:
    """Whether losses are computed in bfloat16."""
    if precision == "float32" and target.model.dtype != torch.float32:
        raise UserError(f"precision float32 needs a target in float32: it is in {target.model.dtype}; give --dtype too")
    if precision != "auto":
        return precision == "bfloat16"
    fast = target.device.type == "cuda" and torch.cuda.is_bf16_supported()
    return fast or target.model.dtype != torch.float32


def draft_vocabulary(count: int | None, target: Any, usable: Iterable[Conversation]) -> Tensor | None:
    """The tokens of a reduced draft vocabulary, (n,) int64; None for all."""
    if count is None or count >= target.config.vocab_size:
        return None
    tokenizer = target.tokenizer

    def answers() -> Iterator[Sequence[int]]:
        for conversation in usable:
            said = (message["content"] for message in conversation.messages if message["role"] == "assistant")
            for text, token_ids in zip(said, conversation.answers, strict=True):
                yield token_ids or tokenizer(text, add_special_tokens=False)["input_ids"]

    return frequent(answers(), count, target.eos_token_ids).to(target.device)


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A progress bar; what it gives takes the rows of the log."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=console.quiet) as bar:
        task = bar.add_task("training", total=1.0, figures="")
        shown: dict[str, str] = {}

        def notify(row: dict[str, Any]) -> None:
            if "stage" in row:
                shown["stage"] = f"stage {row['stage']}"
            if row["event"] == "train":
                shown["loss"] = f"loss {row['loss']:.3f}"
            if "mean_acceptance_length" in row:
                shown["acceptance"] = f"acceptance {row['mean_acceptance_length']:.2f}"
            figures = " ".join([f"step {row['step']}", *shown.values()])
            bar.update(task, completed=row["progress"], figures=figures)

        yield notify
