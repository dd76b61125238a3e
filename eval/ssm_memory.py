"""Memory of one tree step on a Mamba-2 model, beyond its recurrent states: ``python -m mmspec.eval ssm_memory``.

``mmspec.eval.kernels.state_memory`` describes what is measured.
"""

from __future__ import annotations

from typing import Any

import click

from mmspec.eval.harness.output import benchmark
from mmspec.eval.kernels.state_memory import measure_state_memory


@benchmark
@click.option("--layers", default=29, show_default=True, help="Mamba-2 layers.")
@click.option("--nodes", default=16, show_default=True, help="Nodes of the tree.")
@click.option("--groups", default=1, show_default=True, help="Groups of B and C; Nemotron-H has 8.")
def main(layers: int, nodes: int, groups: int) -> dict[str, Any]:
    """Print a table and one JSON line."""
    figures = measure_state_memory(layers, nodes, groups)
    lines = {
        "recurrent states": "states_bytes",
        "one token": "one_token_bytes",
        f"tree of {nodes}": "tree_bytes",
        f"tree of {nodes}, a state per node": "snapshots_bytes",
    }
    for name, field in lines.items():
        share = 100 * figures[field] / figures["states_bytes"]
        click.echo(f"{name:32} {figures[field] / 2**20:9.2f} MiB {share:8.1f} %")
    return figures


if __name__ == "__main__":
    main()
