"""A small causal language model of the same vocabulary as drafter, with its own KV cache.

It reads text only: visual positions of the prompt are left out of what it sees.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmspec import ops
from mmspec.budget import Budget
from mmspec.drafters.captured import CapturedSteps, hold
from mmspec.drafters.growth import Reach, grow_tree
from mmspec.errors import UserError
from mmspec.hub import cache_if_offline
from mmspec.support import read_whole
from mmspec.target import Prompt, Step, Target
from mmspec.transformers_target import TransformersTarget
from mmspec.tree import TokenTree
from mmspec.verify import Verdict

_DEPTH, _NODES = 16, 512  # levels and nodes of a tree where they are fixed ahead; budgets ask for less


class Small:
    """Draft-model drafter.

    Args:
        model: a causal language model of the target's vocabulary, or the name or folder of one.
        top_k: nodes extended per level, and children per node.
        trust_remote_code: let the model's folder run Python code that it brings along.

    Raises:
        UserError: no model given, one with layers other than attention, or (at ``attach``) one of another vocabulary
            size.
    """

    learns: ClassVar[bool] = False

    def __init__(
        self, model: PreTrainedModel | str | None = None, top_k: int = 8, trust_remote_code: bool = False
    ) -> None:
        if model is None:
            raise UserError(
                "the small drafter needs a model: expected small:NAME or mmspec.drafters.small.Small(model)"
            )
        if isinstance(model, str):
            model = _read(model, trust_remote_code)
        self.model: PreTrainedModel = model.eval()
        self.top_k = top_k
        self.lm = TransformersTarget(self.model)
        if self.lm.layers is not None:
            # A recurrent state cannot be built upon before its tokens are accepted.
            raise UserError(
                f"the small drafter must have attention layers only: {type(self.model).__name__} has others"
            )
        self._history: list[list[int]] = []
        self._absorbed: list[int] = []  # tokens of each row's history that the cache holds
        self._captured = _Captured(self)  # what takes the place of these where the cache stays in place

    def attach(self, target: Target) -> None:
        config: Any = getattr(target, "config", None)
        ours, theirs = self.lm.config.vocab_size, getattr(config, "vocab_size", None)
        if theirs is not None and ours > theirs:
            raise UserError(
                f"drafter and target must share a vocabulary: the drafter has {ours} tokens, the target {theirs}"
            )
        self.model.to(target.device)  # type: ignore[arg-type]

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        keep = torch.ones_like(prompt.input_ids) if prompt.attention_mask is None else prompt.attention_mask.long()
        if step.visual is not None:
            keep = keep * ~step.visual
        # Left-padded with what is kept, in order.
        order = keep.sort(dim=1, stable=True).indices
        width = int(keep.sum(1).max())
        ids, mask = prompt.input_ids.gather(1, order)[:, -width:], keep.gather(1, order)[:, -width:]
        ids = ids.clamp(max=self.lm.config.vocab_size - 1)
        self.lm.prefill(Prompt(ids, None if bool(mask.all()) else mask), room=1024)
        self._history = history
        self._absorbed = [len(row) - 1 for row in history]
        if self.lm.cache.in_place:
            self._captured.begin(torch.tensor([[row[-1]] for row in history], device=ids.device))

    @torch.inference_mode()
    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        if self.lm.cache.in_place:
            return self._captured.propose(token, budget)
        return self.grow(token, self._absorb(token.device), budget)

    def grow(self, token: Tensor, root: Tensor, budget: Budget) -> TokenTree:
        """The tree behind the root's state, (batch, hidden), where the cache ends with the root."""
        lm, reach, levels = self.lm, Reach(), 0
        lm.forget_nodes()

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal levels
            depth = torch.full_like(beam, levels)
            states = lm.forward_nodes(beam, depth, reach(origin))
            lm.keep_nodes(depth)
            levels += 1
            return self._children(states)

        tree = grow_tree(token, self._children(root), extend, budget, self.top_k)
        lm.forget_nodes()
        return tree

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """Accepted tokens are absorbed, with true prefixes, when the next tree is asked for."""
        if self.lm.cache.in_place:
            self._captured.note((verdict.tokens, verdict.length), [len(path) for path, _ in verdict.host])

    def forward_new(self, tokens: Tensor) -> Tensor:
        """Last hidden states of tokens, (batch, width), one behind the other behind what is committed."""
        batch, width = tokens.shape
        chain = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()[None].expand(batch, -1, -1)
        depth = torch.arange(width, device=tokens.device).expand(batch, -1)
        # The target may say what this model cannot read.
        return self.lm.forward_nodes(tokens.clamp(max=self.lm.config.vocab_size - 1), depth, chain)

    def _absorb(self, device: torch.device) -> Tensor:
        """Take in the tokens emitted since the last proposal, root included; the root's state, (batch, hidden)."""
        new = [row[done:] for row, done in zip(self._history, self._absorbed, strict=True)]
        # A row that has finished has nothing new: its last token is read again and not kept.
        width = max(1, max(map(len, new)))
        ids = torch.tensor([(row or [0]) + [0] * (width - max(1, len(row))) for row in new], device=device)
        states = self.forward_new(ids)
        rows = [list(range(len(row))) for row in new]
        path = torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=device)
        self.lm.commit_nodes(path, rows)
        self._absorbed = [len(row) for row in self._history]
        last = torch.tensor([max(len(row), 1) - 1 for row in new], device=device)
        return states[torch.arange(len(new), device=device), last]

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return ops.top_log_probs(self.lm.head(hidden), self.top_k)


def _read(name: str, trust_remote_code: bool) -> PreTrainedModel:
    with cache_if_offline("drafter", name) as found:
        return read_whole(AutoModelForCausalLM, name, trust_remote_code=trust_remote_code, **found)


class _Captured(CapturedSteps):
    """What ``Small`` does between prompts where its model's cache stays in place.

    Attributes:
        root: (batch, hidden), the last hidden state of the root.
    """

    def __init__(self, drafter: Small) -> None:
        super().__init__()
        self._drafter = drafter
        self.root = torch.empty(0)

    def begin(self, first: Tensor) -> None:
        """A prompt was absorbed, behind which ``first``, (batch, 1), was said."""
        lm = self._drafter.lm
        embedding: Any = lm.model.get_input_embeddings()
        hold(self, root=embedding.weight.new_zeros(len(first), lm.config.hidden_size))
        self.start((first[:, :0], torch.zeros_like(first[:, 0])))
        self.note((first, torch.ones_like(first[:, 0])), [1] * len(first))

    def limits(self) -> tuple[int, int]:
        return _DEPTH, _NODES

    def make_room(self, width: int) -> Hashable:
        cache = self._drafter.lm.cache
        cache.make_room(width + _DEPTH * self._drafter.top_k)
        return cache.version

    def count(self, kept: list[int]) -> None:
        self._drafter.lm.cache.count(kept)

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        return self._drafter.grow(token, self.root, budget)

    def absorb(self, tokens: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Take in accepted tokens, (batch, width), as many as ``length``, (batch,), says."""
        drafter, step = self._drafter, torch.arange(tokens.shape[1], device=tokens.device)
        drafter.lm.forget_nodes()
        states = drafter.forward_new(tokens)
        drafter.lm.absorb(torch.where(step < length[:, None], step, -1))
        last = (length - 1).clamp(min=0)[:, None, None].expand(-1, -1, states.shape[2])
        self.root.copy_(torch.where(length[:, None] > 0, states.gather(1, last)[:, 0], self.root))
