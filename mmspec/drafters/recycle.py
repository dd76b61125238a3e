"""Token Recycling (arXiv 2408.08696): the candidates that the target ranked high last time, as next time's draft.

Every pass of the target ranks successors at every node that it sees, accepted or not. A table keeps the latest
``top_k``, and a tree is grown through the table. The paper keeps one entry per token; here an entry for the last two
tokens comes before that for the last one, which is what a longer context is worth to a bigram model.
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

Context = tuple[int, int]  # the last two tokens
Successors = list[tuple[int, float, Context]]  # (token, probability, context that the token leads to)

_PAIRS = 200_000  # two-token entries kept, the oldest given up first


class Recycle:
    """Successor-table drafter.

    The table outlives requests: what the target ranked for one answer drafts the next one. ``reset`` forgets it.

    Args:
        top_k: successors kept per entry.
        pairs: keep entries for the last two tokens too; False is the paper's table.

    Raises:
        UserError: ``top_k`` is below 1.
    """

    def __init__(self, top_k: int = 8, pairs: bool = True) -> None:
        if top_k < 1:
            raise UserError(f"top_k must be at least 1: got {top_k}")
        self.top_k = top_k
        self.pairs = pairs
        self._by_token: dict[int, Successors] = {}
        self._by_pair: dict[Context, Successors] = {}
        self._vocab: int | None = None
        self._last: list[Context] = []  # per row, the token before the root, and the root

    def attach(self, target: Target) -> None:
        """Any target will do."""

    def reset(self) -> None:
        """Forget all successors."""
        self._by_token.clear()
        self._by_pair.clear()

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        if self._vocab != step.logits.shape[-1]:
            self.reset()  # the table of another vocabulary
        self._vocab = step.logits.shape[-1]
        ends = [([-1, *row][-2], row[-1]) for row in prompt.input_ids.tolist()]
        self._last = [(end[1], row[-1]) for end, row in zip(ends, history, strict=True)]
        self._learn(ends, step.logits)

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        grown = [
            best_first(last, self._successors, budget.max_depth, budget.nodes, budget.floor) for last in self._last
        ]
        keep = budget.take([gains for _, _, gains in grown])
        return build_tree(token, [(tokens[:keep], parents[:keep]) for tokens, parents, _ in grown])

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        contexts: list[Context] = []
        for (before, _), tokens, parents in zip(self._last, tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            contexts += [(tokens[up] if up >= 0 else before, token) for token, up in zip(tokens, parents, strict=True)]
        self._last = [
            (*last, *tokens)[-2:]  # type: ignore[misc]
            for last, (_, tokens) in zip(self._last, verdict.host, strict=True)
        ]
        self._learn(contexts, step.logits)

    def _successors(self, context: Context) -> Successors:
        return self._by_pair.get(context) or self._by_token.get(context[1], [])

    def _learn(self, contexts: list[Context], logits: Tensor) -> None:
        """Rank successors anew for every context; ``logits``: (batch, nodes, vocab), in the order of ``contexts``."""
        logits = logits.float()
        best, ranked = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)
        probs = (best - logits.logsumexp(-1, keepdim=True)).exp()
        rows = zip(contexts, ranked.flatten(0, 1).tolist(), probs.flatten(0, 1).tolist(), strict=True)
        for context, follow, chance in rows:
            # Deeper nodes come later and win where a context occurs twice: they have seen more of the answer.
            entry = [(t, p, (context[1], t)) for t, p in zip(follow, chance, strict=True)]
            self._by_token[context[1]] = entry
            if self.pairs:
                self._by_pair[context] = entry
        while len(self._by_pair) > _PAIRS:
            del self._by_pair[next(iter(self._by_pair))]
