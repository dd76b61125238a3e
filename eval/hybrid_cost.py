"""Cost of a decode step over a tree on larger hybrid models: ``python -m mmspec.eval hybrid_cost``.

The models have random weights. Nothing is accepted, but step time does not depend on acceptance. Timed, interleaved,
after prefixes of several lengths:

- one token by transformers (its cache, its recurrent branch), argmax included;
- our plain step: verify pass, verification and commit of one node;
- our step over a binary tree of N nodes: verify pass, verification, and commit of a path of at most ``PATH`` nodes;
- the verify pass over the same tree unrolled into root-to-leaf chains, plus the same commit.

Before timing, the tree's logits are compared with those of the unrolled paths, and the root's with transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter as clock
from typing import Any

import click
import torch
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.engine.calibrate import describe
from mmspec.eval.decoding.unrolled import UnrolledTarget, unroll
from mmspec.eval.harness.measuring import interleaved_medians
from mmspec.eval.harness.options import SIZES
from mmspec.eval.harness.output import Column, benchmark, make_table, milliseconds, wide_console
from mmspec.eval.kernels.gpu_kernels import binary_tree
from mmspec.ssm.training.architecture import Architecture, new_model
from mmspec.targets.support import lay_out_for_few_rows
from mmspec.targets.transformers_target import TransformersTarget

_SMALL = Architecture(width=64, layers=3, attention=(1,), heads=2, mamba_heads=2, state=16, mlp=64, vocabulary=320)
_LARGE = Architecture(width=768, layers=12, attention=(3, 9), heads=12, kv_heads=4, mamba_heads=24, state=128, mlp=2048)
_LARGER = replace(_LARGE, width=1280, layers=18, attention=(5, 14), heads=20, mamba_heads=40, mlp=3584)


SHAPES = {
    "tiny": _SMALL,
    "120M": replace(_LARGE, vocabulary=32000),
    "460M": replace(_LARGER, vocabulary=32000),
}
"""Bamba-type (Mamba-2) architectures, named by their approximate number of parameters."""

PATH = 4
"""Nodes, root included, that a step over a tree commits."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
"""Largest difference of logits, relative to the largest logit."""


class StepBenchmark:
    """Times the steps of one hybrid model after a prompt of random tokens."""

    def __init__(self, model: PreTrainedModel, prefix: int, nodes: Sequence[int]) -> None:
        self.model = model
        self.target = TransformersTarget(model)
        ids = torch.randint(self.target.config.vocab_size, (1, prefix), generator=torch.Generator().manual_seed(0))
        self.trees = {n: binary_tree(1, n, ids.device) for n in nodes}
        self.token = torch.zeros(1, dtype=torch.long)  # the trees' root
        self.target.prefill(Prompt(ids), max_new_tokens=512)
        self.unrolled = UnrolledTarget(self.target)
        self.cache = DynamicCache(config=model.config)
        self._transformers(ids)

    def check(self) -> float:
        """Compare trees with unrolled paths, and the root with transformers.

        Returns:
            The largest relative difference of logits.

        Raises:
            AssertionError: it exceeds rounding error.
        """
        worst = 0.0
        for tree in self.trees.values():
            logits, expected = (target.forward_tree(tree).logits for target in (self.target, self.unrolled))
            worst = max(worst, _relative_difference(logits, expected))
        root = self.target.forward_tree(TokenTree.root(self.token)).logits[:, 0]
        worst = max(worst, _relative_difference(root, self._transformers(self.token[None])))
        assert worst < _TOLERANCE[self.model.dtype], f"logits differ by {worst:.2g} of the greatest"
        return worst

    def time(self, rounds: int) -> dict[str, float]:
        """Median seconds per step under the keys ``transformers``, ``plain``, ``tree N`` and ``unrolled N``."""
        root = TokenTree.root(self.token)
        passes: dict[str, Callable[[], Any]] = {
            "transformers": lambda: self._transformers(self.token[None]).argmax(-1).tolist(),
            "plain": partial(self._verify, self.target, root),
        }
        for n, tree in self.trees.items():
            passes[f"tree {n}"] = partial(self._verify, self.target, tree)
            passes[f"unrolled {n}"] = partial(self._verify, self.unrolled, tree)
        seconds = interleaved_medians(passes, rounds)
        # Commits come last, since each extends the prefix.
        single, path = self._commit_seconds(rounds)
        for name in seconds:
            seconds[name] += {"transformers": 0.0, "plain": single}.get(name, path)
        return seconds

    @torch.inference_mode()
    def _transformers(self, ids: torch.Tensor) -> torch.Tensor:
        length = self.cache.get_seq_length() if self.cache.get_seq_length() else 0
        positions = torch.arange(length, length + ids.shape[1])[None]
        out = self.model(ids, past_key_values=self.cache, use_cache=True, position_ids=positions, logits_to_keep=1)
        return out.logits[:, -1]

    def _verify(self, target: TransformersTarget, tree: TokenTree) -> None:
        accept_path(tree, target.forward_tree(tree).logits.max(-1).indices).host  # noqa: B018

    def _commit_seconds(self, rounds: int) -> tuple[float, float]:
        """Median seconds of committing the root alone, and of committing a path of the largest tree."""
        largest = self.trees[max(self.trees)]
        path = [0]
        while len(path) < PATH and 2 * path[-1] + 2 < largest.nodes:
            path.append(2 * path[-1] + 2)  # the second child, so that KV slots must move
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for tree, committed, spent in zip((TokenTree.root(self.token), largest), ([0], path), times, strict=True):
                self.target.forward_tree(tree)
                start = clock()
                with torch.inference_mode():
                    self.target.runner.commit_nodes(torch.tensor([committed]), [committed])
                spent.append(clock() - start)
        return median(times[0]), median(times[1])


