"""Records of verified trees."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.core.target import TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict


@dataclass(frozen=True)
class TreeRecord:
    """Tree of one sequence in one step, with its verdict.

    Attributes:
        tokens, parents: of each node, root first, with parent -1.
        path: nodes of the accepted path, root first. The step emits their tokens without the root's, then the bonus.
        probs: the target's probability of each node's token given its parent, before processors and temperature; 1 for
            the root.
        bonus_prob: the same for the bonus token.
        guesses: the drafter's probabilities, if it has any.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    bonus: int
    probs: list[float]
    bonus_prob: float
    guesses: list[float] | None = None


def record_tree(tree: TokenTree, row: int, verdict: Verdict, output: TargetOutput) -> TreeRecord:
    """Record one row of a verified tree; ``step`` is the output of the verify pass."""
    path, emitted = verdict.host[row]
    nodes, logits, bonus = tree.drafted[row] + 1, output.logits[row], emitted[-1]  # padding is at the end
    tokens, parents = tree.tokens[row, :nodes], tree.parents[row, :nodes]
    norm = logits.float().logsumexp(-1)
    above = parents[1:]
    probs = (logits[above, tokens[1:]].float() - norm[above]).exp().tolist()
    last = path[-1]
    bonus_prob = float((logits[last, bonus].float() - norm[last]).exp())
    up = parents.tolist()
    along = [1.0, *(tree.path_probs[row][: nodes - 1] if tree.log_probs is not None else ())]
    shown = len(along) == nodes > 1
    guesses = [1.0] + [along[i] / along[up[i]] for i in range(1, nodes)] if shown else None
    return TreeRecord(tokens.tolist(), up, path, bonus, [1.0, *probs], bonus_prob, guesses)
