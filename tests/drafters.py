"""A drafter of every kind for a tiny model, and whether an engine still holds anything of requests that have ended."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.small import Small
from mmspec.drafters.union import Union
from mmspec.engine.engine import Engine
from mmspec.engine.sequence import Sequence as Decoded
from mmspec.ssm.drafters.mamba import Mamba
from mmspec.vision.drafters.eagle3 import Eagle3
from mmspec.vision.drafters.msd import MSD, Flash
from mmspec.vision.drafters.mtp import MTP
from mmspec.vision.drafters.vispec import ViSpec
from tests.tiny import shared_model
from tests.tiny.models import eagle3_network, mamba_network, msd_network, mtp_network, vispec_network

DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: None,
    "ngram": lambda model: Ngram(memory=50),
    "recycle": lambda model: Recycle(top_k=3),
    "union": lambda model: Union([Recycle(top_k=3), Ngram()]),
    "small": lambda model: Small(shared_model("llama"), top_k=3),
    "mamba": lambda model: Mamba(mamba_network(), top_k=3, depth=3, total_tokens=9),
    "msd": lambda model: MSD(msd_network(model), top_k=3, depth=3, total_tokens=9),
    "eagle3": lambda model: Eagle3(eagle3_network(model), torch.arange(40), top_k=3, depth=3, total_tokens=9),
    "vispec": lambda model: ViSpec(vispec_network(model), top_k=3, depth=3, total_tokens=9),
    "mtp": lambda model: MTP(mtp_network(model), top_k=3, depth=3, total_tokens=9),
    "flash": lambda model: Flash(msd_network(model, latents=2, slots=2), top_k=3, depth=4, total_tokens=9),
}


def assert_idle(engine: Engine) -> None:
    """An engine without requests has no rows."""
    assert (engine.running, engine._prefilled, engine._queued) == ([], [], [])
    target: Any = engine.target
    assert target.rows == 0


def assert_forgotten(ended: Sequence[Decoded]) -> None:
    """The token histories of sequences that have ended are kept by nobody but these and the frames of their errors."""
    own = [*ended, *map(vars, ended)]
    for one in gc.get_referrers(*(sequence.history for sequence in ended)):
        kept = not any(one is known for known in own) and not isinstance(one, FrameType)
        assert not kept, f"an ended sequence's tokens are kept in {one!r}"
