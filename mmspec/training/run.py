"""Runs a training command: loads target and conversations, and trains a drafter on the target's features."""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from mmspec.errors import UserError
from mmspec.loading import load
from mmspec.pipeline import Pipeline
from mmspec.progress import show_progress, show_steps
from mmspec.training import data
from mmspec.training.data import MIXED, TEXT, Conversation
from mmspec.training.features import Extractor, FeatureCache, recorded_features
from mmspec.training.options import RunOptions
from mmspec.training.tasks import DrafterTask, ExtractFeatures, TrainingTask
from mmspec.training.trainer import CHECKPOINT, DRAFTER, Trainer, train_with_progress

_log = logging.getLogger("mmspec.load")

RESUMABLE_WITH_OTHER = {"out", "threads", "cache", "recorded", "device", "tensorboard"}
RESUMABLE_WITH_OTHER |= {"checkpoint_minutes", "report_minutes"}
"""Options whose values may change when a run is resumed."""

_FITTED = 1024  # maximum number of conversations for fitting the initial weights
_KINDS = {TEXT: "text", MIXED: "data"}


def train_drafter(options: RunOptions, make_task: Callable[..., TrainingTask]) -> None:
    """Train a drafter, or resume the run in ``options.out``; ``make_task`` is ``DrafterTraining.setup``."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    accelerator = _accelerator(options)
    console = Console(stderr=True, quiet=not accelerator.is_main_process, highlight=False, soft_wrap=True)
    training, held_out = _load_conversations(options, console)
    examples = list(chain(*training.values()))
    plan = options
    if options.steps is options.minutes is None:
        plan = replace(options, steps=math.ceil((options.epochs or 1.0) * len(examples) / options.batch), epochs=None)
    with show_steps(console):
        _log.info("loading %s", options.target)
        pipe = load(options.target, None, str(accelerator.device), options.dtype, warm_up=0)
    pipe.model.requires_grad_(False)
    torch.manual_seed(options.seed)
    task = make_task(options, pipe, draft_vocabulary(getattr(options, "draft_vocabulary", None), pipe, examples))
    extractor = Extractor(pipe, layers=task.layers)
    extract = _feature_source(options, accelerator, extractor, [*examples, *held_out], console)
    if task.fit is not None and not (options.out / CHECKPOINT).exists():
        some = random.Random(options.seed).sample(examples, min(len(examples), _FITTED))
        task.fit(extract(some[start : start + 8]) for start in range(0, len(some), 8))
    work = DrafterTask(pipe, task, training, held_out, extract, options, _uses_bfloat16(options.precision, pipe.target))
    # Examples are sampled by index: a file with more conversations is another dataset.
    counts = {kind: len(found) for kind, found in training.items()} | {"held-out": len(held_out)}
    settings = _settings(options) | {"conversations": counts}
    done = train_with_progress(Trainer(options.out, plan, work, accelerator, settings), console)
    if options.tensorboard:
        accelerator.end_training()
    for reason, count in getattr(extract, "skipped", {}).items():
        console.print(f"conversations skipped {count} times: {reason}", markup=False)
    if done:
        console.print(f"drafter written to {options.out / DRAFTER}", markup=False)


def _accelerator(options: RunOptions) -> Accelerator:
    if options.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device must be auto, cpu or cuda: received {options.device!r}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: expected a GPU that torch can use, received none")
    tracker = {"log_with": "tensorboard", "project_dir": options.out} if options.tensorboard else {}
    accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision="no", **tracker)
    if options.batch < accelerator.num_processes:
        raise UserError(f"batch must be at least the {accelerator.num_processes} processes: received {options.batch}")
    if tracker:
        accelerator.init_trackers("tensorboard")
    return accelerator


def _settings(options: RunOptions) -> dict[str, Any]:
    """The options that a resumed run must repeat, as JSON values."""
    values = {name: value for name, value in vars(options).items() if name not in RESUMABLE_WITH_OTHER}
    return json.loads(json.dumps(values, default=lambda path: str(path.resolve())))


def _load_conversations(options: RunOptions, console: Console) -> tuple[dict[str, list], list[Conversation]]:
    """Read the conversations; returns training conversations by kind, and held-out conversations."""
    if not options.text and not options.data:
        raise UserError("expected conversations in --text or --data, received neither")
    found = {kind: _read(getattr(options, name), options.images, console) for kind, name in _KINDS.items()}
    if media := [conversation for conversation in found[TEXT] if conversation.media]:
        raise UserError(f"--text takes conversations without media: {media[0].id} has some; give its file as --data")
    if not found[TEXT]:
        console.print("no --text: training on --data only, without stage 1")
    elif not found[MIXED]:
        console.print("no --data: training on --text only")
    total, held = sum(map(len, found.values())), options.held_out
    share = held if held < 1 else held / total
    if share >= 1:
        raise UserError(f"held-out must leave conversations to train on: there are {total}, received {held:g}")
    parts = {kind: data.split(usable, share) for kind, usable in found.items() if usable}
    return {kind: train for kind, (train, _) in parts.items()}, [one for _, rest in parts.values() for one in rest]


def _read(paths: tuple[Path, ...], images: Path | None, console: Console) -> list[Conversation]:
    found: list[Conversation] = []
    for number, path in enumerate(paths):
        file = data.read(path, images)
        for reason, count in file.skipped.items():
            console.print(f"{path}: {count} records skipped: {reason}", markup=False)
        # Ids are unique within a file only.
        prefix = f"{number}/" if len(paths) > 1 else ""
        found += [replace(conversation, id=prefix + conversation.id) for conversation in file.conversations]
    return found


def _feature_source(
    options: RunOptions,
    accelerator: Accelerator,
    extractor: Extractor,
    conversations: list[Conversation],
    console: Console,
) -> ExtractFeatures:
    """An extractor, or with --cache a feature cache filled by all processes."""
    if options.recorded:
        if extractor.layers:
            raise UserError("--recorded holds the last hidden states: expected a drafter that reads no other layers")
        recorded = recorded_features(options.recorded, extractor.target)
        return lambda batch: (recorded if all(one in recorded for one in batch) else extractor)(batch)
    if options.cache is None:
        return extractor
    with accelerator.main_process_first():
        cache = FeatureCache(options.cache, extractor, conversations)
    with show_progress(console, "features") as show:
        cache.fill(options.batch, accelerator.process_index, accelerator.num_processes, show)
    accelerator.wait_for_everyone()
    return cache


def _uses_bfloat16(precision: str, target: Any) -> bool:
    """Whether losses are computed in bfloat16."""
    if precision == "float32" and target.dtype != torch.float32:
        raise UserError(f"precision float32 needs a target in float32: it is in {target.dtype}; give --dtype too")
    if precision != "auto":
        return precision == "bfloat16"
    fast = target.device.type == "cuda" and torch.cuda.is_bf16_supported()
    return fast or target.dtype != torch.float32


def draft_vocabulary(count: int | None, pipe: Pipeline, conversations: Iterable[Conversation]) -> Tensor | None:
    """Token ids of a draft vocabulary of ``count`` tokens, (n,) int64; None for the full vocabulary."""
    target, tokenizer = pipe.target, pipe.processor.tokenizer
    if count is None or count >= target.config.vocab_size:
        return None

    def answers() -> Iterator[Sequence[int]]:
        for conversation in conversations:
            texts = (message["content"] for message in conversation.messages if message["role"] == "assistant")
            for text, token_ids in zip(texts, conversation.answers, strict=True):
                yield token_ids or tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = frequent_tokens(answers(), count, target.eos_token_ids, target.config.vocab_size)
    return ids.to(target.device)


def frequent_tokens(answers: Iterable[Sequence[int]], count: int, always: Sequence[int], vocab: int) -> Tensor:
    """A sorted draft vocabulary of ``count`` tokens, int64: ``always``, the most frequent tokens of answers, and, to
    fill up, the lowest token ids, which the tokenizer merged first."""
    seen = Counter(token for answer in answers for token in answer)
    ranked = dict.fromkeys([*always, *(token for token, _ in seen.most_common()), *range(vocab)])
    return torch.tensor(sorted(list(ranked)[:count]), dtype=torch.long)
