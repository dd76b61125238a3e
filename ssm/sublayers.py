"""Recurrent mixers as residual sublayers of the C++ kernels (``mmspec.targets.sublayers``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmspec.targets.sublayers import Part

_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")
LANES = 16  # sizes of heads and states must be multiples


def delta(module: Any) -> Part | None:
    """Gated DeltaNet of Qwen3.5, and of Qwen3-Next, whose projections are interleaved."""
    names = next((names for names in _DELTA if all(hasattr(module, name) for name in names)), None)
    if names is None:
        return None
    return dict(
        kind="delta",
        inputs=[[getattr(module, name) for name in names]],
        interleaved=names == _DELTA[1],
        out=module.out_proj,
        inner_norm=(module.norm.weight.detach(), module.layer_norm_epsilon),
        tensors={**_convolution(module.conv1d), **_recurrence(module)},
        heads=module.num_v_heads,
        groups=module.num_k_heads,
        head_dim=_whole(module.head_v_dim),
        key_dim=_whole(module.head_k_dim),
        channels=module.conv_dim,
        width=module.conv_kernel_size,
    )


def mamba(module: Any) -> Part | None:
    """Mamba-2."""
    if not all(hasattr(module, name) for name in ("in_proj", "conv1d", "A_log", "dt_bias", "D", "n_groups")):
        return None
    tensors = {**_convolution(module.conv1d), **_recurrence(module), "skip": module.D.detach()}
    if hasattr(module, "mup_vector"):
        tensors["output_scale"] = module.mup_vector.flatten()
    weight, norms = getattr(module.norm, "weight", None), {}
    if weight is not None:
        size = getattr(module.norm, "group_size", weight.numel())  # absent from transformers 5.21
        groups = getattr(module.norm, "n_groups", None) or weight.numel() // size
        norms = dict(inner_norm=(weight.detach(), module.norm.variance_epsilon), norm_groups=groups)
    return dict(
        **norms,
        kind="mamba",
        inputs=[[module.in_proj]],
        out=module.out_proj,
        input_scale=float(getattr(module, "ssm_in_multiplier", 1.0)),
        tensors=tensors,
        heads=module.num_heads,
        groups=module.n_groups,
        head_dim=_whole(module.head_dim),
        key_dim=_whole(module.ssm_state_size),
        channels=module.conv_dim,
        width=module.conv_kernel_size,
    )


def short_convolution(module: Any) -> Part | None:
    """Gated short convolution of LFM2."""
    if {name for name, _ in module.named_children()} != {"conv", "in_proj", "out_proj"}:
        return None
    return dict(
        kind="convolution",
        inputs=[[module.in_proj]],
        out=module.out_proj,
        tensors=_convolution(module.conv),
        channels=_whole(module.conv.in_channels),
        width=module.conv.kernel_size[0],
    )


def _convolution(conv: Any) -> dict[str, Tensor]:
    bias = {} if conv.bias is None else {"tap_bias": conv.bias.detach()}
    return {"taps": conv.weight.detach().squeeze(1).t(), **bias}


def _recurrence(module: Any) -> dict[str, Tensor]:
    return {"decay": -module.A_log.detach().float().exp(), "step_bias": module.dt_bias.detach()}


def _whole(size: int) -> int:
    if size % LANES:
        raise ValueError(f"sizes of heads and states must be multiples of {LANES}: got {size}")
    return size
