"""What a step over a tree costs on bigger hybrid models: ``python -m eval.hybrid_cost``.

The models have random weights: nothing is accepted, but time does not depend on that. What is timed, in turn, behind
prefixes of several lengths:

- one token by transformers' own pass (its cache, its recurrent branch), argmax included;
- our plain step: pass, verification and commit of one node;
- our step over a binary tree of N nodes: pass, verification, and commit of a path of at most ``PATH`` nodes;
- the pass over the same tree unrolled, root to leaf, to which the same commit is added.

Before that, the tree's logits are compared with those of the unrolled paths, and those at its root with transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter as clock
from typing import Any

import click
import torch
from rich.table import Table
from transformers import BambaForCausalLM, DynamicCache

from eval.decoding.unrolled import Unrolled, unroll
from eval.harness.command import Measurement, console, print_result, whole_numbers
from mmspec.calibrate import describe
from mmspec.cli.options import OUT_FILE
from mmspec.support import lay_out_for_few_rows
from mmspec.target import Prompt
from mmspec.transformers_target import TransformersTarget
from mmspec.tree import TokenTree
from mmspec.verify import verify_greedy
from ssm.training.architecture import Architecture, new_model

_SMALL = Architecture(width=64, layers=3, attention=(1,), heads=2, mamba_heads=2, state=16, mlp=64, vocabulary=320)
_LARGE = Architecture(width=768, layers=12, attention=(3, 9), heads=12, kv_heads=4, mamba_heads=24, state=128, mlp=2048)
_LARGER = replace(_LARGE, width=1280, layers=18, attention=(5, 14), heads=20, mamba_heads=40, mlp=3584)

SHAPES = {
    "tiny": _SMALL,
    "120M": replace(_LARGE, vocabulary=32000),
    "460M": replace(_LARGER, vocabulary=32000),
}
"""Bamba-type models by about their parameters."""

PATH = 4
"""Nodes, root included, that a step over a tree is taken to commit."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
"""Of logits, relative to the greatest."""


class Bench:
    """One model behind one prompt of random tokens.

    Args:
        model: a hybrid.
        prefix: tokens of the prompt.
        nodes: sizes of the trees.
    """

    def __init__(self, model: BambaForCausalLM, prefix: int, nodes: list[int]) -> None:
        self.model = model
        self.target = TransformersTarget(model)
        random = torch.Generator().manual_seed(0)
        vocab = self.target.config.vocab_size
        ids = torch.randint(vocab, (1, prefix), generator=random)
        self.token = torch.randint(vocab, (1,), generator=random)
        self.trees = {n: binary_tree(self.token, n, vocab, random) for n in nodes}
        self.target.prefill(Prompt(ids), room=512)
        self.unrolled = Unrolled(self.target)
        self.cache = DynamicCache(config=model.config)
        self._transformers(ids)

    def check(self) -> float:
        """The greatest relative difference of logits: trees and unrolled paths, root and transformers.

        Raises:
            AssertionError: it is not what rounding explains.
        """
        worst = 0.0
        for tree in self.trees.values():
            logits, expected = (target.forward_tree(tree).logits for target in (self.target, self.unrolled))
            worst = max(worst, _apart(logits, expected))
        root = self.target.forward_tree(TokenTree.root(self.token)).logits[:, 0]
        worst = max(worst, _apart(root, self._transformers(self.token[None])))
        assert worst < _TOLERANCE[self.model.dtype], f"logits differ by {worst:.2g} of the greatest"
        return worst

    def time(self, rounds: int) -> dict[str, float]:
        """Median seconds by what was done: ``transformers``, ``plain``, ``tree N``, ``unrolled N``."""
        root = TokenTree.root(self.token)
        passes: dict[str, Callable[[], Any]] = {
            "transformers": lambda: self._transformers(self.token[None]).argmax(-1).tolist(),
            "plain": partial(self._verify, self.target, root),
        }
        for n, tree in self.trees.items():
            passes[f"tree {n}"] = partial(self._verify, self.target, tree)
            passes[f"unrolled {n}"] = partial(self._verify, self.unrolled, tree)
        seconds = _in_turn(passes, rounds)
        # Commits come last: each makes the prefix longer.
        one, path = self._commits(rounds)
        for name in seconds:
            seconds[name] += {"transformers": 0.0, "plain": one}.get(name, path)
        return seconds

    @torch.inference_mode()
    def _transformers(self, ids: torch.Tensor) -> torch.Tensor:
        length = self.cache.get_seq_length() if self.cache.get_seq_length() else 0
        positions = torch.arange(length, length + ids.shape[1])[None]
        out = self.model(ids, past_key_values=self.cache, use_cache=True, position_ids=positions, logits_to_keep=1)
        return out.logits[:, -1]

    def _verify(self, target: TransformersTarget, tree: TokenTree) -> None:
        verify_greedy(tree, target.forward_tree(tree).logits.max(-1).indices).host  # noqa: B018

    def _commits(self, rounds: int) -> tuple[float, float]:
        """Median seconds of committing the root alone, and a path of the largest tree."""
        largest = self.trees[max(self.trees)]
        path = [0]
        while len(path) < PATH and 2 * path[-1] + 2 < largest.nodes:
            path.append(2 * path[-1] + 2)  # the second child, so that keys and values must move
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for tree, kept, spent in zip((TokenTree.root(self.token), largest), ([0], path), times, strict=True):
                self.target.forward_tree(tree)
                start = clock()
                with torch.inference_mode():
                    self.target.commit_nodes(torch.tensor([kept]), [kept])
                spent.append(clock() - start)
        return median(times[0]), median(times[1])


