"""Draft tree growth, by descending path probability.

``best_first`` is for lookup drafters on the host, several of which can grow one tree together; ``grow_tree`` for
drafters with a forward pass per level. Both sort nodes by descending path probability, parents first, so that every
prefix of the nodes is a tree.

``grow_levels`` and ``grow_slots`` are for drafters that predict all levels in one pass, one slot per level. If slots
are independent, all nodes of a level have the same children (DDTree, arXiv 2604.12989).
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec import ops
from mmspec.core.drafter import Drafter
from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, Prompt, TargetOutput
from mmspec.core.tree import TokenTree, best_chains, build_tree, merge
from mmspec.core.verify import Verdict
from mmspec.ops import kernels
from mmspec.targets.decoder import VerifyRunner

State = TypeVar("State")
Nodes = tuple[list[int], list[int], list[float]]
Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def best_first(
    root: State,
    children: Callable[[State], Iterable[tuple[int, float, State]]],
    depth: int,
    nodes: int,
    floor: float,
    width: int | None = None,
) -> Nodes:
    """Best-first search for the most probable nodes of a lazily expanded tree.

    Args:
        children: given a state, yields ``(token, conditional probability, state)`` per child, with distinct tokens.
        floor: minimum path probability of a node.
        width: maximum children per node, most probable first; None keeps all.

    Returns:
        Tokens, parents (0 is the root, i the i-th node) and path probabilities, in descending order.
    """
    tokens: list[int] = []
    parents: list[int] = []
    gains: list[float] = []
    heap: list[tuple[float, int, int, int, int, State]] = []
    pushed, node, gain, level, state = 0, 0, 1.0, 0, root
    while True:
        if level < depth:
            candidates = children(state)
            if width is not None:
                candidates = heapq.nlargest(width, candidates, key=lambda child: child[1])
            for token, share, below in candidates:
                if gain * share >= floor:
                    # The counter breaks ties in insertion order; states are not comparable.
                    pushed += 1
                    heapq.heappush(heap, (-gain * share, pushed, token, node, level + 1, below))
        if not heap or len(tokens) >= nodes:
            return tokens, parents, gains
        negative, _, token, parent, level, state = heapq.heappop(heap)
        node, gain = len(tokens) + 1, -negative
        tokens.append(token)
        parents.append(parent)
        gains.append(gain)


def grow_tree(
    token: Tensor,
    first: tuple[Tensor, Tensor] | None,
    extend: Extend,
    plan: StepPlan,
    top_k: int,
    *,
    depth: int | None = None,
    nodes: int | None = None,
) -> TokenTree:
    """Grow the dynamic draft tree of EAGLE-2 (arXiv 2406.16858, section 4), one per row.

    Beam search expands the ``top_k`` best nodes of each level; the candidates with the highest path probability form
    the tree. With static shapes, the depth is the plan's: early exit would need a host sync per level.

    Args:
        first: the root's children, ``(tokens, log_probs)``, (batch, children) each, in descending order; None calls
            ``extend`` on the roots.
        extend: given the next beam's tokens, (batch, width), and the index of each token's parent in the previous beam,
            (batch, width), initially 0, returns children as ``(tokens, log_probs)``, (batch, width, children) each.
    """
    batch, kept_children = token.shape[0], 1 if plan.chain else None
    if first is None:
        drafted, chances = extend(token[:, None], torch.zeros_like(token[:, None]))
    else:
        drafted, chances = first[0][:, None], first[1][:, None]
    drafted, chances = drafted[..., :kept_children], chances[..., :kept_children]
    fixed = kernels.static_shapes(token.device)
    most = plan.nodes if nodes is None else min(nodes, plan.nodes)
    deepest = min(plan.depth, most) if depth is None else min(depth, plan.depth, most)
    width = 1 if plan.chain else min(top_k, most)
    tokens, scores, extended, above = [drafted.flatten(1)], [], [], None
    seen, levels = 0, min(1, deepest)  # candidates in earlier levels
    for level in range(1, deepest):
        total, beam = ops.next_beam(above, chances, drafted, width, 1 + seen)
        scores.append(total)
        if not fixed and float(beam.scores.exp().sum()) / batch <= plan.least_gain:
            break
        if not fixed and bool(((torch.cat(scores, 1) >= beam.scores[:, :1]).sum(1) >= most).all()):
            break
        seen += total.shape[1]
        above, levels = beam.scores, level + 1
        drafted, chances = (part[..., :kept_children] for part in extend(beam.tokens, beam.origin))
        extended.append(beam.places)
        tokens.append(drafted.flatten(1))
    if len(scores) < len(tokens):
        scores.append((chances if above is None else above[:, :, None] + chances).flatten(1))
    places = torch.cat(extended, 1) if extended else None
    kept, parents, score = ops.keep_best(
        token, torch.cat(tokens, 1), places, drafted.shape[2], torch.cat(scores, 1), most
    )
    if score.shape[1] == 1:
        return TokenTree.root(token)
    tree = TokenTree(kept, parents, log_probs=score, check=False)
    tree.levels = levels
    if fixed:
        tree.max_depth = min(levels, tree.nodes - 1)  # upper bound; the exact depth would need a host sync
    return tree


class Reach:
    """Attention mask of tree nodes over the drafter's uncommitted cache entries.

    Each beam of ``grow_tree`` that passes through the drafter appends a chain of ``stride`` entries per node.
    """

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
        self._reach: Tensor | None = None

    def __call__(self, origin: Tensor) -> Tensor:
        """Append a beam.

        Args:
            origin: (batch, width) int64, parent of each node in the previous beam; unused for the first beam.

        Returns:
            (batch, width * stride, entries) bool: each node's own chain up to itself and its ancestors' chains.
        """
        (batch, width), stride = origin.shape, self._stride
        if self._reach is not None and stride == 1:
            self._reach = ops.extend_reach(self._reach, origin)
            return self._reach
        reach = torch.eye(width, dtype=torch.bool, device=origin.device)
        if stride > 1:
            chain = torch.ones(stride, stride, dtype=torch.bool, device=origin.device).tril()
            reach = (reach[:, None, :, None] & chain[None, :, None, :]).flatten(2).flatten(0, 1)
        reach = reach.expand(batch, -1, -1)
        if self._reach is not None:
            ends = self._reach[:, stride - 1 :: stride]
            above = ends.gather(1, origin[:, :, None].expand(-1, -1, ends.shape[2]))
            reach = torch.cat([above.repeat_interleave(stride, dim=1), reach], dim=2)
        self._reach = reach
        return reach


_LEAST = 1e-30  # minimum path probability on the host, where it must not be 0


def grow_slots(token: Tensor, tokens: Tensor, log_probs: Tensor, plan: StepPlan, nodes: int) -> TokenTree:
    """Grow a tree per row from the most probable paths over independent slots.

    Best-first search on the host and growth with static shapes, without host syncs, give the same tree.

    Args:
        tokens: (batch, slots, top_k) int64, candidates of each level in descending order.
        log_probs: (batch, slots, top_k), log probabilities of ``tokens``.
    """
    deepest = tokens.shape[1]
    if not kernels.static_shapes(token.device):
        limits = (deepest, min(nodes, plan.nodes), _LEAST, 1 if plan.chain else None)
        rows = []
        for drafted, probs in zip(tokens.tolist(), log_probs.exp().tolist(), strict=True):
            slots = enumerate(zip(drafted, probs, strict=True), start=1)
            levels = [[(*child, level) for child in zip(*slot, strict=True)] for level, slot in slots]
            rows.append(best_first(0, levels.__getitem__, *limits))
        return build_tree(token, [row[:2] for row in rows], [row[2] for row in rows])

    def children(level: int, parents: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
        shared = (-1, parents.shape[1], -1)
        return tokens[:, level, None].expand(shared), log_probs[:, level, None].expand(shared)

    # A beam of half the tree is exact, as each extended node has at least one child.
    return grow_levels(token, children, plan, max(1, nodes // 2), depth=deepest, nodes=nodes)


def grow_levels(
    token: Tensor,
    children: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
    plan: StepPlan,
    top_k: int,
    *,
    depth: int,
    nodes: int,
) -> TokenTree:
    """Grow a tree level by level if the children of a node depend on its token; see ``grow_tree``. ``children``: given
    a level, from 0, its parents' tokens and the index of each parent's own parent in the previous beam, (batch, width)
    int64 each, returns ``(tokens, log_probs)``, (batch, width, children) each, in descending order."""
    levels = count()
    extend: Extend = lambda beam, origin: children(next(levels), beam, origin)  # noqa: E731
    return grow_tree(token, None, extend, plan, top_k, depth=depth, nodes=nodes)


class LevelPasses:
    """Runs a model once per level of a draft tree.

    Args:
        runner: runner of the model; its uncommitted nodes are dropped.
        recurrent: the model has recurrent layers, which keep no uncommitted nodes: each pass runs all nodes.
        read: feature to return.
    """

    def __init__(self, runner: VerifyRunner, recurrent: bool, read: Feature = "last") -> None:
        self._runner, self._recurrent, self._read = runner, recurrent, read
        self._reach, self._levels = Reach(), 0
        self._nodes: tuple[Tensor, Tensor, Tensor] | None = None  # tokens, depths and ancestors of all levels
        runner.forget_nodes()

    def __call__(self, tokens: Tensor, origin: Tensor) -> Tensor:
        """Hidden states of a level, (batch, width, hidden). ``origin``: (batch, width) int64, see ``grow_tree``."""
        depth = torch.full_like(tokens, self._levels)
        nodes = tokens, depth, self._reach(origin)
        if self._recurrent:
            if self._nodes is not None:
                earlier, depths, reach = self._nodes
                reach = torch.cat([F.pad(reach, (0, tokens.shape[1])), nodes[2]], dim=1)
                nodes = torch.cat([earlier, tokens], dim=1), torch.cat([depths, depth], dim=1), reach
            self._nodes = nodes
        states = self._runner.forward_nodes(*nodes, (self._read,))[self._read][:, -tokens.shape[1] :]
        if not self._recurrent:
            self._runner.keep_nodes(depth)
        self._levels += 1
        return states

    def end(self) -> None:
        """Drop the nodes."""
        self._runner.forget_nodes()


Children = Callable[[Any], Iterable[tuple[int, float, Any]]]


class LookUpDrafter(Drafter):
    """Base class of host-side lookup drafters. Subclasses define ``begin``, which appends to ``rows``, and ``start``.

    Attributes:
        width: maximum children per node; 1 drafts chains, None trees of any width.
        reliability: initial ratio of hits to predicted probability, see ``LookUps``.
    """

    reliability = 0.7

    def __init__(self) -> None:
        self.width: int | None = None
        self.rows: list[Any] = []

    @abstractmethod
    def start(self, row: int, path: Sequence[int] = ()) -> tuple[Any, Children]:
        """Search state after a row's tokens and ``path``, and function that expands states; see ``best_first``."""

    @property
    def on_host(self) -> bool:
        """Whether lookups run on the host instead of in a table on the device."""
        return True

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        limits = (plan.depth, plan.nodes, plan.floor, 1 if plan.chain else self.width)
        starts = map(self.start, range(len(token)))
        rows = [best_first(state, children, *limits) for state, children in starts]
        return build_tree(token, [row[:2] for row in rows], [row[2] for row in rows])

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        state, children = self.start(row, path)
        return [(token, p) for token, p, _ in children(state)]

    def draft_chains(self, length: int) -> None:
        self.width = 1

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """No-op: lookups read the history, which the engine extends."""


