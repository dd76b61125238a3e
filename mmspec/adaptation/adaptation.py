"""Online adaptation of drafters: trains a copy of the weights while the engine is idle, and swaps it in later.

Training data are the target's hidden states, recorded during decoding. The table of Token Recycling learns while it
drafts; adaptation only saves it to disk.
"""

from __future__ import annotations

import copy
import random
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmspec import plugins
from mmspec.adaptation import AdaptOptions
from mmspec.core.drafter import Drafter, Wrapper
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters import checkpoint
from mmspec.drafters.captured import TrainedDrafter
from mmspec.drafters.layer import take
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.registry import drafter_spec, registered_name
from mmspec.drafters.union import Union
from mmspec.errors import UserError
from mmspec.files import make_folder
from mmspec.targets.transformers_target import sharded

_TABLE = 16 << 20  # maximum bytes of a full table
_WAITING = 64  # maximum finished sequences in the queue; further sequences are not recorded
_LONGEST = 4096  # maximum tokens of a recorded prompt


@dataclass(frozen=True)
class RecordedAnswer:
    """A finished sequence: tokens of prompt and answer, (length,) int64 on the host; the target's ``features`` that the
    drafter reads, (length, hidden) each; ``visual``, (length,) bool, the positions of image and video features; and
    ``shown``, (visual positions, hidden), the input embeddings at these positions."""

    tokens: Tensor
    prompt: int
    features: dict[Feature, Tensor]
    visual: Tensor
    shown: Tensor

    @property
    def size(self) -> int:
        """Bytes of the hidden states."""
        return sum(x.numel() * x.element_size() for x in (*self.features.values(), self.shown))


@dataclass
class Recording:
    """A sequence: states of its ``passes`` while it runs and its ``answer`` afterwards, None if not recorded; number of
    ``tokens`` emitted by draft ``steps``; ``length`` of the history after the last step."""

    history: list[int]
    prompt: int
    passes: list[dict[Feature, Tensor]] | None
    visual: Tensor | None = None
    shown: Tensor | None = None
    tokens: int = 0
    steps: int = 0
    length: int = 0
    answer: RecordedAnswer | None = None

    def finish(self) -> None:
        """Set ``answer``, and drop the passes."""
        if not self.passes:
            return
        features = {name: torch.cat([one[name] for one in self.passes]) for name in self.passes[0]}
        length = min(len(next(iter(features.values()))), len(self.history))  # tokens after a stop are dropped
        visual, shown = torch.zeros(length, dtype=torch.bool), next(iter(features.values()))[:0]
        if self.visual is not None and self.shown is not None:
            visual[: self.prompt], shown = self.visual.cpu(), self.shown
        tokens = torch.tensor(self.history[:length], dtype=torch.long)
        features = {name: x[:length] for name, x in features.items()}
        self.answer, self.passes = RecordedAnswer(tokens, self.prompt, features, visual, shown), None


@dataclass(eq=False)
class RecordedDrafter(Wrapper):
    """Records the sequences of a trained drafter: ``ended`` queues finished sequences for the learner. ``fresh``
    replaces the drafter before the next sequence when none is running. Copies do not record."""

    drafter: TrainedDrafter
    ended: list[Recording] = field(default_factory=list)
    fresh: TrainedDrafter | None = None
    _rows: list[Recording] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Drafter:
        return copy.deepcopy(self.drafter, memo)

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        if self.fresh is not None and not self._rows:
            self.drafter, self.fresh = self.fresh, None
            assert self._target is not None
            self.drafter.attach(self._target)
        self.drafter.begin(prompt, output, history)
        length = prompt.input_ids.shape[1]
        recorded = len(self.ended) < _WAITING and length <= _LONGEST
        for number, tokens in enumerate(history):
            own = slice(length + 1 - len(tokens), None)  # without padding
            row = Recording(tokens, len(tokens) - 1, None, length=len(tokens))
            if recorded:
                row.passes = [{name: output.features[name][number, own].clone() for name in self.features}]
                if output.visual is not None and output.embeds is not None:
                    row.visual = output.visual[number, own].clone()
                    row.shown = output.embeds[number, own][row.visual].clone()
            self._rows.append(row)

    def select(self, rows: Sequence[int]) -> None:
        self.drafter.select(rows)
        kept = set(rows)
        for number, row in enumerate(self._rows):
            if number not in kept:
                row.finish()
                self.ended.append(row)
        self._rows = [self._rows[row] for row in rows]

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        self.drafter.observe(tree, verdict, output)
        states = {name: take(output.features[name], verdict.path.clamp(min=0)) for name in self.features}
        for number, (row, (accepted, _)) in enumerate(zip(self._rows, verdict.host, strict=True)):
            emitted, row.length = len(row.history) - row.length, len(row.history)  # at a stop, fewer than accepted
            if tree.nodes > 1:
                row.tokens += emitted
                row.steps += 1
            if row.passes is not None:
                row.passes.append({name: x[number, : len(accepted)] for name, x in states.items()})


