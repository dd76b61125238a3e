"""Comparison of drafted trees with drafted chains, and of tree verification with unrolled verification."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from mmspec.core.drafter import Drafter, fork
from mmspec.eval.decoding.unrolled import UnrolledTarget
from mmspec.eval.harness.output import Column, make_table
from mmspec.eval.harness.timing import Method, time_ratios
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
    """One line per drafter."""
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
