"""What verifying a tree in one scan is worth on a hybrid model: ``python -m eval.hybrid``.

One run, all ways in turn (``eval.speed``), on held-out texts: transformers' ``generate``, our plain decoding,
and for each drafter chains of several lengths, trees verified by unrolling them, and trees verified by the tree scan. A
chain is the same drafter with one child per node. All chains take part, so that the best of them is the best on these
prompts; the one that adapts its length is among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.table import Table

import mmspec
from eval.decoding.unrolled import Unrolled
from eval.harness.command import Measurement, console, print_result, whole_numbers
from eval.harness.drafters import chain, named_drafters
from eval.harness.prompts import held_out_texts
from eval.harness.timing import PLAIN, TRANSFORMERS, Way, measure, ratios
from eval.speed import report
from mmspec.calibrate import cost_table, describe
from mmspec.cli.options import OUT_FILE
from mmspec.drafter import Drafter, fork
from mmspec.transformers_target import TransformersTarget


def ways_of(
    name: str,
    drafter: Drafter,
    target: TransformersTarget,
    chains: Sequence[int],
    nodes: Sequence[int],
    unrolled: Sequence[int],
) -> dict[str, list[Way]]:
    """A drafter's ways of decoding, by kind: ``chain``, ``unrolled``, ``tree``."""
    apart = Unrolled(target)
    chaining = [Way(f"{name}, chain of {n}", chain(drafter, n, target), n) for n in chains]
    chaining.append(Way(f"{name}, chain, adaptive", chain(drafter, max(chains), target), None))
    trees = [Way(f"{name}, {n} nodes", fork(drafter, target), n) for n in nodes]
    trees.append(Way(f"{name}, adaptive", fork(drafter, target), None))
    unrolling = [Way(f"{name}, {n} nodes unrolled", fork(drafter, target), n, apart) for n in unrolled]
    return {"chain": chaining, "unrolled": unrolling, "tree": trees}


def best(ways: Iterable[Way], plain: Way) -> Way:
    """The way with the highest median ratio of decoding time against plain decoding."""
    return max(ways, key=lambda way: _ratio(plain, way))


def against_chains(found: dict[str, dict[str, list[Way]]], plain: Way) -> list[dict[str, Any]]:
    """The best way of each kind, for each drafter and over all of them, and what trees gain over chains.

    Ratios are of decoding time (behind the first token), by prompt, then their median.
    """
    rows = []
    everything = {kind: [way for kinds in found.values() for way in kinds[kind]] for kind in ("chain", "tree")}
    for name, kinds in [*found.items(), ("all", everything)]:
        chained, tree = best(kinds["chain"], plain), best(kinds["tree"], plain)
        row: dict[str, Any] = {
            "drafter": name,
            "chain": chained.name,
            "chain_ratio_plain": _ratio(plain, chained),
            "chain_tokens_per_second": tokens_per_second(chained),
            "tree": tree.name,
            "tree_ratio_plain": _ratio(plain, tree),
            "tree_tokens_per_second": tokens_per_second(tree),
            "tree_over_chain": _ratio(chained, tree),
        }
        if kinds.get("unrolled"):
            sizes = {way.nodes: way for way in kinds["tree"]}
            pairs = [(way, sizes[way.nodes]) for way in kinds["unrolled"] if way.nodes in sizes]
            row["tree_over_unrolled"] = {str(way.nodes): _ratio(way, same) for way, same in pairs}
        rows.append(row)
    return rows


def tokens_per_second(way: Way) -> float:
    """New tokens behind the first over the time that they took; median over the prompts."""
    return median((n - 1) / s for n, s in zip(way.tokens, way.column("decoding"), strict=True) if n > 1)


def _ratio(slow: Way, fast: Way) -> float:
    return median(ratios(slow, fast, "decoding"))


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("drafter", "best chain", "tokens/s", "vs plain", "best tree", "tokens/s", "vs plain", "tree vs chain")
    table.add_column("tree vs unrolled")
    for row in rows:
        figures = [row["drafter"]]
        for kind in ("chain", "tree"):
            rate, ratio = row[f"{kind}_tokens_per_second"], row[f"{kind}_ratio_plain"]
            figures += [row[kind], f"{rate:.0f}", f"{ratio:.2f}"]
        unrolled = ", ".join(f"{nodes}: {ratio:.2f}" for nodes, ratio in row.get("tree_over_unrolled", {}).items())
        table.add_row(*figures, f"{row['tree_over_chain']:.2f}", unrolled)
    return table


@click.command(cls=Measurement)
@click.option("--model", default="tiny-hybrid", show_default=True)
@click.option("--drafters", default="flash,mamba,recycle", show_default=True, help="Names or folders, see eval.speed.")
@click.option("--chains", default="2,4,6,8,12,16", show_default=True, help="Lengths, beside the adaptive one.")
@click.option("--nodes", default="8,16,32", show_default=True, help="Fixed tree sizes, beside the adaptive one.")
@click.option("--unrolled", default="16", show_default=True, help="Sizes of trees verified by unrolling, too.")
@click.option("--prompts", default=16, show_default=True, help="Held-out texts.")
@click.option("--warm-up", default=4, show_default=True, help="Other held-out texts that every way decodes first.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--max-new-tokens", default=160, show_default=True)
@click.option("--temperature", default=0.0, show_default=True, help="Above 0, transformers takes no part.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--out", type=OUT_FILE, help="Write the JSON line here too.")
def main(
    model: str,
    drafters: str,
    chains: str,
    nodes: str,
    unrolled: str,
    prompts: int,
    warm_up: int,
    rounds: int,
    max_new_tokens: int,
    temperature: float,
    dtype: str,
    out: Path | None,
) -> None:
    """Compare trees with chains on held-out texts: three tables, then one JSON line."""
    sizes = [
        whole_numbers(value, name) for name, value in (("chains", chains), ("nodes", nodes), ("unrolled", unrolled))
    ]
    pipe = mmspec.load(model, drafter=None, dtype=dtype)
    calibrated = cost_table(pipe.target, refresh=True)
    plain = Way(PLAIN)
    named = named_drafters(drafters, pipe.model.config.name_or_path)
    found = {name: ways_of(name, drafter, pipe.target, *sizes) for name, drafter in named.items()}
    ways = [plain, *(way for kinds in found.values() for kind in kinds.values() for way in kind)]
    if temperature == 0:
        ways.insert(0, Way(TRANSFORMERS))  # by the same seed it would draw, and say, something else
    measure(pipe, held_out_texts(warm_up, 4_000_000), ways, 1, max_new_tokens, temperature)
    for way in ways:
        way.clear()
    measure(pipe, held_out_texts(prompts), ways, rounds, max_new_tokens, temperature)
    rows = report(ways, console())
    for way, row in zip(ways, rows, strict=True):
        row["tokens_per_second"] = tokens_per_second(way)
    compared = against_chains(found, plain)
    console().print(_table(compared))
    figures = {
        "temperature": temperature,
        "rounds": rounds,
        "calibrated_pass_seconds": calibrated(1),
        "ways": rows,
        "trees_and_chains": compared,
    }
    print_result({**describe(pipe.target), **figures}, out)


if __name__ == "__main__":
    main()
