"""Weights in blocks: their layout in memory."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, BlockLinear, place_together

pytestmark = pytest.mark.skipif(not cpu_library.available(), reason="needs the C++ kernels")


def _layers(kind: str) -> list[BlockLinear]:
    torch.manual_seed(0)
    shapes = [(96, 40), (32, 64), (16, 200)]  # of 3, 2 and 7 groups
    return [BLOCKS[kind](weight, weight[:, 0].clone()) for weight in map(torch.randn, shapes)]


@pytest.mark.parametrize("kind", BLOCKS)
def test_layers_placed_together_compute_what_they_did(kind: str) -> None:
    layers, x = _layers(kind), torch.randn(5, 40)
    before = layers[0](x)  # has made its weights for the kernels
    weights = [layer.weight for layer in layers]
    place_together(layers)
    assert torch.equal(layers[0](x), before)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, weights, strict=True))


def test_layers_placed_together_follow_each_other() -> None:
    layers = _layers("int4")
    place_together(layers)
    places = [layer._blocks.data_ptr() for layer in layers]
    ends = [place + layer._blocks.numel() for place, layer in zip(places, layers, strict=True)]
    assert all(place % 64 == 0 for place in places)
    assert places[0] % (2 << 20) == 0  # a huge page
    assert all(0 <= start - end < 64 for start, end in zip(places[1:], ends, strict=False))


def test_copies_take_their_own_part_of_the_memory() -> None:
    model = nn.Sequential(*_layers("int8"))
    place_together(layer for layer in model if isinstance(layer, BlockLinear))
    last = model[2]
    alone = pickle.dumps(last)
    assert len(alone) < last._blocks.numel() + 4096
    twin, loaded = copy.deepcopy(last), pickle.loads(alone)
    expected, x = last.weight.clone(), torch.randn(2, 200)
    product = last(x)
    last._blocks.zero_()
    for other in (twin, loaded):
        assert torch.equal(other.weight, expected)
        assert torch.equal(other(x), product)


def smaps(place: int) -> dict[str, str]:
    """What Linux says of the memory at an address."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            found = {"inside": str(start <= place < end)}
        else:
            found[first] = rest.strip()
            if first == "VmFlags:" and found["inside"] == "True":
                return found
    return {}


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux")
def test_memory_is_moved_to_huge_pages_and_keeps_its_contents() -> None:
    memory = cpu.zeros(5 * cpu.PAGE + 100)
    memory.copy_(torch.arange(len(memory)) % 251)
    expected = memory.clone()
    thread = cpu.use_huge_pages(memory)
    assert thread is not None
    thread.join(20)  # the pause after each page depends on its move
    assert not thread.is_alive()
    assert torch.equal(memory, expected)
    found = smaps(memory.data_ptr())
    assert "hg" in found["VmFlags:"].split()
    assert cpu.use_huge_pages(cpu.zeros(100)) is None


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux")
def test_huge_pages_are_asked_for_once_layers_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(cpu, "use_huge_pages", asked.append)
    layers = _layers("int8")
    weights = [layer.weight for layer in layers]
    place_together(layers)
    (memory,) = asked
    assert memory.data_ptr() == layers[0]._blocks.data_ptr()
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, weights, strict=True))


def test_each_page_is_followed_by_a_rest_of_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times, rests = iter(range(1000)), list[float]()
    monkeypatch.setattr(cpu, "clock", lambda: float(next(times)))
    monkeypatch.setattr(cpu, "time", SimpleNamespace(sleep=rests.append))
    memory = cpu.zeros(6 * cpu.PAGE).fill_(1)
    thread = cpu.use_huge_pages(memory)
    if thread is not None:
        thread.join(20)
    if not rests:
        pytest.skip("needs Linux 6.1")
    assert rests == [4.0] * 6