def binary_tree(token: torch.Tensor, nodes: int, vocab: int, random: torch.Generator) -> TokenTree:
    """Every node has two children, level by level, as far as the nodes go. ``token``: (1,)."""
    index = torch.arange(nodes)
    parents = (index - 1).div(2, rounding_mode="floor")
    drafted = torch.randint(vocab // 2, (nodes - 1,), generator=random) * 2 + index[1:] % 2  # siblings differ
    return TokenTree(torch.cat([token, drafted])[None], parents[None])


def shape_model(shape: str, dtype: torch.dtype) -> BambaForCausalLM:
    """A model of one of ``SHAPES`` with random weights, laid out as ``mmspec.load`` does."""
    torch.manual_seed(0)
    model = new_model(replace(SHAPES[shape], context=8192)).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    lay_out_for_few_rows(model)
    return model


def measure(
    model: BambaForCausalLM, prefixes: list[int], threads: list[int], nodes: list[int], rounds: int
) -> list[dict[str, Any]]:
    """One row per prefix, number of threads and tree size. Ratios are over the faster of the two single tokens too."""
    rows: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    for prefix in prefixes:
        torch.set_num_threads(max(threads))
        bench = Bench(model, prefix, nodes)
        difference = bench.check()
        for count in threads:
            torch.set_num_threads(count)
            seconds = bench.time(rounds)
            theirs, plain = seconds["transformers"], seconds["plain"]
            for n in nodes:
                tree, unrolled = seconds[f"tree {n}"], seconds[f"unrolled {n}"]
                figures = {"transformers": theirs, "plain": plain, "tree": tree, "unrolled": unrolled}
                row = {"prefix": prefix, "threads": count, "nodes": n, "difference": difference}
                row |= {"copies": unroll(bench.trees[n])[0].nodes}
                row |= {f"{name}_seconds": value for name, value in figures.items()}
                row |= {"tree_over_plain": tree / plain, "tree_over_transformers": tree / theirs}
                rows.append(
                    row | {"tree_over_faster": tree / min(plain, theirs), "unrolled_over_tree": unrolled / tree}
                )
    torch.set_num_threads(before)
    return rows


def _in_turn(passes: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(-1, rounds):  # the first round warms up
        for name, run in passes.items():
            start = clock()
            run()
            if turn >= 0:
                times[name].append(clock() - start)
    return {name: median(spent) for name, spent in times.items()}


def _apart(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.float() - expected.float()).abs().max() / expected.float().abs().max())


def _table(shape: str, dtype: str, rows: list[dict[str, Any]]) -> Table:
    table = Table("prefix", "threads", "HF ms", "plain ms", "nodes", "tree ms", "vs plain", "vs HF", "copies")
    table.add_column("unrolled vs tree")
    table.title = f"{shape}, {dtype}: one step"
    for row in rows:
        times = {name: f"{1000 * row[name + '_seconds']:.1f}" for name in ("transformers", "plain", "tree")}
        table.add_row(
            *(str(row["prefix"]), str(row["threads"]), times["transformers"], times["plain"], str(row["nodes"])),
            *(times["tree"], f"{row['tree_over_plain']:.2f}", f"{row['tree_over_transformers']:.2f}"),
            *(str(row["copies"]), f"{row['unrolled_over_tree']:.2f}"),
        )
    return table


def _merged(run: dict[str, Any], out: Path | None) -> list[dict[str, Any]]:
    """What the file holds of other shapes and precisions, and of this one's rows what was not measured again."""
    runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"] if out is not None and out.exists() else []
    rows = {_place(row): row for row in run["rows"]}
    others = []
    for old in runs:
        if (old["shape"], old["dtype"]) == (run["shape"], run["dtype"]):
            rows = {_place(row): row for row in old["rows"]} | rows
        else:
            others.append(old)
    return [*others, {**run, "rows": [rows[place] for place in sorted(rows)]}]


def _place(row: dict[str, Any]) -> tuple[int, ...]:
    return row["prefix"], row["threads"], row["nodes"]


@click.command(cls=Measurement)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="120M", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--threads", default="1,2", show_default=True)
@click.option("--prefixes", default="128,512,1024,4096", show_default=True)
@click.option("--nodes", default="4,8,16,32,64", show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option(
    "--out",
    type=OUT_FILE,
    help="Write the JSON line here too, beside what the file holds of other shapes, precisions, prefixes and threads.",
)
def main(shape: str, dtype: str, threads: str, prefixes: str, nodes: str, rounds: int, out: Path | None) -> None:
    """Time steps over trees on a hybrid model with random weights: a table, then one JSON line."""
    model = shape_model(shape, getattr(torch, dtype))
    counts, lengths, sizes = (
        whole_numbers(value, name) for value, name in ((threads, "threads"), (prefixes, "prefixes"), (nodes, "nodes"))
    )
    rows = measure(model, lengths, counts, sizes, rounds)
    console().print(_table(shape, dtype, rows))
    about = {key: value for key, value in describe(TransformersTarget(model)).items() if key != "threads"}
    run = {**about, "shape": shape, "parameters": model.num_parameters(), "path": PATH, "rounds": rounds, "rows": rows}
    print_result({"runs": _merged(run, out)}, out)


if __name__ == "__main__":
    main()
