"""Router and deployment of the engine ray, without Ray: its modules are stand-ins."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest

from mmspec.errors import UserError
from mmspec.serving import on_ray
from mmspec.serving.limits import SPARE_REQUESTS, Limits
from mmspec.serving.middleware import LostReplica
from mmspec.serving.settings import ServerSettings


def test_the_paths_that_ray_imports_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = on_ray._PROXY.values()
    module, _, name = path.rpartition(".")
    (middleware,) = getattr(importlib.import_module(module), name)()
    assert middleware.cls is LostReplica
    module, _, name = on_ray._ROUTER.rpartition(".")
    assert hasattr(router_module(monkeypatch, Path(*module.split(".")).with_suffix(".py")), name)


def router_module(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    """The module of the router, whose base class ranks replicas in the reverse order, each alone."""

    class ConsistentHashRouter:
        async def choose_replicas(self, candidates: list[str], pending: Any = None) -> list[list[str]]:
            return [[one] for one in reversed(candidates)]

    names = "ray", "ray.serve", "ray.serve.experimental", "ray.serve.experimental.consistent_hash_router"
    made: dict[str, Any] = {name: ModuleType(name) for name in (*names, "ray.serve.request_router")}
    made[names[-1]].ConsistentHashRouter = ConsistentHashRouter
    made["ray.serve.request_router"].PendingRequest = made["ray.serve.request_router"].RunningReplica = object
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = spec_from_file_location("router_without_ray", Path(on_ray.__file__).parents[2] / path)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("session", "expected"),
    [("a", [["three"], ["two"], ["one"]]), ("", [["one", "two", "three"]]), (None, [["one", "two", "three"]])],
)
def test_requests_of_a_session_have_an_order_of_replicas(
    session: str | None, expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without one are one group, of which Ray takes the replica with the shortest queue."""
    router = router_module(monkeypatch, Path("mmspec/serving/ray_router.py")).SessionRouter()
    pending = SimpleNamespace(metadata=SimpleNamespace(session_id=session))
    replicas = ["one", "two", "three"]
    assert asyncio.run(router.choose_replicas(replicas, pending)) == expected
    assert asyncio.run(router.choose_replicas(replicas)) == [replicas]


LIMITS = Limits(max_running=3, max_waiting=5)
SETTINGS = ServerSettings({"model": "tiny"}, LIMITS, {})


class Ray:
    """Records calls in ``log``, with their keywords in ``given``."""

    def __init__(self, resources: dict[str, float], fails: str | None) -> None:
        self.log: list[str] = []
        self.given: dict[str, Any] = {}
        self.resources, self.fails = resources, fails

    def call(self, name: str, result: Any = None) -> Any:
        def record(*args: Any, **keywords: Any) -> Any:
            self.log.append(name)
            self.given[name] = {**keywords, "args": args}
            if name == "run" and self.fails is not None:
                raise RuntimeError("deployment failed")
            return result

        return record

    def modules(self) -> Iterator[tuple[str, Any]]:
        ray, serve = ModuleType("ray"), ModuleType("ray.serve")
        vars(ray).update(serve=serve, init=self.call("init"), shutdown=self.call("ray.shutdown"))
        vars(ray).update(cluster_resources=lambda: self.resources)
        for name in ("start", "run", "delete", "shutdown"):
            setattr(serve, name, self.call(name))
        bound = SimpleNamespace(bind=lambda settings: ("bound", settings))
        vars(serve).update(ingress=lambda: lambda cls: cls, deployment=self.call("deployment", lambda cls: bound))
        message = f"Traceback ...\nmmspec.errors.UserError: {self.fails}\nmore"
        found = SimpleNamespace(message=message if self.fails else "")
        status = SimpleNamespace(applications={"mmspec": SimpleNamespace(deployments={"mmspec": found})})
        vars(serve).update(status=lambda: status)
        yield from (("ray", ray), ("ray.serve", serve))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a stand-in for Ray."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 7)

    def made(fails: str | None = None, **resources: float) -> Ray:
        found = Ray(resources, fails)
        for name, module in found.modules():
            monkeypatch.setitem(sys.modules, name, module)
        return found

    return made


ENDS = ["delete", "shutdown", "ray.shutdown"]


@contextmanager
def running(found: Ray, replicas: int = 2, host: str = "127.0.0.1", gpus: int = 1) -> Iterator[None]:
    with on_ray.deployed(SETTINGS, replicas, gpus, host, 8000):
        assert found.log == ["init", "start", "deployment", "run"]
        yield


