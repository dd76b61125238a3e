"""Models larger than one device: layers dispatched to several devices, or weights sharded over the ranks of a job."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import distributed
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from mmspec.errors import UserError, missing, shown
from mmspec.jobs import ranks

_OFFLOADED = ("cpu", "disk")


def split_options(device_map: Any, tp_plan: Any, device: str) -> dict[str, Any]:
    """Options of ``from_pretrained`` that split a model; empty for a model on one device.

    Args:
        device_map, tp_plan, device: as for ``mmspec.load``.

    Raises:
        UserError: both are given, or one of them with a device; accelerate is not installed for ``device_map``; or
            ``tp_plan`` is given outside a job of several ranks.
    """
    if device_map is None and tp_plan is None:
        return {}
    if device_map is not None and tp_plan is not None:
        raise UserError("a model is either dispatched or sharded: got device_map and tp_plan")
    name = "device_map" if tp_plan is None else "tp_plan"
    if device != "auto":
        raise UserError(f"{name} places the model: expected device 'auto' with it, got {shown(device)}")
    given, entries = (device_map, "devices") if tp_plan is None else (tp_plan, "styles")
    if given != "auto" and not isinstance(given, dict):
        raise UserError(f'{name} must be "auto" or a dict of modules and {entries}: got {shown(given)}')
    if tp_plan is None:
        if find_spec("accelerate") is None:
            raise missing("device_map", "accelerate", "real")
        return {"device_map": device_map}
    if not distributed.is_initialized() and ranks() < 2:
        raise UserError("tp_plan shards a model over the ranks of a job: expected one of torchrun, got 1 rank")
    return {"distributed_config": DistributedConfig(tp_plan=tp_plan)}


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether the weights are sharded over ranks (tensor parallelism)."""
    return (model._tp_size or 1) > 1


def is_split(model: PreTrainedModel) -> bool:
    """Whether the model is dispatched by accelerate, or sharded: its weights are not all on its device."""
    return is_sharded(model) or _hook(model) is not None


def input_device(model: PreTrainedModel) -> torch.device:
    """The device that a model takes its inputs on and returns its logits on."""
    hook = _hook(model)
    if hook is None or hook.execution_device is None:
        return model.device
    place = hook.execution_device
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def computing_devices(model: PreTrainedModel) -> set[str]:
    """The devices that the layers of a model run on."""
    places: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    if _hook(model) is None:
        return {str(model.device)}
    main = str(input_device(model))
    return {main if str(place) in _OFFLOADED else str(place) for place in places.values()}


def _hook(model: PreTrainedModel) -> Any:
    """accelerate's hook that moves a dispatched model's inputs; None for a model on one device."""
    return getattr(model, "_hf_hook", None)
