"""Non-blocking host-to-device copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_device(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.as_tensor(numbers, dtype=dtype, device=device)`` for numbers or a CPU tensor, without a host sync on
    CUDA, by copying from pinned memory. Floats require a dtype."""
    made = torch.as_tensor(numbers, dtype=dtype)
    return made.to(device) if device.type != "cuda" else made.pin_memory().to(device, non_blocking=True)
