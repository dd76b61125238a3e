"""Router and deployment of the engine ray, without Ray: its modules record calls."""

import asyncio
import importlib
import sys
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from mmspec.cli import main
from mmspec.engine.stats import Stats
from mmspec.errors import UserError
from mmspec.serving.metrics import Metrics
from mmspec.serving.middleware import LostReplica
from mmspec.serving.settings import SPARE_REQUESTS, Limits, ServerSettings

SETTINGS = ServerSettings({"model": "tiny"}, Limits(max_running=3, max_waiting=5), {})
CALLS = ["init", "serve.start", "serve.deployment", "serve.run", "serve.delete", "serve.shutdown", "shutdown"]


class Router:
    """Ranks replicas in the reverse order, each alone."""

    async def choose_replicas(self, candidates, pending=None):
        return [[one] for one in reversed(candidates)]


@pytest.fixture
def ray(monkeypatch):
    """A stand-in for Ray; its attribute ``ours`` is our module over it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    found = MagicMock()
    found.cluster_resources.return_value = {}
    found.serve.ConsistentHashRouter = Router
    monkeypatch.setitem(sys.modules, "ray", found)
    for name in ("", ".experimental", ".experimental.consistent_hash_router", ".request_router"):
        monkeypatch.setitem(sys.modules, f"ray.serve{name}", found.serve)
    spec = find_spec("mmspec.serving.on_ray")
    found.ours = module_from_spec(spec)
    spec.loader.exec_module(found.ours)
    return found


def calls(ray):
    return [name for name, *_ in ray.mock_calls if name in CALLS]


def test_the_paths_that_ray_imports_exist(ray):
    (path,) = ray.ours._PROXY.values()
    module, _, name = path.rpartition(".")
    (middleware,) = getattr(importlib.import_module(module), name)()
    assert middleware.cls is LostReplica
    module, _, name = ray.ours._ROUTER.rpartition(".")
    assert (module, hasattr(ray.ours, name)) == ("mmspec.serving.on_ray", True)


@pytest.mark.parametrize("session", ["a", "", None])
def test_requests_of_a_session_have_an_order_of_replicas(session, ray):
    """Those without one are one group, of which Ray takes the replica with the shortest queue."""
    router, replicas = ray.ours.SessionRouter(), ["one", "two", "three"]
    pending = SimpleNamespace(metadata=SimpleNamespace(session_id=session))
    expected = [["three"], ["two"], ["one"]] if session else [replicas]
    assert asyncio.run(router.choose_replicas(replicas, pending)) == expected
    assert asyncio.run(router.choose_replicas(replicas)) == [replicas]


@pytest.mark.parametrize(
    ("address", "host", "replicas", "gpus", "options"),
    [
        ("", "127.0.0.1", 1, 1, {"num_cpus": 7, "num_gpus": 0}),
        ("", "[::1]", 3, 1, {"num_cpus": 2, "num_gpus": 0}),
        ("", "127.0.0.1", 9, 1, {"num_cpus": 1, "num_gpus": 0}),
        ("head:6379", "127.0.0.1", 2, 1, {"num_cpus": 1, "num_gpus": 1}),
        ("head:6379", "[::1]", 2, 4, {"num_cpus": 1, "num_gpus": 4}),
    ],
)
def test_settings_of_the_deployment(ray, monkeypatch, address, host, replicas, gpus, options):
    """A Ray started here has the processors of its replicas; a cluster has its own."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    ray.cluster_resources.return_value = {"GPU": 8.0} if address else {}
    with ray.ours.deployed(SETTINGS, replicas, gpus, host, 8000):
        assert calls(ray) == CALLS[:4]
    assert calls(ray) == CALLS
    init, given, serve = ray.init.call_args.kwargs, ray.serve.deployment.call_args.kwargs, ray.serve
    assert init["runtime_env"] == {"env_vars": ray.ours._PROXY}
    expected = (None, None) if address else (options["num_cpus"] * replicas, False)
    assert (init.get("num_cpus"), init.get("include_dashboard")) == expected
    assert serve.start.call_args.kwargs["http_options"] == {"host": host.strip("[]"), "port": 8000}
    assert (given["num_replicas"], given["ray_actor_options"]) == (replicas, options)
    assert given["max_ongoing_requests"] == 3 + 5 + SPARE_REQUESTS
    assert given["graceful_shutdown_timeout_s"] == Limits().shutdown_timeout
    assert given["request_router_config"] == {"request_router_class": ray.ours._ROUTER}
    serve.ingress.return_value.assert_called_once_with(ray.ours.Replica)
    bind = serve.deployment.return_value.return_value.bind
    bind.assert_called_once_with(SETTINGS)
    serve.run.assert_called_once_with(bind.return_value, name="mmspec", route_prefix="/")
    serve.delete.assert_called_once_with("mmspec")


