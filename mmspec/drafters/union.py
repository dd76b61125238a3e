"""Several drafters as one: the union of their trees, and a copy per sequence of a drafter that learns."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from itertools import compress
from statistics import fmean
from time import perf_counter as clock
from typing import Any

from torch import Tensor

from mmspec.core.drafter import Drafter, Guard, Wrapper, as_drafter
from mmspec.core.plan import Payoff, StepPlan
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree, best_chains, build_tree, merge
from mmspec.core.verify import Verdict
from mmspec.drafters.growth import LookUpDrafter, LookUps
from mmspec.errors import UserError

_STEPS = 16  # window of the average time per token, in steps
_EXPECTED = 0.7, 2.0  # boundaries between classes of expected tokens


class Union(Drafter):
    """Merges the trees of several drafters; the policy prunes the union to its most probable nodes. Lookup drafters
    grow one tree together (``LookUps``).

    If the plan is adaptive, each tree is charged its own time and credited the tokens that no other tree drafted; a
    drafter with a net loss pauses on its own (``Payoff``). Payoffs are kept per class of expected tokens of the
    preceding trees, lookups first, so that no network runs while text is copied. A failing drafter pauses (``Guard``).
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if len(drafters) < 2:
            raise UserError(f"drafters joined by + must be at least two: got {len(drafters)}")
        self.drafters, self._chains = drafters, False
        self._payoffs = [[Payoff() for _ in range(len(_EXPECTED) + 1)] for _ in self._guards]
        self._drafts: dict[int, tuple[TokenTree, float, int]] = {}  # tree, seconds and payoff index by drafter
        self._began = 0.0  # start time of this step's proposal
        self._recent: deque[tuple[float, float]] = deque(maxlen=_STEPS)  # seconds per step, and tokens per row

    @property
    def drafters(self) -> Sequence[Drafter]:
        return self._drafters

    @drafters.setter
    def drafters(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = [as_drafter(drafter) for drafter in drafters]
        look_ups = [drafter for drafter in self._drafters if isinstance(drafter, LookUpDrafter)]
        others: list[Drafter] = [drafter for drafter in self._drafters if drafter not in look_ups]
        together: list[Drafter] = [LookUps(look_ups)] if len(look_ups) > 1 else [*look_ups]
        self._guards = [Guard(drafter) for drafter in together + others]

    @property
    def members(self) -> list[Drafter]:
        return [member for drafter in self.drafters for member in drafter.members]

    @property
    def learns(self) -> bool:
        return any(drafter.learns for drafter in self.drafters)

    @property
    def features(self) -> tuple[Feature, ...]:
        return tuple(dict.fromkeys(feature for drafter in self.drafters for feature in drafter.features))

    def attach(self, target: Target) -> None:
        for drafter in self.drafters:
            drafter.attach(target)

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        for guard in self._guards:
            guard.begin(prompt, output, history)

    def begin_idle(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> list[Any]:
        return [part for drafter in self.drafters for part in drafter.begin_idle(prompt, output, history)]

    def select(self, rows: Sequence[int]) -> None:
        self._drafts = {}  # of an aborted step
        for guard in self._guards:
            guard.select(rows)

    def failure(self, row: int) -> str:
        return ", ".join(filter(None, (guard.failure(row) for guard in self._guards)))

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        self._began = start = clock()
        self._drafts, trees, expected = {}, list[TokenTree](), 0.0
        for place, (guard, payoffs) in enumerate(zip(self._guards, self._payoffs, strict=True)):
            kind = bisect(_EXPECTED, expected)
            if guard.rests or (plan.adaptive and payoffs[kind].rests()):
                continue
            tree = guard.propose(token, plan)
            trees.append(tree)
            if plan.adaptive:
                self._drafts[place] = tree, clock() - start, kind
                start = clock()
                if tree.prunable:
                    expected = max(expected, fmean(map(sum, tree.path_probs)))
        if not trees:
            return TokenTree.root(token)
        tree = (best_chains if plan.chain or self._chains else merge)(trees)
        tree.levels = max(part.levels for part in trees)
        return tree

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        """See ``Drafter``; takes the maximum of the drafters' probabilities."""
        probs: dict[int, float] = {}
        for guard in self._guards:
            for token, p in guard.continuations(row, path):
                probs[token] = max(p, probs.get(token, 0.0))
        total = max(1.0, sum(probs.values()))
        return [(token, p / total) for token, p in probs.items()]

    def draft_chains(self, length: int) -> None:
        """See ``Drafter``; each row gets the chain with the most expected tokens."""
        for guard in self._guards:
            guard.draft_chains(length)
        self._chains = True

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        for guard in self._guards:
            guard.observe(tree, verdict, output)
        if self._drafts:
            self._account([tokens for path, tokens in verdict.host if path], [bool(path) for path, _ in verdict.host])

    def _account(self, emitted: list[list[int]], alive: list[bool]) -> None:
        """Charge and credit the drafters of a step.

        Args:
            emitted: tokens of each unfinished row: the accepted drafts and the bonus token.
            alive: whether each row of the batch is unfinished.
        """
        if not emitted:
            return
        self._recent.append((clock() - self._began, fmean(map(len, emitted))))
        pace = sum(seconds for seconds, _ in self._recent) / sum(count for _, count in self._recent)
        reached: dict[int, list[int]] = {}
        for place, (tree, *_) in self._drafts.items():
            rows = zip(compress(tree.children, alive), emitted, strict=True)
            reached[place] = [_depth(children, tokens[:-1]) for children, tokens in rows]
        for place, (_, seconds, kind) in self._drafts.items():
            others = [depths for other, depths in reached.items() if other != place]
            best = [max(depths) for depths in zip(*others, strict=True)] or [0] * len(emitted)
            gains = [len(tokens) - 1 - most for tokens, most in zip(emitted, best, strict=True)]
            self._payoffs[place][kind].add(fmean(gains) - seconds / pace)
        self._drafts = {}  # not every step drafts


def _depth(children: list[dict[int, int]], tokens: Sequence[int]) -> int:
    """Length of the longest prefix of ``tokens`` that is a path of a row's tree."""
    node = 0
    for depth, token in enumerate(tokens):
        if token not in children[node]:
            return depth
        node = children[node][token]
    return len(tokens)


def per_sequence(drafter: Drafter | None) -> Drafter | None:
    """Wrap a drafter that learns in ``PerSequence``, for requests of different clients."""
    return PerSequence(drafter) if drafter is not None and drafter.learns else drafter


class PerSequence(Wrapper):
    """Drafts each sequence with its own copy of ``drafter``, so that no request's tokens leak into another request's
    drafts; a failing copy does not affect other sequences. ``drafter``: drafter whose trees have ``log_probs``. Trees
    of several sequences are combined on the host."""

    learns = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._copies: list[Drafter] = []

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        assert self._target is not None
        for row, tokens in enumerate(history):
            mask = prompt.attention_mask
            alone = Prompt(prompt.input_ids[row : row + 1], None if mask is None else mask[row : row + 1])
            self._copies.append(Guard(self.drafter.fork(self._target)))
            self._copies[-1].begin(alone, _row(output, row), [tokens])

    def begin_idle(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> tuple[()]:
        return ()  # copies capture their own graphs

    def select(self, rows: Sequence[int]) -> None:
        self._copies = [self._copies[row] for row in rows]

    def failure(self, row: int) -> str:
        return self._copies[row].failure(0)

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        trees = [copy.propose(root, plan) for copy, root in zip(self._copies, token.split(1), strict=True)]
        if len(trees) == 1:
            return trees[0]
        probs = [tree.path_probs[0] for tree in trees]
        drafted = [slice(1, 1 + len(row)) for row in probs]
        rows = [
            (tree.tokens[0, nodes].tolist(), tree.parents[0, nodes].tolist())
            for tree, nodes in zip(trees, drafted, strict=True)
        ]
        tree = build_tree(token, rows, probs)
        tree.levels = max(one.levels for one in trees)
        return tree

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        return self._copies[row].continuations(0, path)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        for row, copy in enumerate(self._copies):
            copy.observe(tree.select([row]), Verdict(verdict.packed[row : row + 1]), _row(output, row))


def _row(output: TargetOutput, row: int) -> TargetOutput:
    own = slice(row, row + 1)
    visual, embeds = (None if value is None else value[own] for value in (output.visual, output.embeds))
    positions = None if output.positions is None else output.positions[..., own, :]
    features = {name: value[own] for name, value in output.features.items()}
    return TargetOutput(output.logits[own], features, visual, embeds, positions)
