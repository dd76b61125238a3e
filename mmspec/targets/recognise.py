"""What modules of transformers compute: hooks, activation functions, gains of norms, and routers of experts."""

from __future__ import annotations

import copy
from inspect import signature
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.ops import cpu

CAPTURE = "transformers.utils.output_capturing"
"""Module of the hooks that transformers installs in order to return hidden states or attentions."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_EPSILONS = 0.0, 1e-6
_SPREADS = (1.0, 0.0), (4.0, 0.0), (1.0, -10.0)  # deviations and means of logits: with the last, epsilons differ


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has a forward of its own (accelerate) or hooks, except the hooks that transformers installs to
    return hidden states or attentions."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return "forward" in vars(module) or any(getattr(hook, "__module__", None) != CAPTURE for hook in hooks)


def gate_of(function: Any) -> str | None:
    """The kernels' name of an activation function; None if they do not support it."""
    x = torch.linspace(-3, 3, 7, dtype=torch.float32)
    known = {"silu": nn.functional.silu(x), "gelu": nn.functional.gelu(x, approximate="tanh")}
    known["squared_relu"] = x.relu().square()
    return next((name for name, expected in known.items() if torch.allclose(function(x), expected)), None)


def switches(module: Any) -> list[tuple[str, Any]]:
    """Attributes that may change a module's computation, such as SmolLM3's rotary switch."""
    known = vars(module).items()
    return sorted(
        (name, one) for name, one in known if isinstance(one, bool | int | float | str) and name != "layer_idx"
    )


def gain_of(norm: Any) -> Tensor:
    """Multiplier of a transformers RMSNorm, (features,) float32: its weight, or 1 + weight in Gemma."""
    gain = norm.weight.detach().float()
    plain = copy.copy(norm)  # in bfloat16, adding 1 to a large weight may have no effect
    plain._parameters = {"weight": nn.Parameter(gain, requires_grad=False)}
    applied = plain(torch.ones_like(gain))
    return gain + 1 if (applied - gain - 1).abs().max() < (applied - gain).abs().max() else gain


def epsilon_of(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


@torch.inference_mode()
def router_of(module: Any, count: int) -> tuple[Any, Any]:
    """The router of a module with experts, and its descriptor, a result of ``cpu.router_weights``.

    Args:
        module: its router is its child with ``top_k``; a correction of scores is a tensor of either.
        count: number of experts.

    Raises:
        ValueError: the router is missing, or the kernels do not reproduce its choice and weights.
    """
    router = next((part for part in module.children() if hasattr(part, "top_k")), None)
    weight = getattr(router, "weight", None)
    if router is None or weight is None or len(weight) != count or weight.shape[1] < count:
        raise ValueError(f"expected a router with one weight for {count} experts: got {type(module).__name__}")
    correction = _correction_of(module, router)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    logits = torch.cat([random(16, count) * spread + mean for spread, mean in _SPREADS])
    inputs = torch.zeros(len(logits), weight.shape[1], dtype=torch.float32)
    inputs[:, :count] = logits
    given = None if correction is None else random(count) / 4
    memo: dict[int, Any] = {id(weight): nn.Parameter(torch.eye(*weight.shape, dtype=torch.float32))}
    if correction is not None and given is not None:
        memo[id(correction)] = given.view(correction.shape)
    if getattr(router, "bias", None) is not None:
        memo[id(router.bias)] = nn.Parameter(torch.zeros(count, dtype=torch.float32))
    plain = copy.deepcopy(router, memo)
    takes_correction = len(signature(plain.forward).parameters) > 1
    _, factors, chosen = plain(inputs, *([given] if takes_correction else []))
    expected = torch.zeros_like(logits).scatter(1, chosen, factors.float())
    fixed = dict(
        groups=getattr(router, "num_group", None) or 1,
        used_groups=getattr(router, "topk_group", None) or 1,
        scale=float(getattr(router, "routed_scaling_factor", 1.0)),
    )
    for sigmoid, normalised, best, epsilon in product((False, True), (True, False), (1, 2), _EPSILONS):
        options: Any = dict(sigmoid=sigmoid, normalised=normalised, group_best=best, epsilon=epsilon, **fixed)
        places, weights = cpu.chosen_experts(cpu.router_weights(count, router.top_k, given, **options), logits)
        if torch.allclose(torch.zeros_like(logits).scatter(1, places, weights), expected, rtol=1e-4, atol=0):
            own = None if correction is None else correction.detach().float().flatten().contiguous()
            return router, cpu.router_weights(count, router.top_k, own, **options)
    raise ValueError(f"the kernels do not reproduce {type(router).__name__}")


def _correction_of(module: nn.Module, router: nn.Module) -> Tensor | None:
    """A tensor named as a bias, besides the bias of the router's logits."""
    tensors = [*module._buffers.items(), *module._parameters.items()]
    for name, part in router.named_modules():
        tensors += [*part._buffers.items(), *(part._parameters.items() if name else ())]
    return next((tensor for name, tensor in tensors if tensor is not None and name.endswith("bias")), None)
