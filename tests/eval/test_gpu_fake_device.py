"""Parts of the GPU benchmark on a fake CUDA device: shapes fit, devices are not mixed, all steps can be captured."""

from concurrent.futures import Future
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from mmspec import pipeline
from mmspec.engine.engine import Engine
from mmspec.eval import gpu

pytest.importorskip("triton")
from tests.fake_cuda import fake_cuda


@pytest.mark.long
def test_a_rehearsal_on_a_fake_device(monkeypatch):
    patch, engines, tick = monkeypatch.setattr, set(), count(1)
    # The fake device is one thread's: clients run the steps themselves.
    patch(Engine, "_wake", lambda engine: engines.add(engine))

    def result(answer):
        for engine in engines:
            while engine._has_work():
                engine._turn()
        return Future.result(answer, 0)

    patch(pipeline, "Future", type("Answer", (Future,), {"result": result}))
    patch(gpu, "call_seconds", lambda calls, device: [call() for call in calls] and 1e-3)
    patch(gpu, "device_seconds", lambda run, *_: [(run(), 1e-3 * next(tick))[1]])
    for name in ("normal_", "uniform_"):
        patch(torch.Tensor, name, lambda x, *_, **__: x)
    patch(torch, "Generator", lambda *_: SimpleNamespace(manual_seed=lambda seed: None))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        patch(torch.cuda, name, lambda *_: None)
    patch(torch.cuda, "device", lambda *_: nullcontext())
    for name in ("max_memory_allocated", "memory_reserved", "memory_allocated"):
        patch(torch.cuda, name, lambda *_: 1)
    patch(torch.cuda, "mem_get_info", lambda *_: (int(60e9), int(80e9)))
    # Everything that is read is a one: prompts, too, and errors of kernels.
    patch(gpu, "Random", lambda _: SimpleNamespace(choices=lambda _, k: [1] * k, random=lambda: 0.0))
    drafters, kernels = gpu.random_drafters, gpu.step_kernels
    patch(gpu, "step_kernels", lambda *shape: [(*kernel[:4], 1.0) for kernel in kernels(*shape)])
    with torch.inference_mode(), fake_cuda(monkeypatch, strict=False) as device:
        plan = gpu.Plan(torch.device("cuda"), True, 0.8)
        parts = {name: list(gpu.PARTS[name][1](plan)) for name in ("passes-7b", "passes-hybrid", "kernels")}
        patch(gpu, "random_drafters", lambda target: {"msd": drafters(target)["msd"]})
        parts["answers-7b"] = list(gpu.PARTS["answers-7b"][1](plan))
    assert not [row for rows in parts.values() for row in rows if "failed" in row]
    assert device.captured > 20
    assert [row["captures"] for row in parts["answers-7b"]] == [0] * 4  # steps are captured beforehand
