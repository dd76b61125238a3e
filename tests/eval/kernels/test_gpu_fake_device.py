"""The GPU benchmark on a fake CUDA device: shapes fit, devices are not mixed, all passes can be captured."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import mmspec
from mmspec.core.budget import CostTable
from mmspec.core.target import Prompt
from mmspec.engine import budget as engine_budget
from mmspec.engine.engine import Engine
from mmspec.engine.request_state import Wakeup
from mmspec.eval import gpu
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.kernels import gpu_kernels, gpu_models
from mmspec.eval.scale_up import drafters as scaled
from mmspec.eval.scale_up.models import Weights, shape_of
from mmspec.pipeline import Pipeline

pytest.importorskip("triton")
from tests.fake_cuda import fake_cuda, on_fake_cuda

FULL = replace(gpu.FULL, new=4, groups=1, calls=2)
QUICK = replace(gpu.QUICK, new=4, calls=2)
MODELS = {False: "tiny-llava", True: "tiny-hybrid"}  # by whether they are hybrids


def _empty(tensor, memo):
    """A tensor like another one, without copying its contents."""
    memo[id(tensor)] = new = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return torch.nn.Parameter(new, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else new


@pytest.fixture
def without_contents(monkeypatch):
    """Skips all checks of values, and reads all files before the fake device is in use."""
    small = {
        name: mmspec.load(name, drafter=None, dtype="float32", device="cpu") for name in ("tiny-llava", "tiny-hybrid")
    }
    folders = {name: pipe.model.config.name_or_path for name, pipe in small.items()}
    drafters = {specs: parse_drafters(specs, folders[name]) for name, specs in gpu.SOURCES.values()}
    prompts = {}
    for hybrid, name in MODELS.items():
        for batch in (1, 2, 8):
            prompts[name, batch] = small[name].encode(gpu_models.gpu_requests(hybrid, batch))

    def encode(pipe, requests, **options):
        prompt = prompts[requests[0]["prompt"], len(requests)]
        return Prompt(on_fake_cuda(prompt.input_ids), None, {k: on_fake_cuda(v) for k, v in prompt.inputs.items()})

    patch = monkeypatch.setattr
    patch(scaled.mmspec, "load", lambda name, **_: small[name])
    patch(scaled, "parse_drafters", lambda specs, folder: drafters[specs])
    quick = {preset: shape_of(small[name].model.config.get_text_config()) for preset, (name, _) in gpu.SOURCES.items()}
    patch(gpu.GpuBenchmark, "shape", lambda self, preset: quick[preset] if self.quick else gpu.SHAPES[preset])
    patch(gpu_models, "gpu_requests", lambda hybrid, batch: [{"prompt": MODELS[hybrid]}] * batch)
    patch(Pipeline, "encode", encode)
    # The fake device is one thread's: clients run the steps themselves.
    engines = set()
    patch(Engine, "_wake", lambda engine: engines.add(engine))

    def step(_, ready):
        for engine in engines:
            while engine._has_work():
                engine._turn()
        assert ready()

    patch(Wakeup, "wait", step)
    patch(engine_budget, "stored_cost", lambda *_: CostTable((1, 64), (1e-3, 1.1e-3)))
    tick = count(1)
    for module in (gpu_kernels, gpu_models):  # each call takes longer than the one before
        patch(module, "device_seconds", lambda run, *_, **__: [(run(), 1e-3 * next(tick))[1]])
    # Nothing can be compiled there.
    patch(gpu_models, "GENERATE_MODES", {"dynamic": {}, "static": gpu_models.GENERATE_MODES["static"]})
    patch(gpu_kernels, "call_seconds", lambda calls, device: [call() for call in calls] and 1e-3)
    patch(gpu_kernels, "difference", lambda *_, **__: 0.0)
    patch(gpu_models, "_idle_ms", lambda *_: 0.0)
    patch(Weights, "matrix", lambda weights, small, out, into, *_: weights.random(out.size, into.size))
    patch(Weights, "vector", lambda weights, small, size, *_: weights.random(*size))
    patch(Weights, "norm", lambda weights, small, out, *_: weights.random(out.size))
    patch(torch, "Generator", lambda *_: SimpleNamespace(manual_seed=lambda seed: None))
    patch(torch.Tensor, "__deepcopy__", _empty)
    patch(torch.nn.Parameter, "__deepcopy__", _empty)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        patch(torch.cuda, name, lambda *_: None)
    patch(torch.cuda, "device", lambda *_: nullcontext())
    for name in ("max_memory_allocated", "memory_reserved", "memory_allocated"):
        patch(torch.cuda, name, lambda *_: 1)
    patch(torch.cuda, "mem_get_info", lambda *_: (int(60e9), int(80e9)))


def check_parts(plan, quick, monkeypatch):
    """All parts but those that load models by themselves or describe the device, in one process."""
    with torch.inference_mode(), fake_cuda(monkeypatch, strict=False) as device:
        benchmark = gpu.GpuBenchmark(plan, torch.device("cuda"), 3600, quick)
        parts = {
            name: list(part())
            for name, (_, part) in benchmark.parts().items()
            if name.split()[0] not in ("machine", "tokens")
        }
    failed = [row["where"] for rows in parts.values() for row in rows if "where" in row]
    assert not failed, failed[0]
    for preset, (_, drafters) in gpu.SOURCES.items():
        methods = {row["method"] for row in parts[f"answers {preset}"]}
        assert {"plain", *(f"{name} adaptive" for name in drafters.split(","))} <= methods
    assert device.captured > 20
    # Steps are captured beforehand, and a request's are not, but for unions and the like.
    for part in ("answers 7b", "batch 7b", "sampling 7b", "answers 8b-hybrid"):
        assert [row["captures"] for row in parts[part]] == [0] * len(parts[part]), part
    return parts


@pytest.mark.long
def test_a_rehearsal_on_a_fake_device(without_contents, monkeypatch):
    parts = check_parts(QUICK, True, monkeypatch)
    for part in ("passes 7b", "passes 8b-hybrid"):
        for row in parts[part][1:]:
            assert row["draft_ms"].keys() > {"eagle3", "dflash"}


@pytest.mark.slow
def test_the_benchmark_runs_in_real_shapes(without_contents, monkeypatch):
    check_parts(FULL, False, monkeypatch)
