"""Samples the target's token at every tree node: logits processors, then argmax or sampling.

Every node has its own token history (prompt, emitted tokens, path to the node), so that repetition penalties and n-gram
bans are exact on trees.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmspec import ops
from mmspec.core.tree import TokenTree
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.transfer import on_device
from mmspec.sampling.processors import Histories, NodeHistories, TreeProcessor
from mmspec.sampling.sampler import Matcher, RejectedError, SamplingState

_ROUND = {True: 2**20, False: 2**23}
"""Number of scores that can be warped and sampled in the (mostly launch) time of one round over few rows, by whether
warpers sort. GPU estimates, not measured: 0.2 ns per score with sorting, 0.02 ns without, 0.1 to 0.2 ms per round."""

_FEW_SCORES = 2**18  # number of scores up to which a CPU computes the argmax at all nodes faster than it follows a path


class Choices(NamedTuple):
    """The target's tokens after the nodes of a tree.

    Attributes:
        tokens: (batch, nodes) int64. Undefined at failed nodes, and at nodes not reachable by chosen tokens.
        failures: by row, processor exceptions by node; only exceptions on the accepted path take effect.
    """

    tokens: Tensor
    failures: list[dict[int, Exception]]


class BatchSampler:
    """Samples the target's tokens for a batch of sequences with different samplers."""

    def __init__(self) -> None:
        self._histories: dict[Hashable, Histories] = {}  # device copies by sampler key

    def choose(self, rows: Sequence[SamplingState], tree: TokenTree, logits: Tensor) -> Choices:
        """Sample the target's token after each node.

        Args:
            rows: the sequences; each history ends with the root.
            logits: (batch, nodes, vocab), raw logits of the target.
        """
        groups: dict[Hashable, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(row.sampler.key, []).append(place)
        self._histories = {key: self._histories.get(key) or Histories() for key in groups}
        if len(groups) == 1:
            return self._choose(rows, tree, logits)
        choices = Choices(torch.zeros_like(tree.tokens), [{} for _ in rows])
        for places in groups.values():
            found = self._choose([rows[place] for place in places], tree.select(places), logits[places])
            choices.tokens[places] = found.tokens
            for place, failures in zip(places, found.failures, strict=True):
                choices.failures[place].update(failures)
        return choices

    def _choose(self, rows: Sequence[SamplingState], tree: TokenTree, logits: Tensor) -> Choices:
        """Choices of rows with equal processors."""
        step, sampler = _Step(rows, tree, logits.device), rows[0].sampler
        if sampler.by_path:
            return Choices(_by_path(step, logits), step.failures)
        try:
            return Choices(step.choose(logits, self._histories[sampler.key]), step.failures)
        except Exception as error:
            return Choices(torch.zeros_like(tree.tokens), [{0: error} for _ in rows])


class _Step:
    """One step of rows with equal processors.

    Attributes:
        sampler: a sampler of the rows, all of which have equal processors.
        failures: see ``Choices``.
        numbers: random numbers, (batch, nodes) each: none in greedy decoding; else a tensor to draw the token after
            each node, preceded for sampled trees by a tensor to accept or reject each node.
    """

    def __init__(self, rows: Sequence[SamplingState], tree: TokenTree, device: torch.device) -> None:
        self.rows, self.tree, self.sampler = rows, tree, rows[0].sampler
        self.failures: list[dict[int, Exception]] = [{} for _ in rows]
        self.numbers: tuple[Tensor, ...] = ()
        if self.sampler.do_sample and tree.draft_probs is not None:
            self.numbers = torch.stack([row.drawn(2 * tree.nodes, device).view(2, -1) for row in rows]).unbind(1)
        elif self.sampler.do_sample:
            uniforms = torch.stack([row.uniforms(tree.max_depth + 1, device) for row in rows])
            self.numbers = (uniforms.gather(1, tree.depth) if tree.nodes > 1 else uniforms,)

    def choose(self, logits: Tensor, histories: Histories) -> Tensor:
        """Tokens after the nodes, (batch, nodes) int64."""
        sampler, tree = self.sampler, self.tree
        on_host = tree.nodes > 1 and not sampler.lossy and not kernels.static_shapes(logits.device)
        constrained = any(row.constraint for row in self.rows)
        # Masks at reached nodes suffice, unless processors follow the masks.
        later = constrained and on_host and not sampler.before_warpers
        if constrained and not later:
            logits = self._masked(lambda row: row.constraint, logits.to(torch.float32, copy=True))
        scores = self._processed(logits, histories)
        if on_host and (self.numbers or later or scores.numel() > _FEW_SCORES):
            tokens = _by_level_on_host(self, scores, later)
        elif self.numbers and self._levels_pay(scores.shape[-1]):
            tokens = _by_level_on_device(self, scores)
        else:
            tokens = self._tokens(tree, scores, self.numbers)
        if sampler.before_warpers and not kernels.static_shapes(scores.device):  # needs a host sync
            chosen = scores.gather(2, tokens[..., None])[..., 0]
            for row, node in (chosen.isnan() | (chosen == -torch.inf)).nonzero().tolist():
                if _empty(self.warped(scores[row, node])):
                    self.failures[row].setdefault(node, _empty_error(sampler.processors))
        return tokens

    def after(self, nodes: Tensor, scores: Tensor) -> Tensor:
        """Tokens after some nodes.

        Args:
            nodes: (some,) int64, indices into (batch * nodes).
            scores: (some, vocab), scores of the tokens after these nodes.
        """
        tree, numbers = self.tree, tuple(x.flatten()[nodes, None] for x in self.numbers[-1:])
        if len(self.numbers) > 1 or self.sampler.lossy:  # sampled trees and lossy acceptance need a node's children
            numbers = *(x[nodes // tree.nodes] for x in self.numbers[:-1]), *numbers
            tree = _stars(tree, nodes)
        return self._tokens(tree, scores[:, None], numbers)[:, 0]

    def warped(self, scores: Tensor) -> Tensor:
        """Scores after the warpers."""
        if self.sampler.do_sample or self.sampler.warpers:
            scores = scores.float()
        for warper in self.sampler.warpers:
            scores = warper(None, scores)
        return scores

    def _tokens(self, tree: TokenTree, scores: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        """Tokens after a tree's first nodes from their scores, (batch, first, vocab)."""
        scores = self.warped(scores)
        if self.sampler.lossy:
            return lossy_choices(tree, scores, self.sampler.lossy)
        if not numbers:
            return ops.greedy(scores)
        if tree.draft_probs is None:
            return ops.sample(scores, *numbers)
        return ops.choose_drawn(tree, scores.softmax(-1), *numbers)

    def _levels_pay(self, vocab: int) -> bool:
        """Whether one round per level is faster than all nodes at once."""
        tree, sorts = self.tree, any(warper.sorts for warper in self.sampler.warpers)
        return (tree.nodes - 1 - tree.max_depth) * tree.batch * vocab > tree.max_depth * _ROUND[sorts]

    def _processed(self, logits: Tensor, histories: Histories) -> Tensor:
        """Scores at all nodes, after all processors except warpers."""
        if not self.sampler.before_warpers:
            return logits
        scores = logits.to(torch.float32, copy=True)
        rows = self.rows
        seen = NodeHistories(histories, [row.history for row in rows], self.tree, [row.index for row in rows])
        for place, form in enumerate(self.sampler.before_warpers):
            if isinstance(form, TreeProcessor):
                scores = self._masked(partial(SamplingState.own, place=place), scores)
            else:
                assert form is not None
                scores = form(seen, scores)
        return scores

    def _masked(self, matcher_of: Callable[[SamplingState], Matcher | None], scores: Tensor) -> Tensor:
        """Mask the scores of visited nodes in place, each row with its matcher."""
        nodes: list[int] = []
        found: list[Tensor] = []
        for place, (row, children) in enumerate(zip(self.rows, self.tree.children, strict=True)):
            try:
                matcher = matcher_of(row)
                masks, failed = matcher.walk(row.history, children, scores.shape[-1]) if matcher else ({}, {})
            except Exception as error:
                masks, failed = {}, {0: error}
            self.failures[place] = failed | self.failures[place]
            nodes += [place * self.tree.nodes + node for node in masks]
            found += masks.values()
        if not found:
            return scores
        allowed, at = on_device(torch.stack(found), scores.device), on_device(nodes, scores.device)
        flat = scores.flatten(0, 1)
        flat[at] = flat[at].masked_fill(~allowed, -torch.inf)
        return flat.view(scores.shape)


def _by_level_on_host(step: _Step, scores: Tensor, constrained: bool) -> Tensor:
    """Choose tokens at nodes reached by chosen tokens, with one host sync per level.

    Args:
        scores: (batch, nodes, vocab), after all processors except warpers.
        constrained: apply the rows' grammars.
    """
    tree = step.tree
    choices, scores = [[0] * tree.nodes for _ in range(tree.batch)], scores.flatten(0, 1)
    reached: list[tuple[int, int, tuple[int, ...]]] = [(row, 0, ()) for row in range(tree.batch)]
    while reached:
        places = [row * tree.nodes + node for row, node, _ in reached]
        nodes = torch.tensor(places, dtype=torch.long)
        # A single row needs no copy.
        level = scores[nodes] if len(places) > 1 else scores[places[0] : places[0] + 1]
        if constrained:
            level = level.clone()
            for one, (place, node, path) in zip(level, reached, strict=True):
                row = step.rows[place]
                try:
                    if row.constraint is not None:
                        one.masked_fill_(~row.constraint.allowed(row.history, path, len(one)), -torch.inf)
                except Exception as error:
                    step.failures[place][node] = error
        below = []
        for (place, node, path), token in zip(reached, step.after(nodes, level).tolist(), strict=True):
            choices[place][node] = token
            if (child := tree.children[place][node].get(token)) is not None:
                below.append((place, child, (*path, token)))
        reached = below
    return torch.tensor(choices, dtype=torch.long)


def _by_level_on_device(step: _Step, scores: Tensor) -> Tensor:
    """Choose tokens level by level without host syncs; an ended path stays at its last node."""
    tree = step.tree
    choices, scores = torch.zeros_like(tree.tokens).flatten(), scores.flatten(0, 1)
    first = tree.nodes * torch.arange(tree.batch, device=scores.device)[:, None]
    places, parents = first + torch.arange(tree.nodes, device=scores.device), first + tree.parents
    drafted = tree.tokens if tree.valid is None else tree.tokens.masked_fill(~tree.valid, -1)
    at = first[:, 0]
    for depth in range(tree.max_depth + 1):
        tokens = step.after(at, scores.index_select(0, at))
        choices.scatter_(0, at, tokens)
        if depth < tree.max_depth:  # at most one child is reached, and it follows its parent
            chosen = (parents == at[:, None]) & (drafted == tokens[:, None])
            at = torch.where(chosen, places, at[:, None]).amax(1)
    return choices.view_as(tree.tokens)


def _by_path(step: _Step, logits: Tensor) -> Tensor:
    """Choose tokens only along the accepted path, as in plain decoding."""
    tree = step.tree
    choices = [[0] * tree.nodes for _ in step.rows]
    for place, (row, children) in enumerate(zip(step.rows, tree.children, strict=True)):
        history, node = list(row.history), 0
        while True:
            try:
                scores = _path_scores(step, row, history, logits[place, node][None].to(torch.float32, copy=True))
            except Exception as error:
                step.failures[place][node] = error
                break
            token = int(step.after(on_device([place * tree.nodes + node], logits.device), scores))
            choices[place][node] = token
            if row.alignment is not None and not row.alignment.take(token):
                step.failures[place][node] = RejectedError()
                break
            if token not in children[node] or row.ends(token, len(history) + 1):
                break
            history.append(token)
            node = children[node][token]
    return on_device(choices, logits.device)


def _path_scores(step: _Step, row: SamplingState, history: list[int], scores: Tensor) -> Tensor:
    """Scores, (1, vocab), after the grammar, and after all processors except warpers, called one by one. Raises
    ``UserError``: a processor left no token to choose."""
    ids, sampler, culprit = on_device([history], scores.device), step.sampler, None
    if row.constraint is not None and row.alignment is None:
        scores = row.constraint(ids, scores)
    for place, processor in enumerate(sampler.processors[: len(sampler.before_warpers)]):
        before, scores = scores, row.own(place)(ids, scores)
        if not _empty(scores):
            culprit = None
        elif culprit is None and not _empty(before):
            culprit = processor
    if culprit is not None and _empty(step.warped(scores)):  # a warper may remove NaN
        raise _empty_error([culprit])
    if row.constraint is not None and row.alignment is not None:
        allowed = row.constraint.allowed(row.history, history[len(row.history) :], scores.shape[-1])
        scores = row.alignment.weighted(len(history) - row.prompt_length, scores, allowed)
    return scores


def _empty(scores: Tensor) -> bool:
    """Whether no token can be chosen: all scores are -inf, or some are NaN."""
    best = float(scores.max())
    return best != best or best == -torch.inf


def _empty_error(processors: Sequence[Any]) -> UserError:
    names = ", ".join(type(processor).__name__ for processor in processors)
    return UserError(f"logits processors must return scores without NaN, and one above -inf: got others from {names}")


def _stars(tree: TokenTree, at: Tensor) -> TokenTree:
    """For each given node, a tree of the node as root and its children, with their indices in ``tree``. ``at``: (some,)
    int64, indices into (batch * nodes)."""
    row, node = at // tree.nodes, at % tree.nodes
    root = torch.arange(tree.nodes, device=at.device) == 0
    children = (tree.parents[row] == node[:, None]) & tree.alive[row]
    parents = torch.zeros_like(children, dtype=torch.long).masked_fill(root, -1)
    probs = None if tree.draft_probs is None else tree.draft_probs[row, node][:, None]
    return TokenTree(tree.tokens[row], parents, children | root, probs, check=False)


def lossy_choices(tree: TokenTree, scores: Tensor, limit: float) -> Tensor:
    """Lossy token choice after each node, (batch, nodes) int64: the target's token, or a drafted token.

    BiLD's rollback policy (Big Little Decoder, arXiv 2302.07863, section 3.3) on trees: the most probable child of a
    node is chosen if its negative log probability is at most the limit. If the target's token is among the children, it
    is the most probable child. BiLD's small model hands over below a confidence; here tree sizes decide.

    Args:
        tree: the draft, not sampled.
        scores: (batch, nodes, vocab), the target's scores after all logits processors.
        limit: maximum negative log probability in nats, above 0.
    """
    choices = ops.greedy(scores).tolist()
    rows = torch.arange(tree.batch, device=scores.device)[:, None]
    own = scores.float().log_softmax(-1)[rows, tree.parents, tree.tokens].tolist()  # the root's value is unused
    for row, nodes in enumerate(tree.children):
        for node, children in enumerate(nodes):
            if children:
                token, child = max(children.items(), key=lambda item: own[row][item[1]])
                if own[row][child] >= -limit:
                    choices[row][node] = token
    return on_device(choices, scores.device)
