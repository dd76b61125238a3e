"""``mmspec eval``, with tasks, scorers and reports, and ``mmspec tune``.

Here are the settings of a run, without torch: the command derives its options from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import PositiveInt

from mmspec.cli.options import Listed
from mmspec.sampling.params import SamplingParams, Temperature
from mmspec.validation import Many, inherited, option, options

if TYPE_CHECKING:
    from mmspec.eval.suite.scoring import Sample

MEASURED = 6
"""Prompts that `mmspec tune` needs after the warm-up: the range of fewer contains the median less often than 95 %."""

SIZES = Listed(click.IntRange(1))  # type of an option that lists whole numbers above 0
peer_option = click.option(
    "--peer", "peers", multiple=True, help="NAME=COMMAND: the server of llama.cpp or ik_llama.cpp; may be repeated."
)


@options
class SuiteSettings:
    """Settings of a run, as plain JSON values."""

    model: str
    tasks: Many[str]
    methods: str = option(
        "auto",
        "generate, lookup, assisted:FOLDER, none, PEER[:SPECULATION] (llama.cpp, ik_llama.cpp, mistral.rs, "
        "openvino), or DRAFTER[@tree|@chain[N]|@NODES], optionally LABEL=...",
    )
    data: str | None = None
    limit: int | None = option(None, "Samples per task; by default all.", ge=1)
    temperatures: Many[Temperature] = option((0.0,), "0 is greedy.", default_text="0")
    top_p: float = inherited(SamplingParams, "top_p", "Of sampling.", default=1.0)
    batch_sizes: Many[PositiveInt] = option((1,), "Conversations per batch.", default_text="1")
    rounds: int = option(3, "Measurements of each batch.", ge=1)
    warm_up: int = option(2, "Unmeasured batches.", ge=0)
    max_new_tokens: int | None = inherited(
        SamplingParams, "max_new_tokens", "Per answer.", default_text="as each task sets it"
    )
    seed: int = inherited(SamplingParams, "seed", default=0, ge=0, le=2**31)
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = option(None, "CPU threads.", default_text="torch's", ge=1)
    peers: Many[str] = ()

    def samples(self, task: str) -> list[Sample]:
        from mmspec.eval.suite.tasks import TASKS

        return TASKS[task].samples(None if self.data is None else Path(self.data), self.limit)
