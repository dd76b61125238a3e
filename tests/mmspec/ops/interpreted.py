"""Answers of tiny models by the Triton kernels, through the interpreter: ``python -m tests.mmspec.ops.interpreted``.

It needs ``TRITON_INTERPRET=1 MMSPEC_KERNELS=triton`` in a process of its own, as ``tests.mmspec.ops.ops_grid``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from mmspec import plugins
from mmspec.core.plan import StepPlan
from mmspec.drafters.ngram import Ngram
from mmspec.engine.stopping import Stopper
from mmspec.sampling.sampler import Sampler
from mmspec.vision.drafters.msd import MSD
from tests.decoding import decode
from tests.drafting import network_for
from tests.interpreter import mend_interpreter
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import REFUSED
from tests.tiny.models import text_inputs, vision_inputs

KERNELS = {
    "mmspec.ops.triton_attention": ("tree_attention",),
    "mmspec.ops.triton_elementwise": ("act_and_mul", "add_norm", "rotate_and_cache"),
    "mmspec.ops.triton_verify": ("accepted_path", "compact_kv"),
    "mmspec.ops.triton_growth": (
        "extend_reach",
        "keep_best",
        "next_beam",
        "node_inputs",
        "top_log_probs",
        "tree_ancestors",
        "write_last",
    ),
    "mmspec.ssm.ops.triton_scan": ("tree_scan", "commit_scan"),
    "mmspec.ssm.ops.triton_delta": ("tree_delta", "commit_delta"),
    "mmspec.ssm.ops.triton_selective": ("tree_selective", "commit_selective", "tree_lru", "commit_lru"),
    "mmspec.ssm.ops.triton_conv": ("tree_conv", "commit_conv"),
}


def counted() -> Counter[str]:
    """Calls of each kernel from now on."""
    calls: Counter[str] = Counter()

    def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return run(*args, **options)

        return call

    for home, names in KERNELS.items():
        module = import_module(home)
        for name in names:
            setattr(module, name, noted(name, getattr(module, name)))
    return calls


def main() -> None:
    """Compare with transformers, and print which kernels ran."""
    mend_interpreter()
    calls = counted()
    for name in ("llava", "bamba", "olmo_hybrid", "jamba", "minimax", *({"recurrent_gemma"} - REFUSED)):
        model, batch = shared_model(name), 1 if name == "bamba" else 2
        target = plugins.target_class(model.config)(model)
        drafter: Any = MSD(network_for(model), top_k=2, depth=3, total_tokens=7) if name == "llava" else Ngram()
        drafter.attach(target)
        inputs = vision_inputs(name, batch) if name == "llava" else text_inputs(batch)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
        *_, rows = decode(target, drafter, prompt_of(inputs), Sampler(), Stopper(5), StepPlan(5, 3))
        said = [row.token_ids for row in rows]
        assert said == ids[:, inputs["input_ids"].shape[1] :].tolist(), (name, said)
        print(name, *(f"{kernel}={calls[kernel]}" for kernel in sorted(calls)))
        calls.clear()


if __name__ == "__main__":
    main()
