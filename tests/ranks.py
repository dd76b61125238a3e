"""Processes of a job with two ranks, over which a model is sharded; run as a module, this is one of them."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import distributed
from transformers import PreTrainedModel

from tests.process import ROOT


@contextmanager
def alone(model: PreTrainedModel) -> Iterator[None]:
    """A job of this process only, in which a model counts as sharded."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model._tp_size = 2
    try:
        yield
    finally:
        model._tp_size = None
        distributed.destroy_process_group()


@contextmanager
def job(*command: str, **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of ``python -m COMMAND``, which ``torchrun`` would start alike; killed after the block."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": str(ROOT), **environment}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield processes
    finally:
        for one in processes:
            one.kill()
            one.communicate()


def ended(process: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str, str]:
    """Exit status, output and errors of a process."""
    out, errors = process.communicate(timeout=seconds)
    return process.returncode, out, errors


def _main(scenario: str, folder: str, *drafters: str) -> None:
    atexit.register(lambda: os._exit(9) if distributed.is_initialized() else None)  # its threads would end badly
    import mmspec
    from mmspec.engine.distributed import RankError
    from tests.split_models import PROMPTS, answers

    for drafter in drafters:
        pipe = mmspec.load(folder, drafter, dtype="float32", tp_plan="auto")
        if os.environ["RANK"] == "1":
            _SCENARIOS[scenario](pipe)
        if pipe.follow():
            continue
        if scenario == "answers":
            found = answers(pipe)
            for _, _ in zip(range(3), pipe.stream(PROMPTS[0], max_new_tokens=500), strict=False):
                pass  # cancelled
            after = pipe.generate(PROMPTS[1], max_new_tokens=12, num_draft_tokens=7).token_ids
            print(json.dumps([found, after]), flush=True)
            pipe.engine.close()
            continue
        errors = []
        for _ in range(2):
            try:
                answers(pipe, tokens=60)
            except RankError as error:
                errors.append(str(error))
        print(json.dumps(errors), flush=True)


def _at_third_step(pipe: object, act: Callable[[], None]) -> None:
    core, steps = pipe.engine.core, []  # type: ignore[attr-defined]
    plain = core.step

    def step() -> None:
        steps.append(1)
        if len(steps) == 3:
            act()
        plain()

    core.step = step


def _reverse(pipe: object) -> None:
    """Take requests that come together in the reverse order."""
    from mmspec.engine.distributed import Orders, Ranks

    plain = Ranks.agree

    def agree(ranks: Ranks, *given: Any) -> Orders:
        orders = plain(ranks, *given)
        return replace(orders, requests=orders.requests[::-1])

    Ranks.agree = agree  # type: ignore[method-assign]


_SCENARIOS: dict[str, Callable[[object], None]] = {
    "answers": lambda pipe: None,
    "reversed": _reverse,
    "killed": lambda pipe: _at_third_step(pipe, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "stopped": lambda pipe: _at_third_step(pipe, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
}

if __name__ == "__main__":
    _main(*sys.argv[1:])
