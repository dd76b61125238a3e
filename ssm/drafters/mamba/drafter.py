"""Mamba-2 drafter: a small language model of the target's vocabulary with constant-size state.

A step advances the state by the emitted tokens, then grows a tree (``grow_tree``) in which every beam node has its own
state, computed from its parent's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec import ops
from mmspec.cache.rows import RowTensor
from mmspec.core.budget import Budget
from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters import checkpoint
from mmspec.drafters.captured import RowState, write_last
from mmspec.drafters.growth import grow_tree
from mmspec.drafters.shape import TreeShape
from mmspec.drafters.trained import TrainedDrafter
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.transfer import on_device
from mmspec.ssm.drafters.mamba import MambaConfig
from mmspec.ssm.drafters.mamba.network import MambaNetwork, State
from mmspec.targets.support import lay_out_for_few_rows


class Mamba(TrainedDrafter):
    """Mamba-2 drafter for targets of the same vocabulary. Image placeholders are treated as tokens.

    Args:
        network: the trained network, moved to the target's device; in the target's dtype on a GPU, where weight reads
            dominate, else float32.
        draft_ids, **settings: see ``TrainedDrafter``.
    """

    name: ClassVar[str] = "mamba"  # as registered

    config_class = MambaConfig
    network_class = MambaNetwork
    usual_tree = TreeShape(top_k=8, depth=6, total_tokens=40)

    def __init__(self, network: MambaNetwork, draft_ids: Tensor | None = None, **settings: Any) -> None:
        self._head = torch.empty(0)  # (draft tokens, hidden)
        super().__init__(network, draft_ids, **settings)

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        self._output = RowTensor(static_shapes)  # (rows, hidden), at each row's last token
        self._state = [(RowTensor(static_shapes), RowTensor(static_shapes)) for _ in range(self.network.config.layers)]
        self._buffers: list[list[Tensor]] = []  # states of even and odd tree levels

    def attach(self, target: Target) -> None:
        if target is self._target:
            return
        if self.verifier is not None:
            checkpoint.check_verifier(self.verifier, target)
        config: Any = getattr(target, "config", None)
        size, target_size = self.network.config.vocab_size, getattr(config, "vocab_size", None)
        if target_size is not None and size != target_size:
            raise UserError(
                f"drafter and target must share a vocabulary: the drafter has {size} tokens, the target {target_size}"
            )
        like = target.embed(torch.zeros(1, dtype=torch.long, device=target.device))
        self.network.to(like.device, torch.float32 if like.device.type == "cpu" else like.dtype)
        lay_out_for_few_rows(self.network)
        self.network.freeze()
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(target.device)
        self._head = self.network.head_rows(self.draft_ids)
        self._target = target
        self.reset()

    @property
    def parts(self) -> tuple[RowState, ...]:
        return self._output, *(part for layer in self._state for part in layer)

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        device = self._head.device
        self.join(len(history), kernels.static_shapes(device))
        prompts = replace(prompt, padding_in_history=False).histories()
        rows = [[*row, tokens[-1]] for row, tokens in zip(prompts, history, strict=True)]
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        tokens = on_device([row + [0] * (longest - len(row)) for row in rows], device)
        length = on_device(lengths, device)
        keep = None if min(lengths) == longest else torch.arange(longest, device=device) < length[:, None]
        hidden, state = self.network(tokens, keep)
        self._output.append(hidden[torch.arange(len(rows), device=device), length - 1])
        for buffers, new in zip(self._state, state, strict=True):
            for part, value in zip(buffers, new, strict=True):
                part.append(value)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Queue the accepted tokens."""
        self.queue((verdict.tokens,), verdict)

    def update(self, tokens: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Advance the state by accepted tokens, (batch, width)."""
        batch, width = tokens.shape
        keep = torch.arange(width, device=tokens.device) < length[:, None]
        hidden, state = self.network(tokens, keep, self._first(batch))
        for buffers, new in zip(self._state, state, strict=True):
            for part, value in zip(buffers, new, strict=True):
                part.write(value)
        write_last(self._output, hidden, length)

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        rows, width, levels = len(token), 1, 0
        state = self._first(rows)
        if not self.static_shapes and (not self._buffers or len(self._buffers[0][0]) < rows * self.top_k):
            # On a CPU, allocating states costs more than computing them.
            self._buffers = [[s.new_empty(rows * self.top_k, *s.shape[1:]) for _, s in state] for _ in range(2)]

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal state, width, levels
            above = origin
            if rows > 1:
                above = origin + width * torch.arange(rows, device=beam.device)[:, None]
            above = above.flatten()
            buffers = self._buffers[levels % 2] if self._buffers else [None] * len(state)
            taken = tuple(
                (window.index_select(0, above), _select(s, above, buffer))
                for (window, s), buffer in zip(state, buffers, strict=True)
            )
            hidden, state = self.network.step(beam.flatten(), taken)
            width, levels = beam.shape[1], levels + 1
            tokens, scores = self._children(hidden)
            return tokens.view(*beam.shape, -1), scores.view(*beam.shape, -1)

        first = self._children(self._output.data[:rows])
        return grow_tree(token, first, extend, budget, self.top_k, depth=self.depth, nodes=self.total_tokens)

    def _first(self, rows: int) -> State:
        return tuple((window.data[:rows], s.data[:rows]) for window, s in self._state)

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k next tokens and log probabilities, (rows, top_k) each, from hidden states, (rows, hidden)."""
        tokens, best = ops.top_log_probs(torch.nn.functional.linear(hidden, self._head), self.top_k)
        return tokens if self.draft_ids is None else self.draft_ids[tokens], best


def _select(states: Tensor, rows: Tensor, buffer: Tensor | None) -> Tensor:
    """Copy some rows, to ``buffer`` if given."""
    if buffer is None:
        return states.index_select(0, rows)
    return torch.index_select(states, 0, rows, out=buffer[: len(rows)])
