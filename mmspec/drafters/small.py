"""A small causal language model of the same vocabulary as drafter, with its own KV cache.

It reads text only: visual positions of the prompt are left out of what it sees.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmspec.budget import Budget
from mmspec.drafters.growth import Reach, grow_tree
from mmspec.errors import UserError
from mmspec.target import Prompt, Step, Target
from mmspec.transformers_target import TransformersTarget
from mmspec.tree import TokenTree
from mmspec.verify import Verdict


class Small:
    """Draft-model drafter.

    Args:
        model: a causal language model of the target's vocabulary, or the name or folder of one.
        top_k: nodes extended per level, and children per node.

    Raises:
        UserError: no model given, one with layers other than attention, or (at ``attach``) one of another vocabulary
            size.
    """

    learns: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel | str | None = None, top_k: int = 8) -> None:
        if model is None:
            raise UserError(
                "the small drafter needs a model: expected small:NAME or mmspec.drafters.small.Small(model)"
            )
        self.model = AutoModelForCausalLM.from_pretrained(model).eval() if isinstance(model, str) else model
        self.top_k = top_k
        self._lm = TransformersTarget(self.model)
        if self._lm.layers is not None:
            # A recurrent state cannot be built upon before its tokens are accepted.
            raise UserError(
                f"the small drafter must have attention layers only: {type(self.model).__name__} has others"
            )
        self._history: list[list[int]] = []
        self._absorbed: list[int] = []  # tokens of each row's history that the cache holds

    def attach(self, target: Target) -> None:
        config: Any = getattr(target, "config", None)
        ours, theirs = self._lm.config.vocab_size, getattr(config, "vocab_size", None)
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
        ids = ids.clamp(max=self._lm.config.vocab_size - 1)
        self._lm.prefill(Prompt(ids, None if bool(mask.all()) else mask), room=1024)
        self._history = history
        self._absorbed = [len(row) - 1 for row in history]

    @torch.inference_mode()
    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        lm = self._lm
        hidden = self._absorb(token.device)
        # From here on the cache ends with the root; nodes of the tree are at depth 0 of it and below.
        levels, reach = 0, Reach()

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal levels
            depth = torch.full_like(beam, levels)
            states = lm.forward_nodes(beam, depth, reach(origin))
            lm.keep_nodes(depth)
            levels += 1
            return self._children(states)

        first_tokens, first_scores = self._children(hidden)
        tree = grow_tree(token, (first_tokens, first_scores), extend, budget, self.top_k)
        lm.commit_nodes(torch.full_like(token[:, None], -1), [[] for _ in range(len(self._history))])
        return tree

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """Accepted tokens are absorbed, with true prefixes, when the next tree is asked for."""

    def _absorb(self, device: torch.device) -> Tensor:
        """Take in the tokens emitted since the last proposal, root included; the root's state, (batch, hidden)."""
        new = [row[done:] for row, done in zip(self._history, self._absorbed, strict=True)]
        # A row that has finished has nothing new: its last token is read again and not kept.
        width = max(1, max(map(len, new)))
        ids = torch.tensor([(row or [0]) + [0] * (width - max(1, len(row))) for row in new], device=device)
        ids = ids.clamp(max=self._lm.config.vocab_size - 1)  # the target may say what this model cannot read
        chain = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None].expand(len(new), -1, -1)
        depth = torch.arange(width, device=device).expand(len(new), -1)
        states = self._lm.forward_nodes(ids, depth, chain)
        rows = [list(range(len(row))) for row in new]
        path = torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=device)
        self._lm.commit_nodes(path, rows)
        self._absorbed = [len(row) for row in self._history]
        last = torch.tensor([max(len(row), 1) - 1 for row in new], device=device)
        return states[torch.arange(len(new), device=device), last]

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = self._lm.head(hidden).float().log_softmax(-1)
        scores, tokens = log_probs.topk(min(self.top_k, log_probs.shape[-1]), dim=-1)
        return tokens, scores