def shape_model(shape: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of one of ``SHAPES`` with random weights, in the memory layout of ``mmspec.load``."""
    torch.manual_seed(0)
    model: PreTrainedModel = new_model(replace(SHAPES[shape], context=8192)).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    lay_out_for_few_rows(model)
    return model


def measure_steps(
    model: PreTrainedModel, rounds: int, *, prefixes: Sequence[int], threads: Sequence[int], nodes: Sequence[int]
) -> list[dict[str, Any]]:
    """One row of figures per prefix, number of threads and tree size.

    ``tree_over_faster`` is relative to the faster of transformers' and our own one-token step.
    """
    rows: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    for prefix in prefixes:
        torch.set_num_threads(max(threads))
        benchmark = StepBenchmark(model, prefix, nodes)
        difference = benchmark.check()
        for count in threads:
            torch.set_num_threads(count)
            seconds = benchmark.time(rounds)
            reference, plain = seconds["transformers"], seconds["plain"]
            for n in nodes:
                tree, unrolled = seconds[f"tree {n}"], seconds[f"unrolled {n}"]
                figures = {"transformers": reference, "plain": plain, "tree": tree, "unrolled": unrolled}
                row = {"prefix": prefix, "threads": count, "nodes": n, "difference": difference}
                row |= {"copies": unroll(benchmark.trees[n])[0].nodes}
                row |= {f"{name}_seconds": value for name, value in figures.items()}
                row |= {"tree_over_plain": tree / plain, "tree_over_transformers": tree / reference}
                rows.append(
                    row | {"tree_over_faster": tree / min(plain, reference), "unrolled_over_tree": unrolled / tree}
                )
    torch.set_num_threads(before)
    return rows


def _relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.float() - expected.float()).abs().max() / expected.float().abs().max())


def step_table(shape: str, dtype: str, rows: list[dict[str, Any]]) -> Table:
    columns: list[Column] = [
        ("prefix", "{prefix}"),
        ("threads", "{threads}"),
        ("HF ms", milliseconds("transformers_seconds", 1)),
        ("plain ms", milliseconds("plain_seconds", 1)),
        ("nodes", "{nodes}"),
        ("tree ms", milliseconds("tree_seconds", 1)),
        ("vs plain", "{tree_over_plain:.2f}"),
        ("vs HF", "{tree_over_transformers:.2f}"),
        ("copies", "{copies}"),
        ("unrolled vs tree", "{unrolled_over_tree:.2f}"),
    ]
    return make_table(columns, rows, title=f"{shape}, {dtype}: one step")


@benchmark
@click.option("--shape", type=click.Choice(list(SHAPES)), default="120M", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--threads", type=SIZES, default="1,2", show_default=True)
@click.option("--prefixes", type=SIZES, default="128,512,1024,4096", show_default=True)
@click.option("--nodes", type=SIZES, default="4,8,16,32,64", show_default=True)
@click.option("--rounds", default=9, show_default=True)
def main(shape: str, dtype: str, rounds: int, **sizes: tuple[int, ...]) -> dict[str, Any]:
    """Time steps over trees on a hybrid model with random weights: a table, then one JSON line."""
    model = shape_model(shape, getattr(torch, dtype))
    rows = measure_steps(model, rounds, **sizes)
    wide_console().print(step_table(shape, dtype, rows))
    about = {key: value for key, value in describe(TransformersTarget(model)).items() if key != "threads"}
    return {**about, "shape": shape, "parameters": model.num_parameters(), "path": PATH, "rounds": rounds, "rows": rows}
