"""Whether an engine still holds anything of requests that have ended."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import FrameType
from typing import Any

from mmspec.engine.engine import Engine
from mmspec.engine.sequence import Sequence as Decoded


def assert_idle(engine: Engine) -> None:
    """An engine without requests has no rows."""
    assert (engine.core.running, engine.core._prefilled, engine.core.queued) == ([], [], [])
    target: Any = engine.target
    assert target.runner.rows == 0


def assert_forgotten(ended: Sequence[Decoded]) -> None:
    """The token histories of sequences that have ended are kept by nobody but these and the frames of their errors."""
    own = [*ended, *map(vars, ended)]
    for one in gc.get_referrers(*(sequence.history for sequence in ended)):
        kept = not any(one is known for known in own) and not isinstance(one, FrameType)
        assert not kept, f"an ended sequence's tokens are kept in {one!r}"