@pytest.mark.parametrize(
    ("address", "resources", "replicas", "gpus", "options"),
    [
        ("", {}, 1, 1, {"num_cpus": 7, "num_gpus": 0}),
        ("", {}, 3, 1, {"num_cpus": 2, "num_gpus": 0}),
        ("", {}, 9, 1, {"num_cpus": 1, "num_gpus": 0}),
        ("head:6379", {"GPU": 8.0}, 2, 1, {"num_cpus": 1, "num_gpus": 1}),
        ("head:6379", {"GPU": 8.0}, 2, 4, {"num_cpus": 1, "num_gpus": 4}),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_settings_of_the_deployment(
    ray: Any,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    address: str,
    resources: dict[str, float],
    replicas: int,
    gpus: int,
    options: dict[str, int],
) -> None:
    """A Ray started here has the processors of its replicas; a cluster has its own."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    found = ray(**resources)
    with running(found, replicas, host, gpus):
        pass
    assert found.log[4:] == ENDS
    init = found.given["init"]
    assert init["runtime_env"] == {"env_vars": on_ray._PROXY}
    expected = (None, None) if address else (options["num_cpus"] * replicas, False)
    assert (init.get("num_cpus"), init.get("include_dashboard")) == expected
    assert found.given["start"]["http_options"] == {"host": host.strip("[]"), "port": 8000}
    given = found.given["deployment"]
    assert (given["num_replicas"], given["ray_actor_options"]) == (replicas, options)
    assert given["max_ongoing_requests"] == 3 + 5 + SPARE_REQUESTS
    assert given["graceful_shutdown_timeout_s"] == Limits().shutdown_timeout
    assert given["request_router_config"] == {"request_router_class": on_ray._ROUTER}
    assert found.given["run"] == {"name": "mmspec", "route_prefix": "/", "args": (("bound", SETTINGS),)}
    assert found.given["delete"]["args"] == ("mmspec",)


@pytest.mark.parametrize(("gpus", "present", "needed"), [(4, 6.0, 8), (1, 1.0, 2), (2, 0.0, 4)])
def test_more_gpus_than_there_are_is_a_mistake(ray: Any, gpus: int, present: float, needed: int) -> None:
    found = ray(GPU=present)
    message = f"expected {needed} GPUs in Ray's cluster, {gpus} for each replica: found {present:.0f}"
    with pytest.raises(UserError, match=message), running(found, gpus=gpus):
        raise AssertionError
    assert found.log == ["init", "start", *ENDS]


@pytest.mark.parametrize(
    ("fails", "raised", "message"),
    [
        (None, KeyboardInterrupt, None),
        ("cannot load model 'nobody/nothing'", UserError, r"^cannot load model 'nobody/nothing'$"),
        ("", RuntimeError, "deployment failed"),
    ],
)
def test_ray_ends_with_the_block(ray: Any, fails: str | None, raised: type[BaseException], message: str | None) -> None:
    """A mistake that a replica meets is the user's."""
    found = ray(fails)
    with pytest.raises(raised, match=message), running(found):
        raise KeyboardInterrupt
    assert found.log[4:] == ENDS


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="ray"), on_ray.deployed(SETTINGS, 1, 1, "127.0.0.1", 8000):
        raise AssertionError


def metrics_of(value: float) -> Any:
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Prompt tokens.", ["model_name"], registry=registry).labels("tiny").inc(value)
    return registry


def test_a_scrape_collects_the_metrics_of_all_replicas_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    replica: Any = object.__new__(on_ray.Replica)
    replica._app = SimpleNamespace(state=SimpleNamespace(metrics=SimpleNamespace(registry=metrics_of(2))))
    serve: Any = ModuleType("ray.serve")
    serve.get_replica_context = lambda: SimpleNamespace(replica_tag="one")
    ray: Any = ModuleType("ray")
    ray.serve = serve
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    answers = [replica.metrics(), RuntimeError("lost"), ("two", list(metrics_of(5).collect()))]

    async def results(timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        return answers

    asked: list[Any] = []
    handle = SimpleNamespace(broadcast=lambda name: asked.append(name) or SimpleNamespace(results_async=results))
    serve.get_deployment_handle = lambda name, application: asked.append((name, application)) or handle
    registry = CollectorRegistry()
    registry.register(asyncio.run(replica._scrape()))
    assert asked == [("mmspec", "mmspec"), "metrics"]
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("vllm:prompt")]
    values = {line for line in lines if "_total" in line}
    label = 'vllm:prompt_tokens_total{{model_name="tiny",replica="{}"}} {}'
    assert values == {label.format("one", 2.0), label.format("two", 5.0)}
    assert replica.__serve_build_asgi_app__() is replica._app
