"""Kernel launches of a decode step on a fake CUDA device: ``python -m tests.launches``.

The target is LLaVA with the 32 layers of its default configuration in small sizes, on which the counts do not depend;
drafters have the layers and trees of published checkpoints. The device launches the kernels of a graph; the host
launches graphs, and kernels outside graphs.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText
from triton.runtime.jit import JITFunction

from mmspec import plugins
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.drafters.dflash import DFlash
from mmspec.drafters.eagle3 import Eagle3
from mmspec.engine.stopping import Stopper
from mmspec.eval.harness.output import Column, make_table, wide_console
from mmspec.ops import graphs
from mmspec.sampling.sampler import Sampler
from mmspec.vision.drafters.msd import MSD, Flash
from tests.decoding import decode
from tests.fake_cuda import CUDA, fake_cuda, on_fake_cuda, to_cuda
from tests.tiny.configs import VISION_CONFIGS
from tests.tiny.models import dflash_network, eagle3_network, msd_network, text_inputs

_NOTHING = {"empty", "empty_like", "new_empty", "_local_scalar_dense", "detach", "device"}
"""Operations that launch nothing, apart from views. On this device, ``empty_strided`` is a conversion."""
LAYERS = 32


class Launches(TorchDispatchMode):
    """Counts launches by name: operations on the fake device but views, and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        there = any(isinstance(x, Tensor) and x.device == CUDA for x in tree_leaves((args, kwargs, out)))
        if there and not view and name not in _NOTHING:
            self.names[name] += 1
        return out


def drafters(model: Any) -> dict[str, Any]:
    """Drafters by name, in published sizes; MSD and FLASH draft the trees of the embedded drafters."""
    return {
        "none": None,
        "msd": MSD(msd_network(model), top_k=4, depth=8, total_tokens=59),
        "flash": Flash(msd_network(model, slots=12), top_k=4, depth=12, total_tokens=59),
        "eagle3": Eagle3(eagle3_network(model, layers=1), None),
        "dflash": DFlash(dflash_network(model, layers=5, block_size=16)),
    }


def measure(name: str, nodes: int = 31, depth: int = 16) -> dict[str, Any]:
    """Launches of a step's parts."""
    config = VISION_CONFIGS["llava"]()
    config.text_config.num_hidden_layers = LAYERS
    config.text_config.layer_types = None
    model = AutoModelForImageTextToText.from_config(config).bfloat16().eval()
    drafter = drafters(model)[name]
    launches, parts, replayed = Launches(), {}, Counter()
    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
        patch.setattr(JITFunction, "run", lambda kernel, *_, **__: launches.names.update([kernel.__name__]))

        class Graph(graphs._Graph):
            def capture(self, function: Any, settings: Any) -> None:
                self._name = function.__name__
                before = launches.names.copy()
                super().capture(function, settings)
                parts[self._name] = launches.names - before

            def replay(self, inputs: Any) -> Any:
                replayed[self._name] += 1
                return super().replay(inputs)

        patch.setattr(graphs, "_Graph", Graph)
        to_cuda(model)
        target = plugins.target_class(model.config)(model)
        if drafter is not None:
            drafter.attach(target)
        ids = on_fake_cuda(text_inputs(1)["input_ids"])
        plan = StepPlan(nodes if drafter else 0, depth)
        running = decode(target, drafter, Prompt(ids), Sampler(), Stopper(10**6, criteria=[]), plan)
        for _ in range(6):
            next(running)
        with launches:
            # Captured again, with all launches counted.
            for graphed in _graphed(target, drafter):
                for graph in graphed._seen.values():
                    graph.graph = None
            next(running)
            replayed.clear()
            before = launches.names.copy()
            next(running)
            outside, used = launches.names - before, replayed.copy()
        running.close()
    return {"drafter": name, "parts": parts, "outside": outside, "graphs": used}


def _graphed(target: Any, drafter: Any) -> list[Any]:
    holders = [target.runner, *([drafter] if drafter else [])]
    return [value for holder in holders for value in vars(holder).values() if isinstance(value, graphs.Graphed)]


def main() -> None:
    """A table; with names of drafters, what each part launches."""
    chosen = sys.argv[1:]
    rows = [
        {**measure(name), "shallow": measure(name, depth=4)["parts"]}
        for name in chosen or ("none", "msd", "flash", "eagle3", "dflash")
    ]
    for row in rows if chosen else ():
        for part, names in (*row["parts"].items(), ("outside", row["outside"])):
            print(row["drafter"], part, names.total(), dict(names.most_common()))
    columns: list[Column] = [
        ("drafter", "{drafter}"),
        ("pass", lambda row: str(row["parts"]["_pass"].total())),
        ("a layer", lambda row: f"{row['parts']['_pass'].total() / LAYERS:.1f}"),
        ("draft", lambda row: str(row["parts"].get("_grown", Counter()).total())),
        ("of 4 levels", lambda row: str(row["shallow"].get("_grown", Counter()).total())),
        ("commit", lambda row: str(row["parts"]["commit_on_device"].total())),
        ("outside of graphs", lambda row: str(row["outside"].total())),
        ("graphs", lambda row: str(row["graphs"].total())),
    ]
    wide_console().print(make_table(columns, rows, title="Launches of a decode step, batch size 1"))


if __name__ == "__main__":
    main()
