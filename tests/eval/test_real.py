"""Times and divergences of passes, and times by the length of the prefix."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from mmspec.eval import real
from mmspec.eval.harness.peers import LlamaServer
from mmspec.eval.real import divergence, ratio
from mmspec.ops import cpu_library
from mmspec.targets.packing import pack_model
from mmspec.targets.transformers_target import TransformersTarget
from tests.compiled import needs_kernels
from tests.eval.llama_server import PROMPT_STEP, install
from tests.mmspec.targets.packed import model_of
from tests.tiny import shared_model


def test_divergence_is_the_mean_over_tokens_of_kl() -> None:
    target = TransformersTarget(shared_model("llama"))
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        own = target.model(ids).logits
    assert divergence(target, own, ids) == pytest.approx(0.0, abs=1e-7)
    assert divergence(target, own + 5.0, ids) == pytest.approx(0.0, abs=1e-5)  # the same distribution
    exact = torch.randn_like(own)
    p, q = exact.double().softmax(-1), own.double().softmax(-1)
    assert divergence(target, exact, ids) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)


def test_ratios_are_of_calls_in_the_same_round() -> None:
    assert ratio({"a": [4.0, 5.0, 8.0], "b": [6.0, 12.0, 14.0]}, "b", "a") == 1.75


def test_rows_are_medians_and_ratios_to_the_first_length(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9, 9, 1, 2, 3, 4, 2, 4])  # two lengths, first round not measured
    monkeypatch.setattr(
        real, "seconds_after", lambda *_: {"one": (t := next(seconds)), "tree": 3.0 * t, "prefill": 10.0 * t}
    )
    target = TransformersTarget(model_of(LlamaConfig))
    first, second = real.measure_prefixes({"int4": target}, [100, 400], rounds=3)
    assert first == {
        **{"form": "int4", "prefix": 100, "milliseconds": 2000, "tree": 6000, "passes": 3},
        **{"prefill": 5, "speed": 1, "prefill_speed": 1},
    }
    assert (second["prefix"], second["milliseconds"], second["prefill"]) == (400, 4000, 10)
    assert (second["speed"], second["prefill_speed"]) == (0.5, 2)


def test_a_prompt_and_two_sizes_of_passes_are_timed() -> None:
    target = TransformersTarget(model_of(LlamaConfig, vocab_size=2000))
    seconds = real.seconds_after(target, 12)
    assert seconds.keys() == {"prefill", "one", "tree"}
    assert min(seconds.values()) > 0
    assert target.runner.rows == 0


def packed() -> TransformersTarget:
    model = model_of(LlamaConfig, vocab_size=2000, max_position_embeddings=1024)
    pack_model(model, "bfloat16")
    return TransformersTarget(model)


@needs_kernels
def test_reading_takes_all_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    target = packed()
    functions = SimpleNamespace(read_bytes=lambda _, count, threads: counts.append(count))
    monkeypatch.setattr(cpu_library, "functions", lambda: functions)
    read = real.read_weights(target)
    assert read is not None
    assert read() > 0
    layer = 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 96
    assert sum(counts) == 2 * (3 * layer + 64 * 2000)
    assert real.read_weights(TransformersTarget(model_of(LlamaConfig))) is None


@needs_kernels
def test_rows_of_passes_are_medians_of_ratios_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = object()
    seconds: dict[Any, list[float]] = {("int4", 1): [2, 4], ("int4", 8): [3, 10], ("int4", "read"): [1, 2]}
    seconds |= {("llama.cpp", 1): [4, 4], "int4": [1, 2], "llama.cpp": [2, 8]}
    monkeypatch.setattr(real, "interleaved", lambda calls, rounds: {name: seconds[name] for name in calls})
    assert real.measure({"int4": packed()}, (1, 8), 12, 2, server) == [
        {"form": "int4", "nodes": 1, "milliseconds": 3000, "least": 2000, "passes": 1, "read": 2, "llama": 0.75}
        | {"prefill": 512 / 1.5, "prefill_speed": 3},
        {"form": "int4", "nodes": 8, "milliseconds": 6500, "least": 3000, "passes": 2, "read": 4},
        {"form": "int4", "nodes": "read", "milliseconds": 1500, "least": 1000, "passes": 0.5},
        {"form": "llama.cpp", "nodes": 1, "milliseconds": 4000, "least": 4000, "llama": 1}
        | {"prefill": 512 / 5, "prefill_speed": 1},
    ]
    first, *_ = real.measure({"int4": packed()}, (8,), 12, 2, None)
    assert first == {"form": "int4", "nodes": 8, "milliseconds": 6500, "least": 3000, "read": 4}


@needs_kernels
def test_passes_and_prefills_are_timed_beside_a_server(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    server = LlamaServer(str(install(tmp_path)), str(tmp_path / "model.gguf"), 1)
    target = packed()
    for _ in range(2):  # as for two numbers of threads
        rows = real.measure({"int4": target}, (1, 2), 12, 1, server)
        assert [(row["form"], row["nodes"]) for row in rows] == [
            *(("int4", count) for count in (1, 2, "read")),
            ("llama.cpp", 1),
        ]
        assert rows[-1]["prefill"] == pytest.approx(1 / PROMPT_STEP)
        assert min(value for row in rows for value in row.values() if isinstance(value, float)) > 0
        assert target.runner.rows == 0
