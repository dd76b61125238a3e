"""Which kernels run where."""

import pytest
import torch

from mmspec.errors import UserError
from mmspec.ops import kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """A machine whose GPU is as new as ``capability`` says, with Triton installed."""
    monkeypatch.delenv("MMSPEC_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)
    kernels._problem.cache_clear()
    yield
    kernels._problem.cache_clear()


def test_by_the_device():
    assert kernels.in_use(CPU) == "reference"
    assert kernels.in_use(GPU) == "triton"


def test_an_old_gpu_or_no_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert kernels.in_use(GPU) == "reference"
    monkeypatch.setenv("MMSPEC_KERNELS", "triton")
    with pytest.raises(UserError, match=r"cannot run on cuda:0: expected compute capability 8.0 or newer, found 7.5"):
        kernels.in_use(GPU)
    kernels._problem.cache_clear()
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="expected the package triton, found none"):
        kernels.in_use(GPU)


def test_on_another_gpu_than_the_current_one(monkeypatch):
    assert kernels.in_use(torch.device("cuda", 1)) == "reference"
    assert kernels.in_use(torch.device("cuda")) == "triton"
    assert kernels.static_shapes(torch.device("cuda", 1))
    monkeypatch.setenv("MMSPEC_KERNELS", "triton")
    with pytest.raises(UserError, match="cannot run on cuda:1: expected the current CUDA device"):
        kernels.in_use(torch.device("cuda", 1))


def test_by_the_user(monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")
    assert kernels.in_use(GPU) == "reference"
    monkeypatch.setenv("MMSPEC_KERNELS", "triton")
    assert kernels.in_use(GPU) == "triton"
    with pytest.raises(UserError, match="cannot run on cpu: expected a CUDA device"):
        kernels.in_use(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.in_use(CPU) == "triton"
    monkeypatch.setenv("MMSPEC_KERNELS", "fast")
    with pytest.raises(UserError, match="MMSPEC_KERNELS must be one of auto, reference, triton: got 'fast'"):
        kernels.in_use(CPU)
