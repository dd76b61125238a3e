"""A drafter at its cost, whose drafts are right at a set rate: speed without trained weights."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from mmspec.cache.prefix_cache import media_key
from mmspec.cache.rows import RowTensor
from mmspec.core.drafter import Wrapper
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import CapturedDrafter
from mmspec.errors import UserError
from mmspec.eval.harness.timing import Method
from mmspec.ops.transfer import on_device
from mmspec.targets.transformers_target import TransformersTarget


def prompt_key(prompt: Prompt, tokens: Sequence[int]) -> Hashable:
    """Key of a prompt's answer: its tokens and, where it has media, a hash of these."""
    return (tuple(tokens), media_key(prompt)) if prompt.inputs else tuple(tokens)


class SetAcceptance(Wrapper):
    """A drafter at its cost, whose drafts are replaced: along a path, each is right with a set probability.

    With static shapes, trees keep their number of nodes: a path of as many levels as the drafter drafts comes first; all
    other nodes are wrong children of the root. Otherwise the growth of a tree depends on the probabilities of its
    drafts, so the drafter drafts chains, of as many levels as the set rate gains.

    Args:
        answers: plain decoding's new tokens, by ``prompt_key``.
    """

    drafter: CapturedDrafter

    def __init__(self, drafter: CapturedDrafter, answers: Mapping[Hashable, list[int]], rate: float, vocab: int):
        self.drafter, self._answers, self._rate, self._vocab = drafter, answers, rate, vocab
        self._random, self._width = Random(0), 0
        self._at, self._tokens = RowTensor(), RowTensor()  # next place in the answer; (rows, 2, width) answers, drafts

    @property
    def drafts_ahead(self) -> bool:
        return self.drafter.drafts_ahead

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        super().begin(prompt, output, history)
        self._width = max(map(len, self._answers.values()))
        rows = [self._answers[prompt_key(prompt, row[:-1])] for row in history]
        rows = [row + [0] * (self._width - len(row)) for row in rows]
        drafts = [[(x + (self._random.random() >= self._rate)) % self._vocab for x in row] for row in rows]
        self._tokens.append(on_device(list(zip(rows, drafts, strict=True)), prompt.input_ids.device))
        self._at.append(on_device([1] * len(rows), prompt.input_ids.device))

    def select(self, rows: Sequence[int]) -> None:
        for part in (self.drafter, self._tokens, self._at):
            part.select(rows)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        super().observe(tree, verdict, output)
        self._at.data += verdict.length

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        if not self.drafter.static_shapes:
            levels = 1
            while levels < min(plan.depth, plan.nodes) and self._rate**levels > plan.least_gain:
                levels += 1
            plan = replace(plan, chain=True, depth=levels, least_gain=0.0)
        drafted = super().propose(token, plan)
        nodes = drafted.nodes
        depth = min(nodes - 1, self.drafter.limits[0], plan.depth)
        place = torch.arange(nodes, device=token.device).expand(len(token), -1)
        path = place <= depth
        at = (self._at.data[:, None] + (place - 1).where(path, 0)).clamp(0, self._width - 1)
        answers, drafts = (tokens.gather(1, at) for tokens in self._tokens.data.unbind(1))
        tokens = drafts.where(path, (answers + 1 + place - depth) % self._vocab)
        tokens = torch.cat([token[:, None], tokens[:, 1:]], dim=1)
        log_probs = place.clamp(max=depth) * math.log(self._rate) - place.where(~path, 0)
        tree = TokenTree(tokens, (place - 1).where(path, 0), log_probs=log_probs, check=False)
        tree.max_depth, tree.levels = depth, drafted.levels
        return tree


def with_rates(
    methods: Sequence[Method], rates: Sequence[float], answers: Mapping[Hashable, list[int]], target: TransformersTarget
) -> list[Method]:
    """The methods, with one per rate for each drafter (``NAME at RATE``); ``answers`` as for ``SetAcceptance``, filled
    before they decode. Raises ``UserError``: a drafter has no network, so its drafts have no cost of their own."""
    found = [method for method in methods if method.drafter is None]
    for method in methods:
        if method.drafter is not None and not isinstance(method.drafter, CapturedDrafter):
            raise UserError(f"a set acceptance needs drafters with a network, such as mtp: got {method.name!r}")
        for rate in rates if method.drafter else ():
            drafter = SetAcceptance(method.drafter.fork(target), answers, rate, target.config.vocab_size)
            found.append(replace(method, name=f"{method.name} at {rate:g}", drafter=drafter))
    return found