REQUESTS = 16
"""Number of requests to compare before and after a replacement."""


_EARLIER = 7  # replayed answers per new answer
_BUFFER = 1 << 27  # maximum bytes of the replay buffer


class Learner(Protocol):
    """Interface of plug-ins of the group ``adapt``, by drafter name: train a copy of a drafter's network."""

    def learn(self, answer: RecordedAnswer) -> None:
        """Accumulate gradients of an answer, and take a training step after the last answer of a batch."""

    def weights(self) -> nn.Module:
        """A copy of the network."""

    def restart(self, network: nn.Module) -> None:
        """Continue from these weights."""


class HeadAdaptation:
    """Adaptation of one trained, unattached drafter with an unpacked network.

    Learned weights replace the drafter's weights after every ``REQUESTS`` requests, while the engine is idle. If
    acceptance falls over the next ``REQUESTS`` requests, the replacement is rolled back.
    """

    def __init__(self, drafter: TrainedDrafter, target: Target, store: Store | None) -> None:
        make: Any = plugins.find("adapt", drafter.name)
        self._learner: Learner = make(drafter, target)
        self.drafter = RecordedDrafter(drafter)
        self._target, self._store = target, store
        self._current = self._former = self._learner.weights()
        self._proven = True  # the current weights were compared and are not worse
        self._before, self._since = list[float](), list[float]()  # acceptance lengths around the last replacement
        self._buffer, self._queue = deque[RecordedAnswer](), deque[RecordedAnswer]()  # answers to replay, and to learn
        self._random = random.Random(0)
        self.answers = self.replacements = self.rollbacks = 0

    @property
    def pending(self) -> bool:
        """Whether there is work to do."""
        return bool(self.drafter.ended or self._queue)

    def turn(self) -> None:
        """Take finished sequences from the queue or learn one answer, and replace the weights when due."""
        if self.drafter.ended:
            self._take_in()
        elif self._queue:
            self._learner.learn(self._queue.popleft())
            self.answers += 1
        if len(self._since) >= REQUESTS and not self._queue:
            self._judge()

    def _take_in(self) -> None:
        ended, self.drafter.ended = self.drafter.ended, []
        for one in ended:
            if one.steps:
                self._since.append(one.tokens / one.steps)
            if one.answer is not None:
                earlier = self._random.sample(self._buffer, min(_EARLIER, len(self._buffer)))
                self._queue += [one.answer, *earlier]
                self._buffer.append(one.answer)
        while len(self._buffer) > 1 and sum(answer.size for answer in self._buffer) > _BUFFER:
            self._buffer.popleft()

    def _judge(self) -> None:
        """Replace the weights by the learned weights, or roll back if mean acceptance has fallen by more than its
        standard error."""
        before, since, self._since = self._before, self._since, []
        error = sqrt(sum(variance(lengths) / len(lengths) for lengths in (before, since) if lengths))
        if before and fmean(since) + error < fmean(before):
            self._current, self._proven = self._former, True
            self._learner.restart(self._former)
            self.rollbacks += 1
        else:
            if not self._proven and self._store is not None:
                self._store.write(lambda folder: self._drafter(self._current).save(folder, self._target))
            self._before = since[-REQUESTS:]
            self._former, self._current, self._proven = self._current, self._learner.weights(), False
            self.replacements += 1
        fresh = self._drafter(self._current)
        fresh.attach(self._target)  # idle: no request has to wait for it
        self.drafter.fresh = fresh

    def _drafter(self, network: nn.Module) -> TrainedDrafter:
        return self.drafter.drafter.renewed(copy.deepcopy(network))  # a copy, since attaching packs the network


