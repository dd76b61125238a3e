"""Samples the target's token at every tree node: logits processors, then argmax or sampling.

Every node has its own token history (prompt, emitted tokens, path to the node), so that repetition penalties and n-gram
bans are exact on trees.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec import ops
from mmspec.core.tree import TokenTree
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.transfer import on_device
from mmspec.sampling.aligned import RejectedError
from mmspec.sampling.processors import Histories, NodeHistories, TreeProcessor
from mmspec.sampling.sampler import Sampled, Sampler

_ROUND = {True: 2**20, False: 2**23}
"""Number of scores that can be warped and sampled in the (mostly launch) time of one round over few rows, by whether
warpers sort. GPU estimates, not measured: 0.2 ns per score with sorting, 0.02 ns without, 0.1 to 0.2 ms per round."""

_FEW_SCORES = 2**18
"""Number of scores up to which a CPU computes the argmax at all nodes faster than it follows a path (five nodes of
SmolLM2)."""


class BatchSampler:
    """Samples the target's tokens for a batch of sequences with different samplers."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}

    def choose(self, rows: Sequence[Sampled], tree: TokenTree, logits: Tensor) -> Tensor:
        """Sample the target's token after each node.

        Args:
            rows: the sequences; each history ends with the root.
            logits: (batch, nodes, vocab), raw logits of the target.

        Returns:
            (batch, nodes) int64. Undefined at nodes where a processor raised (see ``failures``), and at nodes not
            reachable by chosen tokens.
        """
        members: dict[Hashable, list[int]] = {}
        for place, row in enumerate(rows):
            row.failures = {}
            members.setdefault(row.sampler.key, []).append(place)
        self._groups = {
            key: self._groups.get(key) or _Group(rows[places[0]].sampler) for key, places in members.items()
        }
        if len(members) == 1:
            (group,) = self._groups.values()
            return group.choose(rows, tree, logits)
        choices = torch.zeros_like(tree.tokens)
        for key, places in members.items():
            chosen = [rows[place] for place in places]
            choices[places] = self._groups[key].choose(chosen, tree.select(places), logits[places])
        return choices


