"""Settings of a run of ``mmspec eval``, without torch: the command derives its options from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mmspec.checks import TEXT, Checked, inherited, listed, option, required, settable, several, whole
from mmspec.cli.options import Value
from mmspec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from mmspec.eval.suite.data import Sample

SIZES = Value(listed(whole(1)))
"""Type of an option that lists whole numbers above 0."""

llama_server_option = click.option(
    "--llama-server",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="The program llama-server of llama.cpp, built for this machine.",
)


@dataclass(frozen=True)
class SuiteSettings(Checked):
    """Settings of a run, as plain JSON values."""

    model: str = required(TEXT)
    tasks: tuple[str, ...] = required(several(TEXT))
    methods: str = option(
        "auto",
        TEXT,
        "generate, lookup, assisted:FOLDER, llama.cpp[:TYPE], openvino[:lookup], none, or "
        "DRAFTER[@tree|@chain[N]|@NODES], optionally LABEL=...",
    )
    data: str | None = option(None, settable(TEXT))
    limit: int | None = option(None, settable(whole(1)), "Samples per task; by default all.")
    temperatures: tuple[float, ...] = option(
        (0.0,), listed(SamplingParams.rule("temperature")), "0 is greedy.", default_text="0"
    )
    top_p: float = inherited(SamplingParams, "top_p", "Of sampling.", default=1.0)
    batch_sizes: tuple[int, ...] = option((1,), listed(whole(1)), "Conversations per batch.", default_text="1")
    rounds: int = option(3, whole(1), "Measurements of each batch.")
    warm_up: int = option(2, whole(0), "Unmeasured batches.")
    max_new_tokens: int | None = inherited(
        SamplingParams, "max_new_tokens", "Per answer.", default_text="as each task sets it"
    )
    seed: int = inherited(SamplingParams, "seed", default=0, rule=whole(0, 2**31))
    device: str = option("auto", TEXT)
    dtype: str = option("auto", TEXT)
    threads: int | None = option(None, settable(whole(1)), "CPU threads.", default_text="torch's")
    llama_server: str | None = option(None, settable(TEXT))

    def samples(self, task: str) -> list[Sample]:
        from mmspec.eval.suite.tasks import TASKS

        return TASKS[task].samples(None if self.data is None else Path(self.data), self.limit)
