"""From a name to a target: configuration, adapter, weights, processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from mmspec import plugins
from mmspec.errors import UserError
from mmspec.target import TransformersTarget

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGE = 1_000_000_000  # parameters from which float32 on a CPU would cost more memory than it is worth


def load_target(name: str, device: str = "auto", dtype: str = "auto", **options: Any) -> TransformersTarget:
    """Load a model of transformers as a target.

    Args:
        name: local folder or hub id.
        device, dtype: as for ``mmspec.load``.
        **options: passed on to ``from_pretrained`` (``revision``, ``trust_remote_code``, ...).

    Raises:
        UserError: nothing there, no adapter for its architecture, or an unknown device or dtype.
    """
    where = pick_device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise UserError(f"dtype must be auto, {', '.join(_DTYPES)}: got {dtype!r}")
    try:
        config = AutoConfig.from_pretrained(name, **options)
        adapter = plugins.target_class(config)
        model, processor = adapter.read(name, config, **options)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        looked = "local folder" if Path(name).exists() else "embedded model, local folder or reachable hub id"
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load model {name!r}: expected an {looked} of a supported model ({first_line})") from error
    if dtype != "auto":
        model = model.to(_DTYPES[dtype])
    elif where.type == "cpu" and model.num_parameters() < _LARGE:
        model = model.float()
    return adapter(model.to(where).eval(), processor)


def pick_device(device: str) -> torch.device:
    """``"auto"`` or a torch device name that exists here.

    Raises:
        UserError: no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
        torch.empty(0, device=picked)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device must be auto or one that torch can use here: got {device!r}") from error
    return picked
