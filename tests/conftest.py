"""Shared by all tests."""

from types import SimpleNamespace

import pytest
import torch

from mmspec import progress
from mmspec.core import drafter
from mmspec.ops import kernels
from mmspec.ops.cpu import use_kernel_threads
from mmspec.targets import templates
from tests import split_models
from tests.leftovers import Leftovers


def pytest_collection_modifyitems(items):
    """Time limits against hanging, far above a test's time; marked tests have the limit of pyproject.toml."""
    kinds = ("long", "slow", "gpu", "browser", "timeout")
    for item in items:
        if not any(map(item.get_closest_marker, kinds)):
            item.add_marker(pytest.mark.timeout(600))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="session")
def _own_measurements(request, tmp_path_factory):
    """Calibrations are measured and kept apart from the user's own; kernels are compiled once for all runs."""
    folder = tmp_path_factory.mktemp("measurements")
    if cache := getattr(request.config, "cache", None):
        (folder / "kernels").symlink_to(cache.mkdir("kernels"), target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMSPEC_CACHE", str(folder))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_step_is_slow():
    """What commands print does not depend on how long their steps take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "SLOW", 1e6)
        yield


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left(_own_measurements):
    """The tests of a module leave no threads, processes, replaced functions or changed settings behind."""
    before = Leftovers()
    yield
    templates._workers.cache_clear()  # ends them
    if left := before.found():
        pytest.fail("\n".join(["the tests of this module leave behind:", *left]), pytrace=False)


@pytest.fixture(autouse=True)
def _no_drafter_fails(request, monkeypatch):
    """Errors of drafters, which requests survive, fail a test that is not marked ``drafter_fails``."""
    failed = set()
    monkeypatch.setattr(drafter, "_REPORTED", failed)
    yield
    if failed and not request.node.get_closest_marker("drafter_fails"):
        pytest.fail(f"drafters failed: {failed}", pytrace=False)


@pytest.fixture(scope="module")
def one_thread():
    """One thread of torch for the tests of a module."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def split_model(tmp_path_factory):
    return split_models.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def split_head(tmp_path_factory):
    return split_models.save_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(autouse=True)
def same_threads():
    """Torch's number of threads after a test is that before it, and the kernels' number is torch's."""
    before = torch.get_num_threads()
    yield
    use_kernel_threads(0)
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)


@pytest.fixture
def fixed_shapes(monkeypatch):
    """Static shapes, as on CUDA."""
    monkeypatch.setattr(kernels, "static_shapes", lambda device: True)


@pytest.fixture
def at_every_node(monkeypatch):
    """The target's token is chosen at every node, as with static shapes, not only at those that are reached."""
    monkeypatch.setattr("mmspec.sampling.batch_sampler.kernels", SimpleNamespace(static_shapes=lambda device: True))
