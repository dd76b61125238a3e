"""Adaptation of a pipeline's drafters, in the idle time of its engine. The table of Token Recycling learns while it
drafts, and is only kept on disk."""

from __future__ import annotations

from time import monotonic
from typing import Any

from mmspec import plugins
from mmspec.adaptation.heads import HeadAdaptation, Store
from mmspec.adaptation.options import AdaptOptions
from mmspec.core.drafter import Drafter
from mmspec.core.target import Target
from mmspec.drafters import checkpoint
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.registry import drafter_spec, registered_name
from mmspec.drafters.trained import TrainedDrafter
from mmspec.drafters.union import Union
from mmspec.errors import UserError
from mmspec.targets.transformers_target import sharded

_TABLE = 16 << 20  # bytes of a full table, at most


class Adaptation:
    """Lets drafters learn from verified tokens: an ``IdleTask`` of their engine.

    Args:
        drafter: a drafter that learns or for which a learner is registered, or a union of some; not attached yet.
        options: where to keep what is learned.

    Attributes:
        drafter: drafts in place of the given one.
        heads: trained drafters.
        tables: look-up tables that are kept on disk.

    Raises:
        UserError: none of the drafters can adapt, the folder contains damaged files or those of another target, or the
            space does not suffice.
    """

    def __init__(self, drafter: Drafter | None, target: Target, options: AdaptOptions) -> None:
        if sharded(target):  # their weights would differ
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
                self._bytes += 2 * _TABLE  # the old one and the new one
                self.tables.append(TableAdaptation(drafter, self._target, store))
        elif isinstance(drafter, TrainedDrafter) and drafter.name in plugins.names("adapt"):
            self._found += 1
            if drafter._target is not None:  # its weights are packed, and cannot be trained
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
        """Whether there is something to learn or to write."""
        return any(part.pending for part in self._parts)

    def turn(self) -> None:
        """Take a training step, replace weights, or write a file."""
        for part in self._parts:
            if part.pending:
                part.turn()
                return

    def finish(self) -> None:
        """Do all pending work; its engine must be paused."""
        while self.pending:
            self.turn()

    def close(self) -> None:
        for table in self.tables:
            table.turn()


def _stored(drafter: TrainedDrafter, store: Store | None) -> TrainedDrafter:
    """The drafter with the weights of a store, if there are some of the same shape."""
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


_SECONDS = 60.0  # between two writes


class TableAdaptation:
    """Keeps the table of a drafter.

    Args:
        drafter: its table is replaced by that of the store, if there is one.
        target: that the table is learned from.

    Raises:
        UserError: the stored table is damaged, or of another target.
    """

    def __init__(self, drafter: Recycle, target: Any, store: Store) -> None:
        self._drafter, self._target, self._store = drafter, target, store
        if (newest := store.newest()) is not None:
            drafter.restore(newest)
        self._written, self._at = drafter.learned, monotonic()

    @property
    def pending(self) -> bool:
        """Whether the table has changed since the last write, some time ago."""
        return self._drafter.learned != self._written and monotonic() - self._at >= _SECONDS

    def turn(self) -> None:
        """Write the table, if it has changed."""
        if self._drafter.learned != self._written:
            self._written, self._at = self._drafter.learned, monotonic()
            self._store.write(lambda folder: self._drafter.save(folder, self._target))
