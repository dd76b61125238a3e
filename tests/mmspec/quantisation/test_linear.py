"""Packed linear layers: their weights, their products, and rows that do not depend on the number of rows."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import mmspec
from mmspec.ops import cpu_library
from mmspec.quantisation.blocks import BlockLinear
from mmspec.quantisation.linear import GROUP, HalfLinear, PackedLinear, quantise_int4
from mmspec.targets import packing
from mmspec.targets.packing import KINDS, drafter_kind, pack_drafter, packed

SHAPES = [(192, 576), (576, 1536), (48, 64)]


@pytest.fixture(autouse=True, params=["auto", "reference"])
def kernels(request, monkeypatch):
    """C++ kernels, and torch's own."""
    monkeypatch.setenv("MMSPEC_KERNELS", request.param)
    if request.param == "auto" and not cpu_library.available():
        pytest.skip(f"C++ kernels: {cpu_library.problem()}")


def layer_of(kind: str, rows: int, columns: int, bias: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(rows + columns)
    layer = nn.Linear(columns, rows, bias=bias)
    return packed(layer, kind), layer.weight.detach()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_for_any_number_of_rows(kind, rows, columns):
    layer, _ = layer_of(kind, rows, columns)
    x = torch.randn(33, columns)
    whole = layer(x)
    for count in (1, 2, 3, 4, 5, 7, 8, 16, 17, 32):
        assert torch.equal(layer(x[:count]), whole[:count])
        assert torch.equal(layer(x[1 : count + 1])[0], whole[1])


def test_without_avx512_products_in_float16_are_of_whole_blocks_of_rows(monkeypatch):
    """FBGEMM's kernel of two rows rounds differently."""
    layer, _ = layer_of("float16", 48, 64)
    if not isinstance(layer, HalfLinear):
        pytest.skip("needs FBGEMM")
    x = torch.randn(13, 64)
    expected = layer(x)
    for capability, rows in (("AVX512", 13), ("AVX2", 18)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
            torch.testing.assert_close(layer(x), expected)
        shapes = [event.input_shapes[0] for event in profile.events() if event.name.endswith("linear_dynamic_fp16")]
        assert shapes == [[rows, 64]]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize(("kind", "error"), [("bfloat16", 2**-8), ("float16", 2**-11), ("int8", 0.01), ("int4", 0.13)])
def test_products_are_those_of_the_weight(kind, error, rows, columns):
    layer, weight = layer_of(kind, rows, columns, bias=True)
    x = torch.randn(2, 3, columns)
    assert (layer.weight.float() - weight).abs().max() <= (error + 2**-8) * weight.abs().max()
    expected = nn.functional.linear(x, layer.weight.float(), layer.bias.float())
    torch.testing.assert_close(layer(x), expected, atol=0.03, rtol=0.02)
    assert layer(x).dtype == torch.float32
    assert layer(x.bfloat16()).dtype == layer.takes


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_another_width_are_refused_as_by_torch(kind):
    layer, _ = layer_of(kind, 96, 64)
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_rows_and_state_are_those_of_the_layer(kind):
    layer, _ = layer_of(kind, 96, 64, bias=True)
    x = torch.randn(5, 64)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    for index in (torch.arange(0, 96, 3)[:16], slice(64), slice(16, 64), slice(0, 96, 2), slice(200)):
        part = layer.rows(index)
        torch.testing.assert_close(part(x), layer(x)[:, index])
        torch.testing.assert_close(part.unpacked().bias, layer.bias[index].bfloat16())
    if isinstance(layer, BlockLinear):
        layer.takes = torch.float32  # as of logits
        assert {layer.rows(index)(x.bfloat16()).dtype for index in (slice(64), slice(16, 64))} == {torch.float32}
        torch.testing.assert_close(layer.rows(slice(40))(x), layer(x)[:, :40])
        assert layer.rows(slice(64))._blocks.data_ptr() == layer._blocks.data_ptr()
    torch.testing.assert_close(layer.state_dict()["weight"], layer.weight)
    with pytest.raises(mmspec.UserError, match="stay on the CPU"):
        layer.to(torch.float32)
    with pytest.raises(mmspec.UserError, match="cannot be replaced"):
        layer.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_that_were_quantised_to_four_bits_keep_their_codes(symmetric):
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (8, 4, GROUP))
    codes[..., 0], codes[..., 1] = 0, (13 if symmetric else 15)  # Q4_0 uses code 0 in each group, Q4_1 also code 15
    if symmetric:
        codes = codes.clamp(max=13)
    scale = torch.rand(8, 4, 1) * 0.01 + 0.001
    first = -8 * scale if symmetric else -scale * (3 + 9 * torch.rand(8, 4, 1))
    weight = (codes * scale + first).flatten(1)
    found, step, zero = quantise_int4(weight)
    assert torch.equal(found.long(), codes.flatten(1))
    again = (found.unflatten(1, (-1, GROUP)) - 8.0) * step[..., None] + zero[..., None]
    torch.testing.assert_close(again.flatten(1), weight, atol=1e-7, rtol=1e-5)


def test_a_drafters_network_follows_its_target():
    network = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    expected = network.bfloat16()[0].weight.detach().clone()
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        like = torch.zeros(1, dtype=dtype)
        pack_drafter(network, like, drafter_kind(SimpleNamespace(model=nn.Module()), like))
        assert network(torch.zeros(2, 32, dtype=dtype)).dtype == dtype
        assert torch.equal(network[0].weight.bfloat16(), expected)


def test_which_layers_of_a_drafter_are_packed_and_how(kernels, monkeypatch):
    """As int8 for a quantised target, as bfloat16 where that is faster, never on a GPU."""
    network = nn.Sequential(nn.Linear(32, 48), type("Doubled", (nn.Linear,), {})(48, 32))
    pack_drafter(network, torch.zeros(1), "int8")
    assert isinstance(network[0], PackedLinear)
    assert type(network[1]).__name__ == "Doubled"
    int8 = "int8" if cpu_library.available() else None
    for fast, kind, like, expected in (
        (True, "int4", torch.zeros(1), int8),
        (True, "bfloat16", torch.zeros(1), None),
        *((fast, "bfloat16", torch.zeros(1).bfloat16(), "bfloat16" if fast else None) for fast in (False, True)),
        (True, "int8", torch.zeros(1, dtype=torch.bfloat16, device="meta"), None),
    ):
        monkeypatch.setattr(packing, "packs_bfloat16", lambda fast=fast: fast)
        model = nn.Sequential(packed(nn.Linear(32, 48), kind))
        assert drafter_kind(SimpleNamespace(model=model), like) == expected


@pytest.mark.parametrize(
    ("rows", "columns", "kind"), [(48, 64, "int4"), (40, 64, "bfloat16"), (48, 48, "bfloat16"), (48, 40, "bfloat16")]
)
def test_shapes_that_torchs_int4_kernel_does_not_take_are_bfloat16(rows, columns, kind, kernels, monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")
    assert type(packed(nn.Linear(columns, rows), "int4")) is KINDS[kind]
