"""Mixtures of experts in packed weights, for the kernels of ``mmspec.ops.cpu``."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.ops import cpu
from mmspec.quantisation.blocks import BLOCKS
from mmspec.quantisation.formats import StoredRows
from mmspec.quantisation.linear import GROUP

WEIGHTS = "gate_up_proj", "down_proj"
"""Fused weights of transformers' experts: (experts, gates and ups, hidden) and (experts, hidden, features); in gpt-oss
transposed, with interleaved gate and up rows, and with biases."""

_BIASES = "gate_up_proj_bias", "down_proj_bias"


class PackedExperts(nn.Module):
    """Experts of a module of transformers, with its forward. A layer joins the rows of all experts.

    Args:
        gate_up: one layer with gates and ups, or two layers.
        count: number of experts.
        gating: options of ``cpu.expert_weights``.
    """

    def __init__(self, gate_up: Sequence[nn.Module], down: nn.Module, count: int, gating: Mapping[str, Any]) -> None:
        super().__init__()
        self.gate_up, self.down = nn.ModuleList(gate_up), down
        self.num_experts, self.gating = count, gating

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, factors = hidden_states.float().contiguous(), top_k_weights.float().contiguous()
        return cpu.expert_outputs(self.native, x, top_k_index.contiguous(), factors).to(hidden_states.dtype)

    @property
    def native(self) -> Any:
        """The weights for ``cpu.expert_outputs`` and ``cpu.sublayer_weights``."""
        layers: Any = *self.gate_up, self.down
        *parts, down = (layer.native for layer in layers)
        return cpu.expert_weights(parts, down, self.num_experts, **self.gating)


def reproduced_experts(model: nn.Module) -> Iterator[tuple[Any, str, Any, dict[str, Any]]]:
    """Parent, name, module and gating of experts that ``PackedExperts`` can replace."""
    known: dict[Hashable, dict[str, Any] | None] = {}
    for parent in model.modules():
        for name, module in parent.named_children():
            if set(module._parameters) not in ({*WEIGHTS}, {*WEIGHTS, *_BIASES}) or next(module.buffers(), None):
                continue
            key = type(module), type(getattr(module, "act_fn", None))
            if all(size % GROUP == 0 for weight in WEIGHTS for size in module.get_parameter(weight).shape[1:]):
                if key not in known:
                    known[key] = _gating_of(module)
                if (gating := known[key]) is not None:
                    yield parent, name, module, gating


def pack_experts(model: nn.Module) -> None:
    """Replace experts by ``PackedExperts`` with layers that are still to be packed."""
    for parent, name, module, gating in list(reproduced_experts(model)):
        *gate_up, down = _linears(module)
        setattr(parent, name, PackedExperts(gate_up, down, len(module.down_proj), gating))


def stacks_of(module: Any, name: str, weight: Tensor) -> list[Tensor]:
    """Rows of all experts, (experts * outputs, inputs), of a fused weight: together, or gates and ups."""
    whole = weight.mT if getattr(module, "is_transposed", False) else weight
    return [part.flatten(0, 1) for part in _parts(module, name, whole)]


def _parts(module: Any, name: str, whole: Tensor) -> list[Tensor]:
    alternate = name.startswith("gate_up") and not getattr(module, "is_concatenated", True)
    return [whole[:, ::2], whole[:, 1::2]] if alternate else [whole]


def _linears(module: Any) -> Iterator[nn.Linear]:
    """Layers whose weights are ``stacks_of`` a module's, or its ``stored`` rows."""
    for name, biases in zip(WEIGHTS, _BIASES, strict=True):
        stored: Sequence[StoredRows] = vars(module).get("stored", {}).get(name, ())
        weight, bias = module.get_parameter(name).detach(), getattr(module, biases, None)
        added = [None] * max(len(stored), 1) if bias is None else _parts(module, biases, bias.detach())
        stacks: Sequence[StoredRows | Tensor] = stored or stacks_of(module, name, weight)
        for index, rows in enumerate(stacks):
            layer = nn.Linear(1, 1, bias=False, device="meta")
            if isinstance(rows, StoredRows):
                layer.out_features, layer.in_features = len(rows.places), rows.features
                vars(layer)["stored"] = [rows]
            else:
                layer.out_features, layer.in_features = rows.shape
                layer.weight = nn.Parameter(rows, requires_grad=False)
            if (own := added[index]) is not None:
                layer.bias = nn.Parameter(own.flatten().contiguous(), requires_grad=False)
            yield layer


@torch.inference_mode()
def _gating_of(module: Any) -> dict[str, Any] | None:
    """The gating of experts; None if ``PackedExperts`` does not reproduce a few small experts with random weights."""
    generator, count = torch.Generator().manual_seed(0), 3

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    small = copy.copy(module)
    with torch.device("cpu"):  # transformers loads models in the context of another
        shapes = {"gate_up_proj": (4 * GROUP, GROUP), "down_proj": (GROUP, 2 * GROUP)}
        given = {name: random(count, *shape) / 2 for name, shape in shapes.items()}
        if getattr(module, "is_transposed", False):
            given = {name: weight.mT for name, weight in given.items()}
        if len(module._parameters) > len(WEIGHTS):
            given |= {name: random(count, shape[0]) for name, shape in zip(_BIASES, shapes.values(), strict=True)}
        small._parameters = {name: nn.Parameter(one.contiguous(), requires_grad=False) for name, one in given.items()}
        small.num_experts = count
        vars(small).pop("stored", None)
        inputs = random(4, GROUP), torch.arange(8).view(4, 2) % count, random(4, 2).abs()
        try:
            expected = small(*inputs)
        except (AttributeError, TypeError, RuntimeError, ValueError, IndexError):
            return None
        *gate_up, down = (BLOCKS["float32"](layer.weight, layer.bias) for layer in _linears(small))
        limited = {name: getattr(module, name, 0.0) for name in ("alpha", "limit")}
        for gating in ({}, {"gelu": True}, limited):
            computed = PackedExperts(gate_up, down, count, gating)(*inputs)
            if torch.allclose(computed, expected, atol=1e-4, rtol=1e-4):
                return gating
    return None
