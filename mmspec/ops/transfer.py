"""Non-blocking host-to-device copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """``torch.as_tensor(numbers, device=device)`` of numbers, or of a tensor on the CPU, without its host sync on CUDA:
    copies from pinned memory."""
    if device.type != "cuda":
        return torch.as_tensor(numbers, device=device)
    return torch.as_tensor(numbers).pin_memory().to(device, non_blocking=True)
