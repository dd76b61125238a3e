"""Speed of tree verification by one scan on a hybrid model, against chains: ``python -m mmspec.eval hybrid``.

All methods are interleaved in one run (as in ``mmspec.eval.speed``) on held-out texts: transformers' ``generate``, our
plain decoding, and for each drafter chains of several lengths, trees verified by unrolling, and trees verified by the
tree scan. A chain is the same drafter with one child per node. The baseline is the fastest of all chains on these
prompts, with the chain of adaptive length among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import click
from rich.table import Table

import mmspec
from mmspec.core.drafter import Drafter, fork
from mmspec.engine.calibrate import cost_table, describe
from mmspec.eval.decoding.speed_tables import print_speed_tables
from mmspec.eval.decoding.unrolled import UnrolledTarget
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.harness.options import SIZES
from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.eval.harness.prompts import held_out_texts, warm_up_requests
from mmspec.eval.harness.timing import PLAIN, TRANSFORMERS, Method, compare_methods, time_ratios, warm_up_methods
from mmspec.targets.transformers_target import TransformersTarget

MethodsByKind = Mapping[str, Sequence[Method]]
"""Methods under the keys ``chain``, ``unrolled`` and ``tree``."""


def methods_by_kind(
    label: str,
    drafter: Drafter,
    target: TransformersTarget,
    chains: Sequence[int],
    nodes: Sequence[int],
    unrolled: Sequence[int],
) -> dict[str, list[Method]]:
    """A drafter's methods: chains, trees verified by unrolling, and trees.

    Args:
        chains: fixed chain lengths; an adaptive chain is added.
        nodes: fixed tree sizes; an adaptive tree is added.
        unrolled: sizes of trees verified by unrolling.
    """
    unrolled_target = UnrolledTarget(target)
    chain = [Method(f"{label}, chain of {n}", as_chain(drafter, n, target), n) for n in chains]
    chain.append(Method(f"{label}, chain, adaptive", as_chain(drafter, max(chains), target), None))
    tree = [Method(f"{label}, {n} nodes", fork(drafter, target), n) for n in nodes]
    tree.append(Method(f"{label}, adaptive", fork(drafter, target), None))
    paths = [Method(f"{label}, {n} nodes unrolled", fork(drafter, target), n, unrolled_target) for n in unrolled]
    return {"chain": chain, "unrolled": paths, "tree": tree}


def as_chain(drafter: Drafter, length: int, target: TransformersTarget) -> Drafter:
    """A copy of a drafter that drafts chains; see ``Drafter.draft_chains``."""
    copied: Drafter = fork(drafter, target)
    copied.draft_chains(length)
    return copied


def fastest(methods: Iterable[Method], plain: Method) -> Method:
    """The method with the highest median decoding speedup over plain decoding."""
    return max(methods, key=lambda method: _ratio(plain, method))


def compare_trees_with_chains(drafters: Mapping[str, MethodsByKind], plain: Method) -> list[dict[str, Any]]:
    """The fastest chain and the fastest tree of each drafter and over all drafters, and the speedup of the tree.

    Ratios are of decoding time (after the first token), by prompt, then their median.
    """
    rows = []
    overall = {kind: [m for kinds in drafters.values() for m in kinds[kind]] for kind in ("chain", "tree")}
    for label, kinds in [*drafters.items(), ("all", overall)]:
        chain, tree = fastest(kinds["chain"], plain), fastest(kinds["tree"], plain)
        row: dict[str, Any] = {
            "drafter": label,
            "chain": chain.name,
            "chain_ratio_plain": _ratio(plain, chain),
            "chain_tokens_per_second": tokens_per_second(chain),
            "tree": tree.name,
            "tree_ratio_plain": _ratio(plain, tree),
            "tree_tokens_per_second": tokens_per_second(tree),
            "tree_over_chain": _ratio(chain, tree),
        }
        if kinds.get("unrolled"):
            sizes = {method.nodes: method for method in kinds["tree"]}
            pairs = [(method, sizes[method.nodes]) for method in kinds["unrolled"] if method.nodes in sizes]
            row["tree_over_unrolled"] = {str(method.nodes): _ratio(method, same) for method, same in pairs}
        rows.append(row)
    return rows


def tokens_per_second(method: Method) -> float:
    """Decoding speed after the first token; median over the prompts."""
    return median((n - 1) / s for n, s in zip(method.tokens, method.column("decoding"), strict=True) if n > 1)


def _ratio(slow: Method, fast: Method) -> float:
    return median(time_ratios(slow, fast, "decoding"))


def trees_and_chains_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns: list[Column] = [("drafter", "{drafter}")]
    for kind in ("chain", "tree"):
        columns.append((f"best {kind}", f"{{{kind}}}"))
        columns.append(("tokens/s", f"{{{kind}_tokens_per_second:.0f}}"))
        columns.append(("vs plain", f"{{{kind}_ratio_plain:.2f}}"))
    columns.append(("tree vs chain", "{tree_over_chain:.2f}"))
    columns.append(("tree vs unrolled", _unrolled_cell))
    return make_table(columns, rows)


def _unrolled_cell(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{nodes}: {ratio:.2f}" for nodes, ratio in row.get("tree_over_unrolled", {}).items())


@benchmark
@click.option("--model", default="tiny-hybrid", show_default=True)
@click.option(
    "--drafters", default="flash,mamba,recycle", show_default=True, help="Names or folders, see mmspec.eval.speed."
)
@click.option(
    "--chains", type=SIZES, default="2,4,6,8,12,16", show_default=True, help="Lengths, in addition to the adaptive one."
)
@click.option(
    "--nodes", type=SIZES, default="8,16,32", show_default=True, help="Tree sizes, in addition to the adaptive one."
)
@click.option(
    "--unrolled", type=SIZES, default="16", show_default=True, help="Sizes of trees also verified by unrolling."
)
@click.option("--prompts", default=16, show_default=True, help="Held-out texts.")
@click.option("--warm-up", default=4, show_default=True, help="Other held-out texts that all methods decode first.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--max-new-tokens", default=160, show_default=True)
@click.option("--temperature", default=0.0, show_default=True, help="Above 0, transformers is left out.")
@click.option("--dtype", default="auto", show_default=True)
def main(model: str, drafters: str, dtype: str, **options: Any) -> dict[str, Any]:
    """Compare trees with chains on held-out texts: three tables, then one JSON line."""
    sizes = [options[name] for name in ("chains", "nodes", "unrolled")]
    rounds, max_new_tokens, temperature = (options[name] for name in ("rounds", "max_new_tokens", "temperature"))
    pipe = mmspec.load(model, drafter=None, dtype=dtype)
    cost = cost_table(pipe.target, refresh=True)
    plain = Method(PLAIN)
    loaded = parse_drafters(drafters, pipe.model.config.name_or_path)
    by_drafter = {label: methods_by_kind(label, drafter, pipe.target, *sizes) for label, drafter in loaded.items()}
    methods = [plain, *(m for kinds in by_drafter.values() for kind in kinds.values() for m in kind)]
    if temperature == 0:
        methods.insert(0, Method(TRANSFORMERS))  # when sampling, the same seed draws other tokens there
    warm_up_methods(pipe, warm_up_requests(options["warm_up"], visual=False), methods, max_new_tokens, temperature)
    compare_methods(pipe, held_out_texts(options["prompts"]), methods, rounds, max_new_tokens, temperature)
    rows = print_speed_tables(methods, wide_console())
    for method, row in zip(methods, rows, strict=True):
        row["tokens_per_second"] = tokens_per_second(method)
    compared = compare_trees_with_chains(by_drafter, plain)
    wide_console().print(trees_and_chains_table(compared))
    return {
        **describe(pipe.target),
        "temperature": temperature,
        "rounds": rounds,
        "calibrated_pass_seconds": cost(1),
        "methods": rows,
        "trees_and_chains": compared,
    }
