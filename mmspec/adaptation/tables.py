"""Adaptation of Token Recycling: its table learns while it drafts, and is kept on disk."""

from __future__ import annotations

from time import monotonic
from typing import Any

from mmspec.adaptation.store import Store
from mmspec.drafters.recycle.drafter import Recycle

_SECONDS = 60.0  # between two writes


class TableAdaptation:
    """Keeps the table of a drafter.

    Args:
        drafter: its table is replaced by that of the store, if there is one.
        target: that the table is learned from.
        store: keeps the table.

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
        """Write the table."""
        self.write()

    def write(self) -> None:
        """Write the table, if it has changed."""
        if self._drafter.learned != self._written:
            self._written, self._at = self._drafter.learned, monotonic()
            self._store.write(lambda folder: self._drafter.save(folder, self._target))
