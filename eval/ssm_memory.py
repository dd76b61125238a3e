"""Memory of one tree step on a Mamba-2 model, beyond its recurrent states: ``python -m mmspec.eval ssm_memory``.

Torch's profiler records every allocation of one step (verify pass over the tree, commit of a path); the figure is the
peak of live memory above that before the step. A tree step stores each node's convolution inputs and step sizes; states
are read, and written once by the commit. An engine that keeps the state after every node would allocate as many times
the states' size as there are nodes.

The states have real shapes: 128 heads of 64 with state 128, in 29 layers with one group of B and C (Bamba-9B) or 24
layers with eight (Nemotron-H-8B). Weights are random and the hidden size is small, so that the model fits anywhere.
States are float32, everything else bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, BambaConfig, PreTrainedModel

from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.targets.transformers_target import TransformersTarget

HEADS, HEAD_DIM, STATE = 128, 64, 128
_VOCAB, _HIDDEN, _PROMPT = 512, 256, 32


def build_mamba_model(layers: int, groups: int) -> PreTrainedModel:
    """A Bamba-type model without attention layers, with random bfloat16 weights."""
    torch.manual_seed(0)
    config = BambaConfig(
        vocab_size=_VOCAB,
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_layer_indices=[],
        mamba_expand=HEADS * HEAD_DIM // _HIDDEN,
        mamba_n_heads=HEADS,
        mamba_d_head=HEAD_DIM,
        mamba_d_state=STATE,
        mamba_n_groups=groups,
        mamba_chunk_size=_PROMPT,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def comb(nodes: int) -> TokenTree:
    """A comb: a chain with one sibling leaf per level."""
    parents = torch.tensor([[-1, *(max(0, i - 2 + i % 2) for i in range(1, nodes))]])
    return TokenTree(torch.arange(nodes)[None] + 3, parents)


def peak_cpu_bytes(run: Callable[[], Any]) -> int:
    """Peak of the CPU memory that a call allocates, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@torch.inference_mode()
def step_bytes(target: TransformersTarget, tree: TokenTree) -> int:
    """Peak memory of one step after a prompt, in bytes."""
    target.select([])  # of earlier steps
    target.prefill(Prompt(torch.arange(_PROMPT)[None] + 3), max_new_tokens=64)
    path = tree.ancestors[0, -1].nonzero().flatten()

    def verify_and_commit() -> None:
        target.forward_tree(tree)
        target.runner.commit_nodes(path[None], [path.tolist()])

    return peak_cpu_bytes(verify_and_commit)


@benchmark
@click.option("--layers", default=29, show_default=True, help="Mamba-2 layers.")
@click.option("--nodes", default=16, show_default=True, help="Nodes of the tree.")
@click.option("--groups", default=1, show_default=True, help="Groups of B and C; Nemotron-H has 8.")
def main(layers: int, nodes: int, groups: int) -> dict[str, Any]:
    """Print a table and one JSON line."""
    target = TransformersTarget(build_mamba_model(layers, groups))
    states = 4 * layers * HEADS * HEAD_DIM * STATE
    figures = {
        "recurrent states": states,
        "one token": step_bytes(target, comb(1)),
        f"tree of {nodes}": step_bytes(target, comb(nodes)),
        f"{nodes} states, one per node": nodes * states,
    }
    rows = [{"name": name, "mebibytes": size / 2**20, "percent": 100 * size / states} for name, size in figures.items()]
    columns: list[Column] = [("", "{name}"), ("MiB", "{mebibytes:.2f}"), ("of the states", "{percent:.1f} %")]
    wide_console().print(make_table(columns, rows))
    return {"layers": layers, "nodes": nodes, "groups": groups, "bytes": figures}
