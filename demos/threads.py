"""Work in a thread of its own while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def running(work: Callable[[Event], None], patience: float | None = None) -> Iterator[None]:
    """Run ``work`` in a daemon thread while the block runs.

    Args:
        work: called with an event that is set when the block ends; it then returns.
        patience: seconds to wait for that; None waits until it has returned.
    """
    ended = Event()
    thread = Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(patience)
