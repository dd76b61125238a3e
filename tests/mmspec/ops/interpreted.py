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

MODULES = ("ops.attention", "ops.elementwise", "ops.verify", "ops.growth")
MODULES += ("ssm.ops.scan", "ssm.ops.delta", "ssm.ops.selective", "ssm.ops.conv")


def counted() -> Counter[str]:
    """Calls of each kernel from now on."""
    calls: Counter[str] = Counter()

    def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return run(*args, **options)

        return call

    for package, _, name in (f"mmspec.{module}".rpartition(".") for module in MODULES):
        references, module = import_module(f"{package}.{name}"), import_module(f"{package}.triton_{name}")
        for name, run in [*vars(module).items()]:
            if hasattr(getattr(references, name, None), "__wrapped__"):
                setattr(module, name, noted(name, run))
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
