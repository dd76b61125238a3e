"""The GPU benchmark in its real shapes on a fake CUDA device: shapes fit, devices are not mixed, all passes can be
captured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import mmspec
from mmspec.core.budget import CostTable
from mmspec.core.target import Prompt
from mmspec.engine.engine import Engine
from mmspec.engine.request_state import Wakeup
from mmspec.eval import gpu
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.kernels import gpu_kernels, gpu_models
from mmspec.eval.kernels.gpu_parts import run_parts
from mmspec.eval.scale_up import drafters as scaled
from mmspec.eval.scale_up.axes import Weights
from mmspec.pipeline import Pipeline

pytest.importorskip("triton")
from tests.fake_cuda import fake_cuda, on_fake_cuda

PLAN = replace(gpu.FULL, batches=(1, 2), prefixes=(1000,), nodes=(16,), new=4, rounds=1)
MODELS = {False: "tiny-llava", True: "tiny-hybrid"}  # by whether they are hybrids


def _once(call, device):
    call()
    return 1e-3


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
    drafters = {specs: parse_drafters(specs, folders[name]) for name, specs in PLAN.shapes.values()}
    requests = {
        (hybrid, batch): gpu_models.gpu_requests(hybrid, batch) for hybrid in (False, True) for batch in PLAN.batches
    }
    prompts = {
        (MODELS[hybrid], batch): small[MODELS[hybrid]].encode(rows) for (hybrid, batch), rows in requests.items()
    }

    def encode(pipe, requests, **options):
        prompt = prompts[requests[0]["prompt"], len(requests)]
        return Prompt(on_fake_cuda(prompt.input_ids), None, {k: on_fake_cuda(v) for k, v in prompt.inputs.items()})

    patch = monkeypatch.setattr
    patch(scaled.mmspec, "load", lambda name, **_: small[name])
    patch(scaled, "parse_drafters", lambda specs, folder: drafters[specs])
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
    patch(gpu_models, "cost_table", lambda *_, **__: CostTable((1, 64), (1e-3, 1.1e-3)))
    for module in (gpu_kernels, gpu_models):
        patch(module, "median_seconds", _once)
    patch(gpu_kernels, "check_against_reference", lambda call, *_: call())
    patch(gpu_kernels, "compared_row", lambda timer, call, size, *_, **facts: timer.row(call, size, **facts))
    patch(torch.testing, "assert_close", lambda *_, **__: None)
    patch(torch, "equal", lambda *_: True)
    patch(Weights, "matrix", lambda weights, small, out, into, *_: weights.random(out.size, into.size))
    patch(Weights, "vector", lambda weights, small, size, *_: weights.random(*size))
    patch(Weights, "norm", lambda weights, small, out, *_: weights.random(out.size))
    patch(torch, "Generator", lambda *_: SimpleNamespace(manual_seed=lambda seed: None))
    patch(torch.Tensor, "__deepcopy__", _empty)
    patch(torch.nn.Parameter, "__deepcopy__", _empty)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        patch(torch.cuda, name, lambda *_: None)
    patch(torch.cuda, "max_memory_allocated", lambda *_: 1)
    patch(torch.cuda, "mem_get_info", lambda *_: (150e9, 150e9))


@pytest.mark.slow
def test_the_benchmark_runs_in_real_shapes(without_contents, monkeypatch):
    with torch.inference_mode(), fake_cuda(monkeypatch, strict=False) as device:
        benchmark = gpu.GpuBenchmark(PLAN, torch.device("cuda"), 3600, False)
        parts, content = benchmark.parts(), {"parts": {}}
        run_parts(parts, content, None, benchmark.device)
    failed = [row["where"] for part in content["parts"].values() for row in (part, *part["rows"]) if "where" in row]
    assert not failed, failed[0]
    assert content["parts"].keys() == parts.keys()
    for preset, (_, drafters) in PLAN.shapes.items():
        methods = {row["method"] for row in content["parts"][f"model {preset}"]["rows"] if "method" in row}
        assert {"plain", "transformers generate", *(f"{name}, adaptive" for name in drafters.split(","))} <= methods
    assert device.captured > 20
