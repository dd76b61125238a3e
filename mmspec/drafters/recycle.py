"""Token Recycling (arXiv 2408.08696): the candidates that the target ranked high last time, as next time's draft.

Every pass of the target ranks successors for every token that it sees, accepted or not. A table keeps the latest
``top_k`` per token, and a tree is grown through the table as if it were a bigram model.
"""

from __future__ import annotations

from torch import Tensor

from mmspec.budget import Budget
from mmspec.drafter import build_tree
from mmspec.drafters.growth import best_first
from mmspec.errors import UserError
from mmspec.target import Prompt, Step, Target
from mmspec.tree import TokenTree
from mmspec.verify import Verdict

Successors = list[tuple[int, float, int]]  # (token, probability, state), the state of the growth being the token


class Recycle:
    """Successor-table drafter.

    The table outlives requests: what the target ranked for one answer drafts the next one. ``reset`` forgets it.

    Args:
        top_k: successors kept per token.

    Raises:
        UserError: ``top_k`` is below 1.
    """

    def __init__(self, top_k: int = 8) -> None:
        if top_k < 1:
            raise UserError(f"top_k must be at least 1: got {top_k}")
        self.top_k = top_k
        self._table: dict[int, Successors] = {}
        self._vocab: int | None = None
        self._history: list[list[int]] = []

    def attach(self, target: Target) -> None:
        """Any target will do."""

    def reset(self) -> None:
        """Forget all successors."""
        self._table.clear()

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        if self._vocab != step.logits.shape[-1]:
            self.reset()  # the table of another vocabulary
        self._vocab = step.logits.shape[-1]
        self._history = history
        self._learn(prompt.input_ids[:, -1:], step.logits)

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        table = self._table
        grown = [
            best_first(row[-1], lambda t: table.get(t, ()), budget.max_depth, budget.nodes, budget.floor)
            for row in self._history
        ]
        keep = budget.take([gains for _, _, gains in grown])
        return build_tree(token, [(tokens[:keep], parents[:keep]) for tokens, parents, _ in grown])

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        self._learn(tree.tokens, step.logits)

    def _learn(self, tokens: Tensor, logits: Tensor) -> None:
        """Rank successors anew for every token in ``tokens``, (batch, nodes); ``logits``: (batch, nodes, vocab)."""
        logits = logits.float()
        best, ranked = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)
        probs = (best - logits.logsumexp(-1, keepdim=True)).exp()
        rows = zip(tokens.flatten().tolist(), ranked.flatten(0, 1).tolist(), probs.flatten(0, 1).tolist(), strict=True)
        # Deeper nodes come later and win where a token occurs twice: they have seen more of the answer.
        self._table.update((token, list(zip(follow, p, follow, strict=True))) for token, follow, p in rows)
