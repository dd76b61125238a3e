"""A small Mamba-2 of the target's vocabulary as drafter: it reads tokens only, and its state stays one size.

Each step it absorbs the tokens emitted since the last one, once, then grows a tree (``grow_tree``) in which every node
of a beam carries a state of its own, taken from its parent's. The state behind what was emitted is never touched.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mmspec import checkpoint, kernels, ops
from mmspec.budget import Budget
from mmspec.checkpoint import TREE, TreeShape
from mmspec.drafters.growth import grow_tree
from mmspec.errors import UserError
from mmspec.support import lay_out_for_few_rows
from mmspec.target import Prompt, Step, Target
from mmspec.tree import TokenTree
from mmspec.verify import Verdict
from ssm.drafters.captured import Captured
from ssm.drafters.network import MambaConfig, MambaNetwork, State


@dataclass(frozen=True)
class _Settings(TreeShape):
    """What ``config.json`` holds."""

    network: MambaConfig


class Mamba:
    """Drafter for any target of the vocabulary that its network was trained for. Image placeholders are tokens to it.

    Args:
        network: the trained network; it is moved to the target's device. There it has the target's precision if the
            device is a GPU, where reading weights takes the time, else float32.
        draft_ids: (n,) int64, the tokens that may be drafted; None allows all. A smaller head costs less.
        top_k: nodes extended per level, and children per node.
        depth: levels of the tree below its root.
        total_tokens: drafted nodes at most.
        verifier: the target that it was trained for, as checkpoints name it.
    """

    name: ClassVar[str] = "mamba"  # as registered
    learns: ClassVar[bool] = False

    def __init__(
        self,
        network: MambaNetwork,
        draft_ids: Tensor | None = None,
        *,
        top_k: int = 8,
        depth: int = 6,
        total_tokens: int = 40,
        verifier: dict[str, Any] | None = None,
    ) -> None:
        self.network = network
        self.draft_ids = draft_ids
        TreeShape(top_k, depth, total_tokens)
        self.top_k, self.depth, self.total_tokens = top_k, depth, total_tokens
        self.verifier = verifier
        self._target: Target | None = None
        self._head = torch.empty(0)  # (draft tokens, hidden)
        self._history: list[list[int]] = []
        self._absorbed: list[int] = []  # tokens of each row's history that the state has absorbed
        self._state: State = ()  # of each row, behind them
        self._root = torch.empty(0)  # (batch, hidden) what they say of the next token
        self._rooms: list[list[Tensor]] = []  # where the states of a tree's even and odd levels are written
        self._captured = Captured(self)  # what takes the place of these where shapes are fixed

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Self:
        """Read what ``save`` wrote; raises ``UserError`` where it is damaged."""
        settings, verifier, tensors = checkpoint.read(folder, _Settings)
        draft_ids = checkpoint.take_draft_ids(tensors, settings.network.vocab_size, folder)
        with torch.device("meta"):
            network = MambaNetwork(settings.network)
        checkpoint.load_exactly(network, tensors, folder)
        tree = {name: getattr(settings, name) for name in TREE}
        return cls(network, draft_ids, **tree, verifier=verifier)

    def save(self, folder: Path, target: Any) -> None:
        """Write a drafter checkpoint for ``target``."""
        tensors = dict(self.network.state_dict())
        if self.draft_ids is not None:
            tensors["draft_ids"] = self.draft_ids
        settings = {name: getattr(self, name) for name in TREE}
        checkpoint.write(folder, self.name, {"network": asdict(self.network.config), **settings}, tensors, target)

    def attach(self, target: Target) -> None:
        if target is self._target:
            return
        if self.verifier is not None:
            checkpoint.check_verifier(self.verifier, target)
        config: Any = getattr(target, "config", None)
        ours, theirs = self.network.config.vocab_size, getattr(config, "vocab_size", None)
        if theirs is not None and ours != theirs:
            raise UserError(
                f"drafter and target must share a vocabulary: the drafter has {ours} tokens, the target {theirs}"
            )
        like = target.embed(torch.zeros(1, dtype=torch.long, device=target.device))
        self.network.to(like.device, torch.float32 if like.device.type == "cpu" else like.dtype)
        lay_out_for_few_rows(self.network)
        self.network.freeze()
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(target.device)
        self._head = self.network.head_rows(self.draft_ids)
        self._target = target

    @torch.inference_mode()
    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        rows = prompt.input_ids.tolist()
        if prompt.attention_mask is not None:
            keep = prompt.attention_mask.tolist()
            rows = [[t for t, k in zip(row, mask, strict=True) if k] for row, mask in zip(rows, keep, strict=True)]
        self._state = self.network.begin(len(rows))
        self._root = self._state[0][0].new_zeros(len(rows), self.network.config.hidden_size)
        self._absorb(rows)
        self._history = history
        self._absorbed = [len(row) - 1 for row in history]
        self._rooms = []
        if kernels.fixed_shapes(self._root.device):
            first = torch.tensor([[row[-1]] for row in history], device=self._root.device)
            self._captured.begin(self._state, self._root, first)
            return
        # Blocks of this size are fresh memory each time they are asked for, which costs more than what is done in them.
        most = len(rows) * self.top_k
        self._rooms = [[s.new_empty(most, *s.shape[1:]) for _, s in self._state] for _ in range(2)]

    @torch.inference_mode()
    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        if kernels.fixed_shapes(token.device):
            return self._captured.propose(token, budget)
        self._absorb([row[done:] for row, done in zip(self._history, self._absorbed, strict=True)])
        self._absorbed = [len(row) for row in self._history]
        return self.grow(token, self._state, self._root, budget)

    def grow(self, token: Tensor, state: State, root: Tensor, budget: Budget) -> TokenTree:
        """The tree behind the state of each row and what it says of the next token, ``root`` (batch, hidden)."""
        width, levels = 1, 0

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal state, width, levels
            above = origin
            if len(beam) > 1:
                above = origin + width * torch.arange(len(beam), device=beam.device)[:, None]
            above = above.flatten()
            rooms = self._rooms[levels % 2] if self._rooms else [None] * len(state)
            taken = tuple(
                (window.index_select(0, above), _select(s, above, room))
                for (window, s), room in zip(state, rooms, strict=True)
            )
            hidden, state = self.network.step(beam.flatten(), taken)
            width, levels = beam.shape[1], levels + 1
            tokens, scores = self._children(hidden)
            return tokens.view(*beam.shape, -1), scores.view(*beam.shape, -1)

        size = {"depth": self.depth, "nodes": self.total_tokens}
        return grow_tree(token, self._children(root), extend, budget, self.top_k, **size)

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """Accepted tokens are absorbed when the next tree is asked for."""
        if kernels.fixed_shapes(step.logits.device):
            self._captured.observe(verdict)

    def _absorb(self, rows: list[list[int]]) -> None:
        """Take in new tokens of each row; ``_root`` becomes what they say of the next one."""
        lengths = [len(row) for row in rows]
        longest, device = max(lengths), self._root.device
        if longest == 0:
            return
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        if min(lengths) == longest:
            hidden, self._state = self.network(tokens, None, self._state)
            self._root = hidden[:, -1]
            return
        ends = torch.tensor(lengths, device=device)
        keep = torch.arange(longest, device=device) < ends[:, None]
        hidden, self._state = self.network(tokens, keep, self._state)
        last = hidden[torch.arange(len(rows), device=device), (ends - 1).clamp(min=0)]
        # A row that has finished has nothing new.
        self._root = torch.where(ends[:, None] > 0, last, self._root)

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens behind states, (rows, hidden), and their log probabilities: (rows, top_k) each."""
        tokens, best = ops.top_log_probs(torch.nn.functional.linear(hidden, self._head), self.top_k)
        return tokens if self.draft_ids is None else self.draft_ids[tokens], best


def _select(states: Tensor, rows: Tensor, room: Tensor | None) -> Tensor:
    """A copy of some rows, written to ``room`` if there is one."""
    if room is None:
        return states.index_select(0, rows)
    return torch.index_select(states, 0, rows, out=room[: len(rows)])
