"""Detection of Llama, Qwen3 and Gemma 3 style decoder layers and of routers, by submodules and by comparing outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import signature
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.ops import cpu

CAPTURE = "transformers.utils.output_capturing"
"""Module of the hooks that transformers installs in order to return hidden states or attentions."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_GEMMA_PARTS = {*_PARTS, "pre_feedforward_layernorm", "post_feedforward_layernorm"}
HEAD_NORMS = ("q_norm", "k_norm")
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_FEATURES = 64  # hidden features of the reduced test layer
_EPSILONS = 0.0, 1e-6
_SPREADS = (1.0, 0.0), (4.0, 0.0), (1.0, -10.0)  # deviations and means of logits: with the last, epsilons differ


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has a forward of its own (accelerate) or hooks, except the hooks that transformers installs to
    return hidden states or attentions."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return "forward" in vars(module) or any(getattr(hook, "__module__", None) != CAPTURE for hook in hooks)


def _has_parts(layer: Any) -> bool:
    """Whether a layer has exactly the submodules of a Llama, Qwen3 or Gemma 3 layer."""
    names = lambda module: {name for name, _ in module.named_children()}  # noqa: E731
    if names(layer) not in (_PARTS, _GEMMA_PARTS) or names(layer.mlp) - _MLP:
        return False
    projections = {*PROJECTIONS, "o_proj"}
    if names(layer.self_attn) not in (projections, projections.union(HEAD_NORMS)):
        return False
    if getattr(layer.self_attn, "attn_logit_softcapping", None):  # Gemma 2; small scores do not reveal it
        return False
    linear = [
        *(getattr(layer.self_attn, name) for name in projections),
        layer.mlp.gate_proj,
        layer.mlp.up_proj,
        layer.mlp.down_proj,
    ]
    own = [*layer.parameters(recurse=False), *layer.self_attn.parameters(recurse=False)]
    return all(type(part) is nn.Linear for part in linear) and not own


def gate_of(function: Any) -> str | None:
    """The kernels' name of an activation function; None if they do not support it."""
    x = torch.linspace(-3, 3, 7, dtype=torch.float32)
    known = {"silu": nn.functional.silu(x), "gelu": nn.functional.gelu(x, approximate="tanh")}
    return next((name for name, expected in known.items() if torch.allclose(function(x), expected)), None)


def norms_of(layer: Any) -> dict[str, Any]:
    """The norms of hidden states, by their names in ``FusedLayer``."""
    if not hasattr(layer, "pre_feedforward_layernorm"):
        return {"attention": layer.input_layernorm, "mlp": layer.post_attention_layernorm}
    after = {"attention_after": layer.post_attention_layernorm, "mlp_after": layer.post_feedforward_layernorm}
    return {"attention": layer.input_layernorm, "mlp": layer.pre_feedforward_layernorm, **after}


Rotation = tuple[Tensor, Tensor]


def reproducible(decoder: nn.Module, run: Callable[[Any, Tensor, Rotation], Tensor]) -> bool:
    """Whether all layers have a supported structure and ``run`` reproduces each kind of layer on random hidden states
    at widely spaced positions.

    Args:
        run: called with a copy of the layer in float32 on the CPU, with fewer features; causal hidden states, (batch,
            tokens, features); and cosines and sines, (batch, tokens, head_dim).
    """
    rotary, layers = getattr(decoder, "rotary_emb", None), getattr(decoder, "layers", None)
    if rotary is None or not isinstance(layers, nn.ModuleList) or not all(map(_has_parts, layers)):
        return False
    kinds = {(type(layer), *switches(layer.self_attn)): layer for layer in layers}
    return all(_reproduces(layer, rotary, run) for layer in kinds.values())


def switches(module: Any) -> list[tuple[str, Any]]:
    """Attributes that may change a module's computation, such as SmolLM3's rotary switch."""
    known = vars(module).items()
    return sorted(
        (name, one) for name, one in known if isinstance(one, bool | int | float | str) and name != "layer_idx"
    )


@torch.inference_mode()
def _reproduces(layer: Any, rotary: nn.Module, run: Callable[[Any, Tensor, Rotation], Tensor]) -> bool:
    plain, device = _small(layer), next(rotary.buffers()).device
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, plain.mlp.down_proj.out_features, dtype=torch.float32, generator=generator)
    positions = torch.tensor([[0, 1, 2, 3, 4], [3, 5, 9, 20, 50]], dtype=torch.long)
    try:
        rotation = rotation_of(rotary, layer, x.to(device), positions.to(device))
        rotation = rotation[0].cpu(), rotation[1].cpu()
        expected = plain(x, position_ids=positions, position_embeddings=rotation)
        computed = run(plain, x, rotation)
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError):
        return False
    rotated_once = rotation[0].ndim == 3  # otherwise per position axis (images)
    return rotated_once and isinstance(expected, Tensor) and torch.allclose(computed, expected, atol=1e-4, rtol=1e-4)


def rotation_of(rotary: Any, layer: Any, x: Tensor, positions: Tensor) -> Rotation:
    """Cosines and sines for a layer; some decoders have several sets of frequencies, chosen by layer."""
    takes_type = "layer_type" in signature(rotary.forward).parameters
    cos, sin = rotary(x, position_ids=positions, **({"layer_type": layer.self_attn.layer_type} if takes_type else {}))
    return cos, sin


def _small(layer: Any) -> Any:
    """A copy of a layer in float32 on the CPU, reduced to the first features of its hidden states and its MLP."""
    attention, mlp = layer.self_attn, layer.mlp
    some, whole = slice(_FEATURES), slice(None)
    parts = {getattr(attention, name): (whole, some) for name in PROJECTIONS}
    parts |= {attention.o_proj: (some, whole)}
    parts |= dict.fromkeys((mlp.gate_proj, mlp.up_proj, mlp.down_proj), (some, some))
    memo: dict[int, Any] = {}
    for part, (rows, columns) in parts.items():
        memo[id(part.weight)] = nn.Parameter(part.weight.detach()[rows, columns].float().cpu(), requires_grad=False)
        if part.bias is not None:
            memo[id(part.bias)] = nn.Parameter(part.bias[rows].float().cpu(), requires_grad=False)
    heads = [getattr(attention, name) for name in HEAD_NORMS if hasattr(attention, name)]
    for norm, features in (*((norm, some) for norm in norms_of(layer).values()), *((norm, whole) for norm in heads)):
        memo[id(norm.weight)] = nn.Parameter(norm.weight[features].float().cpu(), requires_grad=False)
    small = copy.deepcopy(layer, memo)
    for part in small.modules():
        if isinstance(part, nn.Linear):
            part.out_features, part.in_features = part.weight.shape
    return small


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
        ValueError: there is no such router, or the kernels do not reproduce its choice and weights.
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
