"""Runs independent jobs sequentially in this process, or on Ray Data with actors that each hold a model.

A factory creates one worker per process, which is called with one job at a time. Jobs and results are JSON values. A
result depends only on the job and the factory's settings, so that any worker can run or repeat a job.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mmspec.errors import UserError, missing

Worker = Callable[[Any], Any]
Factory = Callable[[dict[str, Any]], Worker]

ENGINES = ("local", "ray")


def rank() -> int:
    """Rank of this process in a distributed job (``torchrun``)."""
    return int(os.environ.get("RANK", 0))


def ranks() -> int:
    """Number of ranks of the distributed job; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def run_jobs(
    jobs: Sequence[Any], factory: Factory, settings: dict[str, Any], engine: str = "local", workers: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Run all jobs; yields each job with its result, exactly once, on Ray in any order.

    Args:
        factory: creates a worker from ``settings``; for Ray it must be importable by name.
        engine: ``"local"`` or ``"ray"``: the cluster of ``RAY_ADDRESS`` or ``ray.init``, by default this machine.
        workers: number of Ray actors.

    Raises:
        UserError: Ray is not installed.
    """
    if engine == "local":
        if jobs:
            yield from zip(jobs, map(factory(settings), jobs), strict=True)
    elif engine == "ray":
        yield from _on_ray(jobs, factory, settings, workers)
    else:
        raise UserError(f"engine must be one of {', '.join(ENGINES)}: got {engine!r}")


class _Actor:
    def __init__(self, factory: Factory, settings: dict[str, Any]) -> None:
        self.worker = factory(settings)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"place": row["place"], "result": json.dumps(self.worker(json.loads(row["job"])))}


def import_ray() -> Any:
    """Import the package; raises ``UserError`` if it is not installed."""
    try:
        import ray
    except ImportError:
        raise missing("engine ray", "ray", "ray") from None
    return ray


def _on_ray(jobs: Sequence[Any], factory: Factory, settings: dict[str, Any], workers: int) -> Iterator[tuple[Any, Any]]:
    import_ray()
    if not jobs:
        return
    import ray.data

    own = not ray.is_initialized()
    if own:
        # A Ray started here needs a CPU per worker; a running cluster has its own number.
        cpus = None if os.environ.get("RAY_ADDRESS") else max(os.cpu_count() or 1, workers + 1)
        ray.init(num_cpus=cpus, log_to_driver=False, logging_level=logging.ERROR)
    try:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        seen: set[int] = set()
        ray.data.DataContext.get_current().enable_progress_bars = False
        actor: Any = _Actor  # Ray's signature depends on the version
        rows = [{"place": place, "job": json.dumps(job)} for place, job in enumerate(jobs)]
        # One block per job: after the loss of a worker, Ray repeats only one job.
        results = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            actor,
            fn_constructor_args=(factory, settings),
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(jobs))),
            num_cpus=1,
            num_gpus=gpus,
        )
        for row in results.iter_rows():
            place = int(row["place"])
            if place not in seen:
                seen.add(place)
                yield jobs[place], json.loads(row["result"])
    except Exception as error:
        if mistake := re.search(r"errors\.UserError: (.+)", str(error)):  # raised in a worker
            raise UserError(mistake[1]) from None
        raise
    finally:
        if own:
            ray.shutdown()
