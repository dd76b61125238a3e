"""Token Recycling (arXiv 2408.08696): the candidates that the target ranked high last time, as next time's draft.

Every pass of the target ranks successors for every token that it sees, accepted or not. A table keeps the latest
``top_k`` per token, and a tree is grown through the table breadth first, as if it were a bigram model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.budget import Budget
from mmspec.drafters.growth import grow_tree
from mmspec.errors import UserError
from mmspec.target import Prompt, Step, Target
from mmspec.tree import TokenTree
from mmspec.verify import Verdict


class Recycle:
    """Successor-table drafter.

    The table outlives requests: what the target ranked for one answer drafts the next one.

    Args:
        top_k: successors kept per token.

    Raises:
        UserError: ``top_k`` is below 1.
    """

    def __init__(self, top_k: int = 8) -> None:
        if top_k < 1:
            raise UserError(f"top_k must be at least 1: got {top_k}")
        self.top_k = top_k
        self._tokens: Tensor | None = None  # (vocab, top_k)
        self._log_probs: Tensor | None = None  # (vocab, top_k), -inf where nothing is known

    def attach(self, target: Target) -> None:
        """Any target will do; another target's table is forgotten."""
        self.reset()

    def reset(self) -> None:
        """Forget all successors."""
        self._tokens = self._log_probs = None

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        if self._tokens is None:
            shape = (step.logits.shape[-1], self.top_k)
            self._tokens = torch.zeros(shape, dtype=torch.long, device=step.logits.device)
            self._log_probs = torch.full(shape, -torch.inf, device=step.logits.device)
        self._learn(prompt.input_ids[:, -1:], step.logits)

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        tokens, log_probs = self._tokens, self._log_probs
        assert tokens is not None and log_probs is not None
        return grow_tree(
            token,
            (tokens[token], log_probs[token]),
            lambda beam, node, origin: (tokens[beam], log_probs[beam]),
            budget,
            self.top_k,
        )

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        # Deeper nodes are written later and win where a token occurs twice: index_put keeps one of them.
        self._learn(tree.tokens, step.logits)

    def _learn(self, tokens: Tensor, logits: Tensor) -> None:
        assert self._tokens is not None and self._log_probs is not None
        best, ranked = logits.float().topk(self.top_k, dim=-1)
        self._tokens[tokens] = ranked
        self._log_probs[tokens] = best - logits.float().logsumexp(-1, keepdim=True)
