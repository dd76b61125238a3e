"""Memory of one tree step on a Mamba-2 model, beyond its recurrent states, against one state per node.

Torch's profiler records every allocation of one step (verify pass over the tree, commit of a path); the figure is the
peak of live memory above that before the step. Two implementations are compared on the same model, weights and tree:

- ours: stores each node's convolution inputs and step sizes; states are read, and written once by the commit;
- snapshots: stores the state after every node, and the commit selects one, as serving engines do.

Both must give the same logits and the same committed states. The states have real shapes: 128 heads of 64 with state
128, in 29 layers with one group of B and C (Bamba-9B) or 24 layers with eight (Nemotron-H-8B). Weights are random and
the hidden size is small, so that the model fits anywhere. States are float32, everything else bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, BambaConfig, PreTrainedModel

from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.ssm.cache import StateCache
from mmspec.ssm.layers import Mamba2Layers
from mmspec.targets.transformers_target import TransformersTarget

HEADS, HEAD_DIM, STATE = 128, 64, 128
_VOCAB, _HIDDEN, _PROMPT = 512, 256, 32


class _SnapshotCache(StateCache):
    """A cache that stores the state after every node."""

    def arguments(self, reach: Tensor) -> dict[str, Any]:
        before = torch.arange(reach.shape[1])
        self.parents = torch.where(reach.tril(-1), before, -1).amax(-1)[0].tolist()
        return super().arguments(reach)

    def scan(
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
    ) -> tuple[Tensor, Tensor]:
        assert self._tree is not None
        batch, nodes, heads, _ = x.shape
        place = self._place[self._current[0]]
        if place == 0:
            self.snapshots = x.new_empty(
                len(self._place), batch, nodes, *self._state.data.shape[2:], dtype=torch.float32
            )
        dt = F.softplus(dt.float() + dt_bias)
        b, c = (t.float().repeat_interleave(heads // t.shape[2], dim=2) for t in (b, c))
        y = torch.empty(x.shape, dtype=torch.float32)
        for node, parent in enumerate(self.parents):
            before = self._state.data[:, place] if parent < 0 else self.snapshots[place, :, parent]
            state = self.snapshots[place, :, node]
            torch.mul(before, (dt[:, node] * a).exp()[..., None, None], out=state)
            state += (dt[:, node, :, None] * x[:, node])[..., None] * b[:, node, :, None]
            y[:, node] = (state @ c[:, node, :, :, None])[..., 0] + D[:, None] * x[:, node]
        self._calls += 1
        return y, state

    def _absorb(self, path: Tensor) -> None:
        self._state.data.copy_(self.snapshots[:, :, int(path[0, -1])].transpose(0, 1))
        chain = torch.arange(path.shape[1])[None]
        for part in self._parts(*path.shape):
            self._conv.commit(part, chain, (torch.zeros_like(path), path), False)


class _SnapshotLayers(Mamba2Layers):
    def cache(self, reserve: int, in_place: bool = False) -> StateCache:
        return _SnapshotCache(
            self._layers, self.recurrence, self._recurrent, attending=self._attending, reserve=reserve
        )


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
def run_step(target: TransformersTarget, tree: TokenTree) -> tuple[int, Tensor, Tensor]:
    """One step after a prompt: its peak memory in bytes, the logits of the nodes, and the committed states."""
    target.select([])  # of earlier steps
    target.prefill(Prompt(torch.arange(_PROMPT)[None] + 3), room=64)
    path = tree.ancestors[0, -1].nonzero().flatten()
    logits = torch.empty(0)

    def verify_and_commit() -> None:
        nonlocal logits
        logits = target.forward_tree(tree).logits
        target.runner.commit_nodes(path[None], [path.tolist()])

    peak = peak_cpu_bytes(verify_and_commit)
    cache = target.cache
    assert isinstance(cache, StateCache)
    return peak, logits, cache._state.data


def measure_state_memory(layers: int, nodes: int, groups: int) -> dict[str, Any]:
    """Peak memory of both implementations and of plain decoding, in bytes.

    Raises:
        AssertionError: the implementations give different logits or states.
    """
    model = build_mamba_model(layers, groups)
    ours, snapshots = TransformersTarget(model), TransformersTarget(model)
    snapshots.decoder.layers = _SnapshotLayers(model)
    plain, _, _ = run_step(ours, comb(1))
    peak, logits, state = run_step(ours, comb(nodes))
    snapshots_peak, snapshots_logits, snapshots_state = run_step(snapshots, comb(nodes))
    torch.testing.assert_close(logits, snapshots_logits, atol=0.05, rtol=0.05)
    torch.testing.assert_close(state, snapshots_state, atol=0.02, rtol=0.05)
    states = state.numel() * state.element_size()
    return {
        "layers": layers,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "state": STATE,
        "groups": groups,
        "nodes": nodes,
        "states_bytes": states,
        "tree_bytes": peak,
        "snapshots_bytes": snapshots_peak,
        "one_token_bytes": plain,
        "tree_share": round(peak / states, 4),
        "snapshots_share": round(snapshots_peak / states, 2),
    }
