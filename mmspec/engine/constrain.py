"""Fits draft trees to grammars: cuts forbidden tokens and inserts forced tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from mmspec.core.drafter import Drafter
from mmspec.core.plan import StepPlan
from mmspec.core.tree import TokenTree, build_tree
from mmspec.drafters.growth import Nodes, best_first
from mmspec.sampling.sampler import SamplingState

_At = tuple[int | None, tuple[int, ...], tuple[int, ...]]  # drafted node, path to it, tokens forced after it


def constrain(
    rows: Sequence[SamplingState], tree: TokenTree, plan: StepPlan, drafter: Drafter | None = None
) -> TokenTree:
    """Fit a step's trees to the grammars of their sequences, before the verify pass.

    A forbidden draft is cut with its subtree; the probabilities of its siblings are renormalised. A forced token
    replaces all other drafts after its node. After forced tokens, and where all drafts were cut, a lookup drafter
    proposes again. EOS tokens are cut: the target may emit EOS after any node.

    Args:
        tree: the draft. A sampled tree is returned unchanged, as cutting would bias sampling: verification rejects
            forbidden drafts. A tree without constrained sequences is returned unchanged, too.
        plan: limits the fitted tree's size and depth.
        drafter: the drafter that proposed the tree.
    """
    if tree.draft_probs is not None or all(row.constraint is None for row in rows):
        return tree
    known = tree.log_probs is not None or tree.nodes == 1
    nodes = plan.most_nodes if known else tree.nodes - 1 + plan.depth
    root: _At = (0, (), ())
    fitted: list[Nodes] = []
    for place, row in enumerate(rows):
        depth = plan.depth if row.constraint else tree.max_depth
        fitted.append(
            best_first(root, _Drafts(row, tree, place, drafter).below, depth, nodes, plan.floor if known else 0.0)
        )
    probs = [gains for _, _, gains in fitted] if known else None
    return build_tree(tree.tokens[:, 0], [(tokens, parents) for tokens, parents, _ in fitted], probs)


class _Drafts:
    """Grammar-constrained drafts of one sequence, expanded by ``best_first``."""

    def __init__(self, row: SamplingState, tree: TokenTree, place: int, drafter: Drafter | None) -> None:
        self._row, self._place, self._drafter = row, place, drafter
        self._failed = False
        self._children = tree.children[place]
        self._gains = [1.0, *tree.path_probs[place]] if tree.log_probs is not None else [1.0] * tree.nodes

    def below(self, at: _At) -> Iterable[tuple[int, float, _At]]:
        """Children of a node: token, probability given the parent, and child node."""
        node, path, forced = at
        drafts = {} if node is None else self._children[node]
        grammar, matcher = self._row.sampler.constraint, self._row.constraint
        if grammar is None or matcher is None:
            assert node is not None
            return self._among(drafts, drafts, node, path)
        if self._failed:
            return ()
        try:
            if not forced:
                state = matcher.at(self._row.history, path)
                forced = tuple(grammar.forced(state))
            if forced:
                return [(forced[0], 1.0, (drafts.get(forced[0]), (*path, forced[0]), forced[1:]))]
            allowed = [token for token in drafts if grammar.allows(state, token)]
            if node is not None and (allowed or not drafts):
                return self._among(drafts, allowed, node, path)
            more = dict(self._drafter.continuations(self._place, path) if self._drafter else ())
            allowed = [token for token in more if grammar.allows(state, token)]
            return _renormalised(more, allowed, lambda token: (None, (*path, token), ()))
        except Exception:  # verification raises it again if it reaches this node
            self._failed = True
            return ()

    def _among(
        self, drafts: Mapping[int, int], allowed: Iterable[int], node: int, path: tuple[int, ...]
    ) -> Iterable[tuple[int, float, _At]]:
        """Allowed drafts after a node, with the drafter's probabilities given the node."""
        gains = self._gains
        shares = {
            token: gains[child] / gains[node] if child < len(gains) and gains[node] else 0.0
            for token, child in drafts.items()
        }
        return _renormalised(shares, allowed, lambda token: (drafts[token], (*path, token), ()))


def _renormalised(
    shares: Mapping[int, float], allowed: Iterable[int], place: Callable[[int], _At]
) -> Iterator[tuple[int, float, _At]]:
    """Allowed tokens, probabilities renormalised without the forbidden tokens, and nodes."""
    kept = {token: shares[token] for token in allowed if shares[token] > 0.0}
    left = 1.0 - sum(share for token, share in shares.items() if token not in kept)
    for token, share in kept.items():
        yield token, min(share / max(left, share), 1.0), place(token)
