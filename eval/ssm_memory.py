"""What verifying a tree costs in memory on a model with Mamba-2 layers, beside its recurrent states.

    python -m eval.ssm_memory [--layers N] [--nodes N] [--json]

One step (a pass over the tree, then the commit of a path) is watched by torch's profiler, allocation by allocation: the
peak of what lives at once, above what lived before the step. Two ways are compared on the same model, weights and tree:

- ours: a node keeps its convolution's inputs and step sizes; states are read, and written once at the commit;
- snapshots: every node keeps the state behind it, and the commit picks one, as serving engines do.

Both must give the same logits and leave the same states behind. The shape of the states is a real one: 128 heads of 64
with state 128, in 29 layers with one group of B and C (Bamba-9B) or 24 layers with eight (Nemotron-H-8B). Weights are
random and the hidden size is small, so that the model itself fits anywhere. States are float32, all else is bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, BambaConfig, PreTrainedModel

from mmspec.target import Prompt
from mmspec.transformers_target import TransformersTarget
from mmspec.tree import TokenTree
from ssm.cache import StateCache
from ssm.layers import Mamba2Layers
from ssm.ops import commit_conv

HEADS, HEAD_DIM, STATE = 128, 64, 128
_VOCAB, _HIDDEN, _PROMPT = 512, 256, 32


class _Snapshots(StateCache):
    """A state behind every node."""

    def arguments(self, reach: Tensor) -> dict[str, Any]:
        before = torch.arange(reach.shape[1])
        self.parents = torch.where(reach.tril(-1), before, -1).amax(-1)[0].tolist()
        return super().arguments(reach)

    def scan(  # type: ignore[override]
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        D: Tensor,  # noqa: N803
        dt_bias: Tensor,
        **options: Any,
    ) -> tuple[Tensor, None]:
        assert self._tree is not None
        batch, nodes, heads, _ = x.shape
        place = self._current
        if place == 0:
            self.kept = x.new_empty(len(self._place), batch, nodes, *self._state.data.shape[2:], dtype=torch.float32)
        dt = F.softplus(dt.float() + dt_bias)
        b, c = (t.float().repeat_interleave(heads // t.shape[2], dim=2) for t in (b, c))
        y = torch.empty(x.shape, dtype=torch.float32)
        for node, parent in enumerate(self.parents):
            before = self._state.data[:, place] if parent < 0 else self.kept[place, :, parent]
            state = self.kept[place, :, node]
            torch.mul(before, (dt[:, node] * a).exp()[..., None, None], out=state)
            state += (dt[:, node, :, None] * x[:, node])[..., None] * b[:, node, :, None]
            y[:, node] = (state @ c[:, node, :, :, None])[..., 0] + D[:, None] * x[:, node]
        self._calls += 1
        return y, None

    def _absorb(self, path: Tensor) -> None:
        assert self._inputs is not None
        self._state.data.copy_(self.kept[:, :, int(path[0, -1])].transpose(0, 1))
        for inputs, conv in zip(self._inputs, self._conv.data.unbind(1), strict=True):
            commit_conv(inputs, conv, path)


class _SnapshotLayers(Mamba2Layers):
    def cache(self, reserve: int, in_place: bool = False) -> StateCache:
        return _Snapshots(self._layers, self._recurrent, attending=self._attending, reserve=reserve)


def build(layers: int, groups: int) -> PreTrainedModel:
    """A Bamba-type model with random weights, in bfloat16."""
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
    """A chain with one sibling per level."""
    parents = torch.tensor([[-1, *(max(0, i - 2 + i % 2) for i in range(1, nodes))]])
    return TokenTree(torch.arange(nodes)[None] + 3, parents)


def peak(run: Callable[[], Any]) -> int:
    """Bytes alive at once on the CPU at most while something runs, above what was alive before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


@torch.inference_mode()
def step(target: TransformersTarget, tree: TokenTree) -> tuple[int, Tensor, Tensor]:
    """The first step behind a prompt: its peak in bytes, the nodes' logits, and the states that it leaves behind."""
    target.prefill(Prompt(torch.arange(_PROMPT)[None] + 3), room=64)
    path = tree.ancestors[0, -1].nonzero().flatten()
    logits = torch.empty(0)

    def verify_and_commit() -> None:
        nonlocal logits
        logits = target.forward_tree(tree).logits
        target.commit_nodes(path[None], [path.tolist()])

    most = peak(verify_and_commit)
    cache = target._cache
    assert isinstance(cache, StateCache)
    return most, logits, cache._state.data


def measure(layers: int, nodes: int, groups: int) -> dict[str, Any]:
    """Peaks of both ways, and of plain decoding, in bytes.

    Raises:
        AssertionError: the two ways disagree.
    """
    model = build(layers, groups)
    ours, snapshots = TransformersTarget(model), TransformersTarget(model)
    snapshots.layers = _SnapshotLayers(model)
    plain, _, _ = step(ours, comb(1))
    most, logits, state = step(ours, comb(nodes))
    most_kept, logits_kept, state_kept = step(snapshots, comb(nodes))
    torch.testing.assert_close(logits, logits_kept, atol=0.05, rtol=0.05)
    torch.testing.assert_close(state, state_kept, atol=0.02, rtol=0.05)
    states = state.numel() * state.element_size()
    return {
        "layers": layers,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "state": STATE,
        "groups": groups,
        "nodes": nodes,
        "states_bytes": states,
        "tree_bytes": most,
        "snapshots_bytes": most_kept,
        "one_token_bytes": plain,
        "tree_share": round(most / states, 4),
        "snapshots_share": round(most_kept / states, 2),
    }


def main() -> None:
    """Print a table and end with one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m eval.ssm_memory", description=__doc__)
    parser.add_argument("--layers", type=int, default=29, help="Mamba-2 layers (29)")
    parser.add_argument("--nodes", type=int, default=16, help="nodes of the tree (16)")
    parser.add_argument("--groups", type=int, default=1, help="groups of B and C (1; Nemotron-H has 8)")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    arguments = parser.parse_args()
    figures = measure(arguments.layers, arguments.nodes, arguments.groups)
    if not arguments.json:
        rows = [
            ("recurrent states", figures["states_bytes"]),
            ("one token", figures["one_token_bytes"]),
            (f"tree of {arguments.nodes}", figures["tree_bytes"]),
            (f"tree of {arguments.nodes}, a state per node", figures["snapshots_bytes"]),
        ]
        for name, count in rows:
            print(f"{name:32} {count / 2**20:9.2f} MiB {100 * count / figures['states_bytes']:8.1f} %")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
