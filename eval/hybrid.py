"""Speed of tree verification by one scan on a hybrid model, against chains: ``python -m mmspec.eval hybrid``.

All methods are interleaved in one run (as in ``mmspec.eval.speed``) on held-out texts: transformers' ``generate``, our
plain decoding, and for each drafter chains of several lengths, trees verified by unrolling, and trees verified by the
tree scan. A chain is the same drafter with one child per node. The baseline is the fastest of all chains on these
prompts, with the chain of adaptive length among them.
"""

from __future__ import annotations

from typing import Any

import click

import mmspec
from mmspec.engine.calibrate import cost_table, describe
from mmspec.eval.decoding.speed_tables import print_speed_tables
from mmspec.eval.decoding.trees_and_chains import (
    compare_trees_with_chains,
    methods_by_kind,
    tokens_per_second,
    trees_and_chains_table,
)
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.harness.options import SIZES
from mmspec.eval.harness.output import benchmark, wide_console
from mmspec.eval.harness.prompts import held_out_texts
from mmspec.eval.harness.timing import PLAIN, TRANSFORMERS, Method, compare_methods, warm_up_methods


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
    warm_up_methods(pipe, held_out_texts(options["warm_up"], 4_000_000), methods, max_new_tokens, temperature)
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
