"""Decoder layers of drafters in the C++ kernels against their modules, but for bfloat16 keys and values."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.cache.tree_cache import TreeCache
from mmspec.drafters.dflash import DFlashConfig, DFlashNetwork
from mmspec.drafters.eagle import EagleConfig, EagleNetwork
from mmspec.drafters.eagle3 import Eagle3Config, Eagle3Network
from mmspec.drafters.hidden_state import run
from mmspec.drafters.layer import NativeLayers, Rotary, Rotation, rotary_frequencies
from mmspec.ops import cpu_library

SHAPE: dict[str, Any] = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 96, "norm_eps": 0.1}
EAGLE3 = {**SHAPE, "layers": 2}
CLOSE = {"atol": 5e-3, "rtol": 5e-3}  # attention rounds to bfloat16
pytestmark = pytest.mark.skipif(not cpu_library.available(), reason="no C++ kernels")

NETWORKS: dict[str, Callable[[], Any]] = {
    "eagle": lambda: EagleNetwork(EagleConfig(**SHAPE)),
    "eagle, bias": lambda: EagleNetwork(EagleConfig(**SHAPE, qkv_bias=True, input_norm=True)),
    "flash": lambda: EagleNetwork(EagleConfig(**SHAPE, slots=3)),
    "eagle3": lambda: Eagle3Network(Eagle3Config(**EAGLE3)),
    "eagle3, normed residual": lambda: Eagle3Network(Eagle3Config(**EAGLE3, norm_before_residual=True)),
}


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    network = make().eval().requires_grad_(False)
    for parameter in network.parameters():
        if parameter.ndim == 1:  # norms, and biases
            parameter.uniform_(0.5, 1.5)
    return network


def rotation_at(positions: Tensor) -> Rotation:
    rotary = Rotary(rotary_frequencies(SHAPE["head_dim"], 10000.0))
    rotary.reserve(64, torch.zeros(1))
    return rotary(positions)


def native_of(network: Any) -> NativeLayers:
    return NativeLayers([layer.parts for layer in network.layers], network.config, "float32")


@pytest.mark.parametrize("name", NETWORKS)
def test_a_prompt_and_a_tree_equal_the_modules(name: str) -> None:
    network = seeded(NETWORKS[name])
    native, middle = native_of(network), getattr(network.config, "slots", 1) > 1
    width = 128 if name.startswith("eagle3") else 64
    caches = [TreeCache(len(network.layers)) for _ in range(2)]
    x = torch.randn(2, 9, width)
    prompt = rotation_at(torch.arange(9))
    got, expected = native(x, prompt, None, caches[0], middle), run(network, x, prompt, None, caches[1])
    torch.testing.assert_close(got, expected, **CLOSE)
    for cache in caches:
        cache.commit_prompt(9, None, 2)
    x, depth = torch.randn(2, 4, width), torch.tensor([0, 1, 1, 2])
    reach = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    allowed = torch.cat([torch.ones(4, 9, dtype=torch.bool), reach], dim=1).expand(2, 1, -1, -1)
    places = rotation_at((9 + depth)[None])
    got, expected = native(x, places, allowed, caches[0], middle), run(network, x, places, allowed, caches[1])
    torch.testing.assert_close(got, expected, **CLOSE)


def test_context_and_block_of_dflash_equal_the_modules() -> None:
    config = DFlashConfig(**SHAPE, target_layer_ids=[0, 1], mask_token_id=3, block_size=4, layers=2)
    network = seeded(lambda: DFlashNetwork(config))
    native, ours, theirs = native_of(network), TreeCache(2), TreeCache(2)
    context, places = torch.randn(3, 60, 64), rotation_at(torch.arange(60))  # two rows in the first 128
    native.write(context, places, ours)
    for layer, (keys, values) in zip(theirs.layers, network.context(context, places), strict=True):
        layer.update(keys, values)
    for cache in (ours, theirs):
        cache.commit_prompt(60, None, 3)
    block, allowed, places = torch.randn(3, 4, 64), torch.ones(3, 1, 4, 64).bool(), rotation_at(torch.arange(60, 64))
    got = network.norm(native(block, places, allowed, ours))
    torch.testing.assert_close(got, run(network, block, places, allowed, theirs), **CLOSE)


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_rows_have_the_same_bits_alone(kind: str) -> None:
    network = seeded(NETWORKS["eagle3"])
    native = NativeLayers([layer.parts for layer in network.layers], network.config, kind)
    x, places = torch.randn(1, 6, 128), rotation_at(torch.arange(6))
    whole, cache = native(x, places, None, TreeCache(2)), TreeCache(2)
    for step in range(6):
        part = native(x[:, step : step + 1], rotation_at(torch.tensor([step])), None, cache)
        assert torch.equal(part[:, 0], whole[:, step])
        cache.commit_prompt(1, None, 1) if step == 0 else cache.commit(torch.zeros(1, 1).long(), [[0]])


def test_copies_compute_the_same() -> None:
    network = seeded(NETWORKS["eagle3, normed residual"])
    native, x, places = native_of(network), torch.randn(1, 3, 128), rotation_at(torch.arange(3))
    copied = pickle.loads(pickle.dumps(native))
    assert torch.equal(copied(x, places, None, TreeCache(2)), native(x, places, None, TreeCache(2)))


def test_shapes_that_the_kernels_do_not_take() -> None:
    assert NativeLayers.takes(EagleConfig(**SHAPE))
    assert not NativeLayers.takes(EagleConfig(**{**SHAPE, "mlp": 80}))
    assert not NativeLayers.takes(EagleConfig(**{**SHAPE, "head_dim": 8}))