_STEPS = 10.0  # weight of the initial reliability, in steps
_STEPS_DECAY = 0.98  # decay of earlier steps' weight, per step
_MOST = 0.995  # maximum probability of a token


class LookUps(LookUpDrafter):
    """Combines several lookup drafters in one tree.

    A token's odds are the sum of its odds in each drafter, after scaling the drafter's probabilities by its
    reliability: the observed frequency of its top-1 next tokens divided by their predicted probability. A drafter that
    is almost certain thus takes the nodes from less certain drafters.
    """

    def __init__(self, parts: Sequence[LookUpDrafter]) -> None:
        super().__init__()
        self.parts = parts
        self._borne_out = [[_STEPS * part.reliability, _STEPS] for part in parts]  # hits, and predicted probabilities
        self._expected: dict[int, list[tuple[int, float] | None]] = {}  # each part's top-1 next token by row

    @property
    def members(self) -> list[Drafter]:
        return [member for part in self.parts for member in part.members]

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        for part in self.parts:
            part.begin(prompt, output, history)

    def select(self, rows: Sequence[int]) -> None:
        self._expected = {}
        for part in self.parts:
            part.select(rows)

    def draft_chains(self, length: int) -> None:
        super().draft_chains(length)
        for part in self.parts:
            part.draft_chains(length)

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        if all(part.on_host for part in self.parts):
            return super().propose(token, plan)
        parts = sorted(self.parts, key=lambda part: not part.on_host)
        trees = [part.propose(token, plan) for part in parts]
        return best_chains(trees) if plan.chain or self.width == 1 else merge(trees)

    def start(self, row: int, path: Sequence[int] = ()) -> tuple[Any, Children]:
        starts = [part.start(row, path) if part.on_host else (None, lambda _: ()) for part in self.parts]
        below = [children for _, children in starts]
        reliabilities = [came / given for came, given in self._borne_out]
        if not path:
            best = [max(children(state), key=lambda child: child[1], default=None) for state, children in starts]
            self._expected[row] = [None if child is None else child[:2] for child in best]

        def joined(states: Sequence[Any]) -> Iterable[tuple[int, float, Any]]:
            odds: dict[int, float] = {}
            following: dict[int, list[Any]] = {}
            for place, (state, children) in enumerate(zip(states, below, strict=True)):
                for token, share, after in () if state is None else children(state):
                    share = min(share * reliabilities[place], _MOST)
                    odds[token] = odds.get(token, 0.0) + share / (1.0 - share)
                    following.setdefault(token, [None] * len(states))[place] = after
            total = 1.0 + sum(odds.values())
            return [(token, odds[token] / total, after) for token, after in following.items()]

        return [state for state, _ in starts], joined

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        for part in self.parts:
            part.observe(tree, verdict, output)
        for row, expected in self._expected.items():
            path, tokens = verdict.host[row]
            for counts, guess in zip(self._borne_out, expected, strict=True):
                if path and guess is not None:
                    counts[:] = counts[0] * _STEPS_DECAY + (guess[0] == tokens[0]), counts[1] * _STEPS_DECAY + guess[1]
        self._expected = {}


_ESCAPE = 0.5  # weight of all shorter contexts relative to one occurrence of a context


def mixed(contexts: Iterable[Mapping[int, int]]) -> dict[int, float]:
    """Next-token probabilities from counts per context, by prediction by partial matching (PPM). ``contexts``:
    next-token counts of each context, longest context first."""
    probs: dict[int, float] = {}
    weight = 1.0
    for counts in contexts:
        total = sum(counts.values()) + _ESCAPE
        for token, seen in counts.items():
            probs[token] = probs.get(token, 0.0) + weight * seen / total
        weight *= _ESCAPE / total
    return probs
