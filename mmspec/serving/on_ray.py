"""Deployment on Ray Serve: replicas with one engine each, load-balanced by Ray's HTTP proxy."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from fastapi import FastAPI
from prometheus_client import Metric
from ray import serve
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from mmspec.errors import UserError
from mmspec.serving.app import create_app
from mmspec.serving.metrics import ReplicaMetrics
from mmspec.serving.middleware import log_to_stderr
from mmspec.serving.settings import ServerSettings

_NAME = "mmspec"
_ROUTER = "mmspec.serving.on_ray.SessionRouter"
_PROXY = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mmspec.serving.middleware.proxy_middleware"}


class SessionRouter(ConsistentHashRouter):
    """Ray's consistent hashing of session ids; requests without one go to the replica with the shortest queue.

    Ray's own router hashes random ids of requests without a session, so one replica may be busy while another is idle.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas to try, best first; Ray picks the shortest queue within a group."""
        ranked = await super().choose_replicas(candidate_replicas, pending_request)
        in_session = pending_request is not None and pending_request.metadata.session_id
        return ranked if in_session else [candidate_replicas]


class Replica:
    def __init__(self, settings: ServerSettings) -> None:
        log_to_stderr(settings.limits.log_level)  # Ray redirects it to a file
        self._app = create_app(settings.pipelines(), settings.limits, **settings.access, scrape=self._scrape)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def metrics(self) -> tuple[str, Sequence[Metric]]:
        """The replica's name and metrics."""
        return serve.get_replica_context().replica_tag, list(self._app.state.metrics.registry.collect())

    async def _scrape(self) -> ReplicaMetrics:
        """Collect the metrics of all replicas, as a scrape reaches only one replica."""
        found = serve.get_deployment_handle(_NAME, _NAME).broadcast("metrics")
        answers = await found.results_async(timeout_s=10, return_exceptions=True)
        return ReplicaMetrics(dict(one for one in answers if isinstance(one, tuple)))  # skips lost replicas


@contextmanager
def deployed(settings: ServerSettings, replicas: int, gpus: int, host: str, port: int) -> Iterator[None]:
    """Deploy replicas on the cluster at ``RAY_ADDRESS``, by default on a local Ray started here.

    At the end of the block, running requests have ``limits.shutdown_timeout`` seconds to finish.

    Args:
        gpus: GPUs per replica, on one machine; a device map spreads the model over several. With 1, a cluster without
            GPUs is accepted.

    Raises:
        UserError: the cluster has fewer GPUs, or a replica does not start.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    own = not os.environ.get("RAY_ADDRESS")
    cpus = max(1, (os.cpu_count() or 1) // replicas)
    started: dict[str, Any] = {"num_cpus": cpus * replicas, "include_dashboard": False} if own else {}
    ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": _PROXY}, **started)
    try:
        serve.start(http_options={"host": host.strip("[]"), "port": port}, logging_config={"log_level": "ERROR"})
        found = int(ray.cluster_resources().get("GPU", 0))
        if found < gpus * replicas and (found or gpus > 1):
            raise UserError(f"expected {gpus * replicas} GPUs in Ray's cluster, {gpus} for each replica: found {found}")
        deployment = serve.deployment(
            name=_NAME,
            num_replicas=replicas,
            ray_actor_options={"num_cpus": cpus if own else 1, "num_gpus": gpus if found else 0},
            max_ongoing_requests=settings.limits.requests,
            graceful_shutdown_timeout_s=settings.limits.shutdown_timeout,
            graceful_shutdown_wait_loop_s=0.1,
            max_constructor_retry_count=1,
            request_router_config={"request_router_class": _ROUTER},
        )(serve.ingress()(Replica))
        try:
            serve.run(deployment.bind(settings), name=_NAME, route_prefix="/")
        except RuntimeError as error:
            message = serve.status().applications[_NAME].deployments[_NAME].message
            if mistake := re.search(r"errors\.UserError: (.+)", message):  # raised in a replica
                raise UserError(mistake[1]) from error
            raise
        yield
    finally:
        serve.delete(_NAME)  # waits for running requests; shutdown does not
        serve.shutdown()
        ray.shutdown()