class Store:
    """Stores the newest generation of a checkpoint in a numbered subfolder of ``folder``; older generations are removed
    after a generation is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest(self) -> Path | None:
        """Folder of the newest generation; None if there is none."""
        return max(self._generations(), default=None)

    def write(self, write: Callable[[Path], None]) -> None:
        """Write a generation. Raises ``UserError``: the folder cannot be written, or the disk is full."""
        before = self._generations()
        number = int(max(before).name) + 1 if before else 0
        make_folder(self.folder / f"{number:08}", write, hint="")
        for one in before:
            shutil.rmtree(one, ignore_errors=True)

    def _generations(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if path.name.isdecimal() and len(path.name) == 8]


_SECONDS = 60.0  # minimum interval between writes


class TableAdaptation:
    """Saves the table of a drafter, after it has loaded the newest stored table. Raises ``UserError``: the stored table
    is damaged or belongs to another target."""

    def __init__(self, drafter: Recycle, target: Any, store: Store) -> None:
        self._drafter, self._target, self._store = drafter, target, store
        if (newest := store.newest()) is not None:
            drafter.restore(newest)
        self._written, self._at = drafter.learned, monotonic()

    @property
    def pending(self) -> bool:
        """Whether the table has changed and the write interval has passed."""
        return self._drafter.learned != self._written and monotonic() - self._at >= _SECONDS

    def turn(self) -> None:
        """Write the table, if it has changed."""
        if self._drafter.learned != self._written:
            self._written, self._at = self._drafter.learned, monotonic()
            self._store.write(lambda folder: self._drafter.save(folder, self._target))


class Adaptation:
    """Adapts drafters to verified tokens, as idle work of their engine: an unattached drafter that learns or has a
    registered learner, or a union with such drafters. Raises ``UserError``: no drafter can adapt, files in the folder
    are damaged or for another target, or the limit is too small."""

    def __init__(self, drafter: Drafter | None, target: Target, options: AdaptOptions) -> None:
        if sharded(target):  # weights would diverge between ranks
            raise UserError("adapt learns in one process: got a target that is sharded over ranks")
        self._target, self._options = target, options
        self.heads: list[HeadAdaptation] = []
        self.tables: list[TableAdaptation] = []
        self._found = self._bytes = 0
        self.drafter = self._adapted(drafter)
        if not self._found:
            name = registered_name(drafter) or "none"
            raise UserError(f"adapt needs recycle, medusa, hydra, msd or flash among the drafters: got {name}")
        if options.folder is not None and self._bytes > options.space << 20:
            needed = -(-self._bytes >> 20)
            raise UserError(f"adapt's space must be at least {needed} MiB for these drafters: got {options.space}")

    def _adapted(self, drafter: Drafter | None) -> Drafter | None:
        if isinstance(drafter, Union):
            drafter.drafters = [one for one in map(self._adapted, drafter.drafters) if one is not None]
        elif isinstance(drafter, Recycle):
            self._found += 1
            if (store := self._store("recycle")) is not None:
                self._bytes += 2 * _TABLE  # old and new generation
                self.tables.append(TableAdaptation(drafter, self._target, store))
        elif isinstance(drafter, TrainedDrafter) and drafter.name in plugins.names("adapt"):
            self._found += 1
            if drafter._target is not None:  # its packed weights cannot be trained
                raise UserError(f"adapt needs a drafter that no pipeline has used: got {registered_name(drafter)}")
            self._bytes += 2 * sum(4 * one.numel() for one in drafter.network.parameters())
            store = self._store(drafter.name)
            self.heads.append(HeadAdaptation(_stored(drafter, store), self._target, store))
            return self.heads[-1].drafter
        return drafter

    def _store(self, name: str) -> Store | None:
        return None if self._options.folder is None else Store(self._options.folder / name)

    @property
    def _parts(self) -> list[HeadAdaptation | TableAdaptation]:
        return [*self.heads, *self.tables]

    @property
    def pending(self) -> bool:
        """Whether there is work to do: something to learn or to write."""
        return any(part.pending for part in self._parts)

    def turn(self) -> None:
        """Take a training step, replace weights, or write a file."""
        part = next((part for part in self._parts if part.pending), None)
        if part is not None:
            part.turn()

    def finish(self) -> None:
        """Do all pending work; the engine must be paused."""
        while self.pending:
            self.turn()

    def close(self) -> None:
        for table in self.tables:
            table.turn()


def _stored(drafter: TrainedDrafter, store: Store | None) -> TrainedDrafter:
    """Load the stored weights into a drafter, if the store has any."""
    newest = store.newest() if store is not None else None
    if newest is None:
        return drafter
    if (name := checkpoint.drafter_name(newest)) != drafter.name:
        raise UserError(f"{newest}: expected weights of {drafter.name}, received {name}")
    kept = drafter_spec(drafter.name).from_checkpoint(newest)
    assert isinstance(kept, TrainedDrafter)
    if kept.network.config != drafter.network.config:
        raise UserError(f"{newest}: expected weights of the drafter's shape, received those of another: remove it")
    return drafter.renewed(kept.network)
