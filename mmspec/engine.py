"""The loop: draft a tree, check it in one pass of the target, keep what the target would have said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter as clock

import torch

from mmspec.budget import Budget
from mmspec.drafter import Drafter
from mmspec.sampling import Sampler
from mmspec.stats import Stats
from mmspec.stopping import FinishReason, Stopper
from mmspec.target import Prompt, Target
from mmspec.tree import TokenTree


@dataclass
class Row:
    """One sequence under generation. ``history`` holds the prompt and what was emitted, ``emitted`` the last step's."""

    history: list[int]
    prompt_length: int
    stats: Stats
    emitted: list[int]
    finish_reason: FinishReason | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.history[self.prompt_length :]


def decode(
    target: Target, drafter: Drafter | None, prompt: Prompt, sampler: Sampler, stopper: Stopper, budget: Budget
) -> Iterator[list[Row]]:
    """Generate until every row has stopped, yielding the rows after each step.

    Args:
        target: the model whose output this is.
        drafter: proposes the trees; None decodes plainly.
        prompt: one prompt per row.
        sampler: chooses tokens from the target's logits.
        stopper: when a row ends.
        budget: how large a tree each step checks.

    Yields:
        The rows, always the same objects; each row's ``emitted`` holds its tokens of this step.
    """
    start = clock()
    budget.begin()
    rows = [Row(ids, len(ids), Stats(), []) for ids in prompt.histories()]
    step = target.prefill(prompt, [stopper.room(row.prompt_length) for row in rows])
    history = [row.history for row in rows]
    token = sampler.first(history, step.logits)
    for row, first in zip(rows, token.tolist(), strict=True):
        row.emitted, row.finish_reason = stopper.keep(row.history, row.prompt_length, [first])
        row.stats.num_generated_tokens = 1
        row.stats.prefill_seconds = row.stats.time_to_first_token = row.stats.wall_seconds = clock() - start
    yield rows

    began = clock()
    if drafter is not None:
        drafter.begin(prompt, step, history)
    for row in rows:
        row.stats.draft_seconds = clock() - began
        row.stats.wall_seconds += row.stats.draft_seconds

    while alive := [row for row in rows if row.finish_reason is None]:
        began = clock()
        budget.remaining = max(stopper.room(row.prompt_length) - len(row.token_ids) for row in alive) - 1
        drafting = drafter is not None and budget.drafts()
        tree = TokenTree.root(token)
        if drafter is not None and drafting:
            tree = budget.prune(drafter.propose(token, budget))
        drafted = clock()
        step = target.forward_tree(tree)
        verdict = sampler.verify(history, tree, step.logits).only([row.finish_reason is None for row in rows])
        paths = [path for path, _ in verdict.host]
        verified = clock()
        target.commit(verdict)
        for row, drafts, (path, tokens) in zip(rows, tree.drafted, verdict.host, strict=True):
            row.emitted = []
            if row.finish_reason is None:
                row.emitted, row.finish_reason = stopper.keep(row.history, row.prompt_length, tokens)
                # What lies behind a stop is not emitted, and not counted as accepted either.
                accepted = min(len(path) - 1, len(row.emitted))
                row.stats.record_step(drafts, tree.max_depth, accepted, len(row.emitted))
        if drafter is not None:
            drafter.observe(tree, verdict, step)
        token = verdict.bonus
        budget.observe(tree.nodes, paths, drafted - began if drafting else 0.0, verified - drafted)
        ended = clock()
        for row in alive:
            row.stats.draft_seconds += drafted - began
            row.stats.verify_seconds += verified - drafted
            row.stats.commit_seconds += ended - verified
            row.stats.wall_seconds += ended - began
        yield rows


def generator_for(seed: int | None, device: torch.device) -> torch.Generator | None:
    """A generator on ``device``; None leaves sampling to torch's global one."""
    return None if seed is None else torch.Generator(device).manual_seed(seed)
