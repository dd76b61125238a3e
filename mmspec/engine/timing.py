"""Times on a device: by CUDA events where kernels run asynchronously, else by the host's clock."""

from __future__ import annotations

from time import perf_counter

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """Record the current point of the device's stream."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Mark, end: Mark) -> float:
    """Seconds between two marks of one device, which must have been synchronised since."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    return start.elapsed_time(end) / 1000.0  # type: ignore[union-attr, arg-type]