class _Group:
    """Batched sampling of rows with equal processors."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._histories = Histories()

    def choose(self, rows: Sequence[Sampled], tree: TokenTree, logits: Tensor) -> Tensor:
        numbers = self._numbers(rows, tree, logits.device)
        if self._sampler.by_path:
            return self._by_path(rows, tree, logits, numbers)
        try:
            # Masks at reached nodes suffice, unless processors follow the masks.
            later = self._on_host(tree, logits.device) and not self._sampler.before_warpers
            if not later and any(row.constraint for row in rows):
                logits = self._mask(None, rows, tree, logits.to(torch.float32, copy=True))
            scores = self._process(rows, tree, logits)
            choices = self._pick(tree, scores, numbers, rows if later else ())
            self._find_empty(rows, scores, choices)
            return choices
        except Exception as error:
            for row in rows:
                row.failures = {0: error}
            return torch.zeros_like(tree.tokens)

    def _numbers(self, rows: Sequence[Sampled], tree: TokenTree, device: torch.device) -> tuple[Tensor, ...]:
        """Random numbers of a step, (batch, nodes) each: none in greedy decoding; else a tensor to draw the token after
        each node, preceded for sampled trees by a tensor to accept or reject each node."""
        if not self._sampler.do_sample:
            return ()
        if tree.draft_probs is not None:
            return torch.stack([row.drawn(2 * tree.nodes, device).view(2, -1) for row in rows]).unbind(1)
        uniforms = torch.stack([row.uniforms(tree.max_depth + 1, device) for row in rows])
        return (uniforms.gather(1, tree.depth) if tree.nodes > 1 else uniforms,)

    def _pick(
        self, tree: TokenTree, scores: Tensor, numbers: tuple[Tensor, ...], constrained: Sequence[Sampled] = ()
    ) -> Tensor:
        """Choose tokens at all nodes at once, or only at nodes reached by chosen tokens.

        Args:
            scores: (batch, nodes, vocab), after all processors except warpers.
            constrained: the rows, if their grammars have not been applied yet.
        """
        at_once = not numbers and scores.numel() <= _FEW_SCORES and not any(row.constraint for row in constrained)
        if self._on_host(tree, scores.device) and not at_once:
            return self._along_paths_on_host(tree, scores, numbers, constrained)
        if numbers and self._rounds_pay(tree, scores.shape[-1]):
            return self._along_paths_on_device(tree, scores, numbers)
        return self._tokens(tree, scores, numbers)

    def _on_host(self, tree: TokenTree, device: torch.device) -> bool:
        """Whether to follow paths on the host, with one host sync per level."""
        return tree.nodes > 1 and not self._sampler.lossy and not kernels.static_shapes(device)

    def _rounds_pay(self, tree: TokenTree, vocab: int) -> bool:
        """Whether one round per level is faster than all nodes at once."""
        further = tree.max_depth
        saved = (tree.nodes - 1 - further) * tree.batch * vocab
        return saved > further * _ROUND[any(warper.sorts for warper in self._sampler.warpers)]

    def _along_paths_on_host(
        self, tree: TokenTree, scores: Tensor, numbers: tuple[Tensor, ...], constrained: Sequence[Sampled]
    ) -> Tensor:
        choices = [[0] * tree.nodes for _ in range(tree.batch)]
        scores = scores.flatten(0, 1)
        reached: list[tuple[int, int, tuple[int, ...]]] = [(row, 0, ()) for row in range(tree.batch)]
        while reached:
            places = [row * tree.nodes + node for row, node, _ in reached]
            at = torch.tensor(places, dtype=torch.long)
            # A single row needs no copy.
            level = scores[at] if len(places) > 1 else scores[places[0] : places[0] + 1]
            below = []
            if any(row.constraint for row in constrained):
                level = _allowed_only(constrained, reached, level)
            for (row, node, path), token in zip(reached, self._after(tree, at, level, numbers).tolist(), strict=True):
                choices[row][node] = token
                if (child := tree.children[row][node].get(token)) is not None:
                    below.append((row, child, (*path, token)))
            reached = below
        return torch.tensor(choices, dtype=torch.long)

    def _along_paths_on_device(self, tree: TokenTree, scores: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        """Choose tokens level by level without host syncs; an ended path stays at its last node."""
        choices, scores = torch.zeros_like(tree.tokens).flatten(), scores.flatten(0, 1)
        first = tree.nodes * torch.arange(tree.batch, device=scores.device)[:, None]
        places, parents = first + torch.arange(tree.nodes, device=scores.device), first + tree.parents
        drafted = tree.tokens if tree.valid is None else tree.tokens.masked_fill(~tree.valid, -1)
        at = first[:, 0]
        for depth in range(tree.max_depth + 1):
            tokens = self._after(tree, at, scores.index_select(0, at), numbers)
            choices.scatter_(0, at, tokens)
            if depth < tree.max_depth:  # at most one child is reached, and it follows its parent
                chosen = (parents == at[:, None]) & (drafted == tokens[:, None])
                at = torch.where(chosen, places, at[:, None]).amax(1)
        return choices.view_as(tree.tokens)

    def _after(self, tree: TokenTree, at: Tensor, scores: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        """Choose the tokens after some nodes.

        Args:
            at: (some,) int64, the nodes as indices into (batch * nodes).
            scores: (some, vocab), scores of the tokens after these nodes.
        """
        drawing = tuple(x.flatten()[at, None] for x in numbers[-1:])
        if len(numbers) > 1 or self._sampler.lossy:  # sampled trees and lossy acceptance need a node's children
            drawing = *(x[at // tree.nodes] for x in numbers[:-1]), *drawing
            tree = _stars(tree, at)
        return self._tokens(tree, scores[:, None], drawing)[:, 0]

    def _tokens(self, tree: TokenTree, scores: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        """Choose the tokens after a tree's first nodes from their scores, (batch, first, vocab)."""
        scores = self._warped(scores)
        if self._sampler.lossy:
            return lossy_choices(tree, scores, self._sampler.lossy)
        if not numbers:
            return ops.greedy(scores)
        if tree.draft_probs is None:
            return ops.sample(scores, *numbers)
        return ops.choose_drawn(tree, scores.softmax(-1), *numbers)

    def _warped(self, scores: Tensor) -> Tensor:
        if self._sampler.do_sample or self._sampler.warpers:
            scores = scores.float()
        for warper in self._sampler.warpers:
            scores = warper(None, scores)
        return scores

    def _process(self, rows: Sequence[Sampled], tree: TokenTree, logits: Tensor) -> Tensor:
        """Apply all processors except warpers at all nodes."""
        forms = self._sampler.before_warpers
        if not forms:
            return logits
        scores = logits.to(torch.float32, copy=True)
        seen = NodeHistories(self._histories, [row.history for row in rows], tree, [row.index for row in rows])
        for place, form in enumerate(forms):
            if isinstance(form, TreeProcessor):
                scores = self._mask(place, rows, tree, scores)
            else:
                assert form is not None
                scores = form(seen, scores)
        return scores

    def _mask(self, place: int | None, rows: Sequence[Sampled], tree: TokenTree, scores: Tensor) -> Tensor:
        """Mask the scores of visited nodes in place with a tree processor; None applies the rows' grammars."""
        nodes: list[int] = []
        found: list[Tensor] = []
        for at_row, (row, children) in enumerate(zip(rows, tree.children, strict=True)):
            if place is None and row.constraint is None:
                continue
            try:
                matcher: Any = row.constraint if place is None else row.own(place)
                masks, failures = matcher.walk(row.history, children, scores.shape[-1])
            except Exception as error:
                masks, failures = {}, {0: error}
            row.failures = failures | row.failures
            nodes += [at_row * tree.nodes + node for node in masks]
            found += masks.values()
        if not found:
            return scores
        allowed, at = on_device(torch.stack(found), scores.device), on_device(nodes, scores.device)
        flat = scores.flatten(0, 1)
        flat[at] = flat[at].masked_fill(~allowed, -torch.inf)
        return flat.view(scores.shape)

    def _by_path(self, rows: Sequence[Sampled], tree: TokenTree, logits: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        """Choose tokens only along the accepted path, as in plain decoding."""
        choices = [[0] * tree.nodes for _ in rows]
        for at_row, (row, children) in enumerate(zip(rows, tree.children, strict=True)):
            history, node = list(row.history), 0
            while True:
                ids = on_device([history], logits.device)
                scores = logits[at_row, node][None].to(torch.float32, copy=True)
                try:
                    if row.constraint is not None and row.alignment is None:
                        scores = row.constraint(ids, scores)
                    scores = self._called(row, ids, scores)
                    if row.alignment is not None and row.constraint is not None:
                        allowed = row.constraint.allowed(row.history, history[len(row.history) :], scores.shape[-1])
                        scores = row.alignment.weighted(len(history) - row.prompt_length, scores, allowed)
                except Exception as error:
                    row.failures[node] = error
                    break
                at = on_device([at_row * tree.nodes + node], logits.device)
                token = int(self._after(tree, at, scores, numbers))
                choices[at_row][node] = token
                if row.alignment is not None and not row.alignment.take(token):
                    row.failures[node] = RejectedError()
                    break
                if token not in children[node] or row.ends(token, len(history) + 1):
                    break
                history.append(token)
                node = children[node][token]
        return on_device(choices, logits.device)

    def _called(self, row: Sampled, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores, (1, vocab), after all processors except warpers, called one by one.

        Raises:
            UserError: a processor left no token to choose.
        """
        culprit = None
        for place, processor in enumerate(self._sampler.processors[: len(self._sampler.before_warpers)]):
            before, scores = scores, row.own(place)(ids, scores)
            if not _empty(scores):
                culprit = None
            elif culprit is None and not _empty(before):
                culprit = processor
        if culprit is not None and _empty(self._warped(scores)):  # a warper may remove NaN
            raise _empty_error([culprit])
        return scores

    def _find_empty(self, rows: Sequence[Sampled], scores: Tensor, choices: Tensor) -> None:
        """Record failures at nodes whose chosen token has no score, unless this needs a host sync."""
        if not self._sampler.before_warpers or kernels.static_shapes(scores.device):
            return
        chosen = scores.gather(2, choices[..., None])[..., 0]
        for row, node in (chosen.isnan() | (chosen == -torch.inf)).nonzero().tolist():
            if _empty(self._warped(scores[row, node])):
                rows[row].failures.setdefault(node, _empty_error(self._sampler.processors))


def _empty(scores: Tensor) -> bool:
    """Whether no token can be chosen: all scores are -inf, or some are NaN."""
    best = float(scores.max())
    return best != best or best == -torch.inf


def _empty_error(processors: Sequence[Any]) -> UserError:
    names = ", ".join(type(processor).__name__ for processor in processors)
    return UserError(f"logits processors must return scores without NaN, and one above -inf: got others from {names}")


def _allowed_only(rows: Sequence[Sampled], reached: list[tuple[int, int, tuple[int, ...]]], scores: Tensor) -> Tensor:
    """Mask scores, (reached, vocab), with the rows' grammars.

    Args:
        reached: row, node and path for each entry of ``scores``.
    """
    scores = scores.clone()
    for one, (place, node, path) in zip(scores, reached, strict=True):
        row = rows[place]
        if row.constraint is None:
            continue
        try:
            one.masked_fill_(~row.constraint.allowed(row.history, path, len(one)), -torch.inf)
        except Exception as error:
            row.failures[node] = error
    return scores


def _stars(tree: TokenTree, at: Tensor) -> TokenTree:
    """For each given node, a tree of the node as root and its children, with their indices in ``tree``.

    Args:
        at: (some,) int64, indices into (batch * nodes).
    """
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
    is the most probable child. BiLD's small model hands over at a confidence threshold; here the drafters' tree sizes
    decide.

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