@pytest.mark.parametrize(("gpus", "present", "needed"), [(4, 6.0, 8), (1, 1.0, 2), (2, 0.0, 4)])
def test_more_gpus_than_there_are_is_a_mistake(ray, gpus, present, needed):
    ray.cluster_resources.return_value = {"GPU": present}
    message = f"expected {needed} GPUs in Ray's cluster, {gpus} for each replica: found {present:.0f}"
    with pytest.raises(UserError, match=message), ray.ours.deployed(SETTINGS, 2, gpus, "127.0.0.1", 8000):
        raise AssertionError
    assert calls(ray) == [*CALLS[:2], *CALLS[4:]]


@pytest.mark.parametrize(
    ("fails", "raised", "message"),
    [
        (None, KeyboardInterrupt, None),
        ("cannot load model 'nobody/nothing'", UserError, r"^cannot load model 'nobody/nothing'$"),
        ("", RuntimeError, "deployment failed"),
    ],
)
def test_ray_ends_with_the_block(ray, fails, raised, message):
    """A mistake that a replica meets is the user's."""
    if fails is not None:
        ray.serve.run.side_effect = RuntimeError("deployment failed")
    found = SimpleNamespace(message=f"Traceback ...\nmmspec.errors.UserError: {fails}\nmore" if fails else "")
    ray.serve.status().applications = {"mmspec": SimpleNamespace(deployments={"mmspec": found})}
    with pytest.raises(raised, match=message), ray.ours.deployed(SETTINGS, 2, 1, "127.0.0.1", 8000):
        raise KeyboardInterrupt
    assert calls(ray) == CALLS


def test_a_missing_package_is_named(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "mmspec.serving.on_ray", raising=False)
    assert main(["serve", "--model", "tiny-llava", "--engine", "ray", "--port", "0"]) == 2
    assert "needs the package ray, which is not installed: run pip install -e '.[ray]'" in capfd.readouterr().err


def test_a_scrape_collects_the_metrics_of_all_replicas_that_answer(ray):
    one, two = (Metrics("tiny", lambda: 0, lambda: 0, lambda: 1, ["a", "none"]) for _ in range(2))
    one.ended(Stats(num_spec_steps=3), "stop", "a")
    two.ended(Stats(num_spec_steps=5), "stop", "a")
    replica = object.__new__(ray.ours.Replica)
    replica._app = SimpleNamespace(state=SimpleNamespace(metrics=one))
    ray.serve.get_replica_context.return_value.replica_tag = "one"
    answers = [replica.metrics(), RuntimeError("lost"), ("two", list(two.registry.collect()))]

    async def results(timeout_s, return_exceptions):
        assert return_exceptions
        return answers

    ray.serve.get_deployment_handle().broadcast().results_async = results
    registry = CollectorRegistry()
    registry.register(asyncio.run(replica._scrape()))
    ray.serve.get_deployment_handle.assert_called_with("mmspec", "mmspec")
    ray.serve.get_deployment_handle().broadcast.assert_called_with("metrics")
    lines = generate_latest(registry).decode().splitlines()
    form = 'vllm:spec_decode_num_drafts_total{{drafter="{}",model_name="tiny",replica="{}"}} {}'
    expected = {("a", "one", 3.0), ("a", "two", 5.0), ("none", "one", 0.0), ("none", "two", 0.0)}
    counted = {line for line in lines if line.startswith("vllm:spec_decode_num_drafts_total{")}
    assert counted == {form.format(*each) for each in expected}
    assert replica.__serve_build_asgi_app__() is replica._app
