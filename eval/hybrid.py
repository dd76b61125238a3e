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
import torch
from rich.table import Table
from torch import Tensor

import mmspec
from mmspec.core.drafter import Drafter
from mmspec.core.target import Feature, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.harness.output import SIZES, Column, benchmark, make_table, wide_console
from mmspec.eval.harness.passes import describe
from mmspec.eval.harness.prompts import held_out_texts, warm_up_requests
from mmspec.eval.harness.timing import PLAIN, TRANSFORMERS, Method, compare_methods, time_ratios, warm_up_methods
from mmspec.eval.speed import print_speed_tables
from mmspec.targets.transformers_target import TransformersTarget


class UnrolledTarget(TransformersTarget):
    """A text target that verifies trees by unrolling them.

    Each path to a leaf becomes a chain of its own after the root: a node on several paths is computed once per path.

    Args:
        target: shares its model, layers and, after a prefill, its cache. Verify passes do not change the cache.
    """

    def __init__(self, target: TransformersTarget) -> None:
        vars(self).update(vars(target))
        self._copy = torch.zeros(1, 1, dtype=torch.long)

    @torch.inference_mode()
    def verify(self, tree: TokenTree, reads: Sequence[Feature] = (), width: int | None = None) -> TargetOutput:
        chains, self._copy = unroll(tree)
        output = super().verify(chains, reads, width)
        features = {name: _gather_nodes(x, self._copy) for name, x in output.features.items()}
        return TargetOutput(_gather_nodes(output.logits, self._copy), features)

    @torch.inference_mode()
    def commit(self, verdict: Verdict) -> None:
        path = verdict.path
        path = torch.where(path >= 0, self._copy.gather(1, path.clamp(min=0)), -1)
        copies = self._copy.tolist()
        rows = [[copies[row][i] for i in kept] for row, (kept, _) in enumerate(verdict.host)]
        self.runner.commit_nodes(path, lambda: rows)


def unroll(tree: TokenTree) -> tuple[TokenTree, Tensor]:
    """Unroll each root-to-leaf path into a chain after the root; shorter rows are padded with children of the root.

    Returns:
        The tree of chains, and the index of each node's first copy in it, (batch, nodes) int64.
    """
    rows = [_unroll_row(*row) for row in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)]
    widest = max(len(tokens) for tokens, _, _ in rows)
    tokens = [tokens + [0] * (widest - len(tokens)) for tokens, _, _ in rows]
    parents = [parents + [0] * (widest - len(parents)) for _, parents, _ in rows]
    ids, above, copies = (tree.tokens.new_tensor(x) for x in (tokens, parents, [copy for *_, copy in rows]))
    return TokenTree(ids, above, check=False), copies


def _unroll_row(tokens: list[int], parents: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Tokens and parents of a row's chains, and the index of each node's first copy."""
    ids, above, copy = tokens[:1], [-1], [0] + [-1] * (len(tokens) - 1)
    for leaf in sorted(set(range(1, len(tokens))) - set(parents)):
        path = []
        while leaf > 0:
            path.append(leaf)
            leaf = parents[leaf]
        for depth, node in enumerate(reversed(path)):
            above.append(len(ids) - 1 if depth else 0)
            if copy[node] < 0:
                copy[node] = len(ids)
            ids.append(tokens[node])
    return ids, above, copy


def _gather_nodes(x: Tensor, index: Tensor) -> Tensor:
    """Rows of ``x`` (batch, copies, n) at ``index`` (batch, nodes)."""
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))


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
    tree = [Method(f"{label}, {n} nodes", drafter.fork(target), n) for n in nodes]
    tree.append(Method(f"{label}, adaptive", drafter.fork(target), None))
    paths = [Method(f"{label}, {n} nodes unrolled", drafter.fork(target), n, unrolled_target) for n in unrolled]
    return {"chain": chain, "unrolled": paths, "tree": tree}


def as_chain(drafter: Drafter, length: int, target: TransformersTarget) -> Drafter:
    """A copy of a drafter that drafts chains; see ``Drafter.draft_chains``."""
    copied: Drafter = drafter.fork(target)
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
        "methods": rows,
        "trees_and_chains": compared,
    }
