"""Prefix caching of a target: states of its prompts and answers, reused by later prompts with the same prefix."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmspec.cache.prefix_cache import Answer, Prefix, at_text, common, continued, media_key
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.target import Feature, Prompt, TargetOutput
from mmspec.core.verify import Verdict

if TYPE_CHECKING:
    from mmspec.targets.transformers_target import TransformersTarget


class PrefixReuse:
    """Look-ups and insertions of a target in its prefix cache.

    Without a prefix cache, its methods do nothing.
    """

    def __init__(self, target: TransformersTarget) -> None:
        self._target = target
        self._answers: list[Answer | None] = []  # of each row; None where its states are not kept

    def looks_up(self, prompt: Prompt) -> bool:
        """Whether this prompt may resume from a prefix: prompts of one row can."""
        return self._target.prefix_cache is not None and len(prompt.singles) == 1

    def resume(self, prompt: Prompt, cache: TreeCache) -> tuple[dict[str, Any], Prefix, int] | None:
        """Copy the states of the longest cached prefix of a prompt to ``cache``.

        Returns:
            The decoder's inputs of the prompt, the prefix, and the number of tokens in common; None without a prefix.
        """
        if not self.looks_up(prompt):
            return None
        visual, length = self._target.visual(prompt), prompt.input_ids.shape[1]
        media = 0 if visual is None or not bool(visual.any()) else int(visual[0].nonzero()[-1]) + 1
        match = self._find(prompt, media)
        if match is None:
            return None
        prefix, shared = match
        if not at_text(prefix.positions, shared - 1):
            return None
        call = {"input_ids": prompt.input_ids, "position_ids": continued(prefix.positions, shared, length)}
        given = self._target.decoder.chunk_inputs(call, cache)
        if given is None:
            return None
        cache.append(prefix.cache, length + 1)
        if shared < len(prefix.tokens):
            cache.truncate(shared)
        return given, prefix, shared

    def resumes(self, prompt: Prompt, others: Sequence[Prompt]) -> bool:
        if not self.looks_up(prompt):
            return False
        ids, key = prompt.input_ids[0].tolist(), self._key(prompt)
        shared = [common(ids, other.input_ids[0].tolist()) for other in others if self._key(other) == key]
        if match := self._find(prompt, 0):
            shared.append(match[1])
        return 2 * max(shared, default=0) >= len(ids)

    def start(self, prompt: Prompt, output: TargetOutput, cache: TreeCache) -> None:
        """Keep the states of a prefilled prompt of one row, and follow the answers of its rows.

        Args:
            cache: after the prompt; only the rows of this prompt.
        """
        prefixes = self._target.prefix_cache
        if prefixes is None or not prompt.singles:
            self._answers += [None] * len(prompt.input_ids)
            return
        parts = output.embeds, output.positions, output.features
        answers = [Answer.of(row, single, self._key(single), *parts) for row, single in enumerate(prompt.singles)]
        self._answers += answers
        if len(answers) == 1:
            tokens, key = prompt.input_ids[0].tolist(), answers[0].key
            whole = Prefix(tokens, key, cache, output.logits, output.features, output.embeds, output.positions)
            prefixes.add(whole, self._uncuttable)

    def commit(self, verdict: Verdict, verified: dict[Feature, Tensor]) -> None:
        """Record the features of the accepted nodes of each row.

        Args:
            verified: (batch, nodes, hidden) each, of the verified tree.
        """
        if all(answer is None for answer in self._answers):
            return
        nodes = verdict.path.clamp(min=0)
        index = torch.arange(len(nodes), device=nodes.device)[:, None]
        features = {name: states[index, nodes] for name, states in verified.items()}  # (batch, depth, hidden)
        for row, (answer, (path, _)) in enumerate(zip(self._answers, verdict.host, strict=True)):
            if answer is not None and path:
                accepted = {name: states[row : row + 1, : len(path)] for name, states in features.items()}
                answer.features.append(accepted)

    def retain(self, rows: Sequence[int], histories: Sequence[list[int]]) -> None:
        target = self._target
        if target.prefix_cache is None:
            return
        for row, history in zip(rows, histories, strict=True):
            answer, length = self._answers[row], target.runner.cache.lengths[row]
            if answer is None or length == answer.prompt:
                continue
            if length > len(history) and self._uncuttable:
                continue  # recurrent states that contain draft tokens after a stop are of no use
            cache = target.decoder.new_cache(length + 1, False)
            cache.append(target.runner.cache, length + 1, [row])
            if length > len(history):
                cache.truncate(len(history))
            target.prefix_cache.add(answer.prefix(history[:length], cache, target.embed), self._uncuttable)

    def select(self, rows: Sequence[int]) -> None:
        """Follow these rows, in this order."""
        self._answers = [self._answers[row] for row in rows]

    def _find(self, prompt: Prompt, least: int) -> tuple[Prefix, int] | None:
        prefixes, ids = self._target.prefix_cache, prompt.input_ids[0].tolist()
        assert prefixes is not None
        return prefixes.find(ids, self._key(prompt), self._target.features, least, self._uncuttable)

    def _key(self, prompt: Prompt) -> Hashable:
        return self._target.batch_key(prompt), media_key(prompt), self._target.device, self._target.dtype

    @property
    def _uncuttable(self) -> bool:
        """Whether states of fewer tokens cannot be cut from those of a prompt."""
        return self._target.decoder.layers is not None
