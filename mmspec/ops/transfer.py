"""Numbers of the host on a device, without making the host wait for what the device is doing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """A tensor of (nested lists of) numbers, as ``torch.tensor(numbers, device=device)`` makes it.

    To a CUDA device that call copies from memory that can be paged out, and waits until all earlier work is done.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, device=device)
    return torch.tensor(numbers).pin_memory().to(device, non_blocking=True)
