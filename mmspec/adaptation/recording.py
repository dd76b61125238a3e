"""Records the target's hidden states of sequences as they are decoded, for the training of their drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.core.drafter import Drafter, Wrapper
from mmspec.core.target import Feature, Prompt, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.trained import TrainedDrafter

_WAITING = 64  # ended sequences that have not been learned from; further ones are not recorded
_LONGEST = 4096  # tokens of a recorded prompt


@dataclass(frozen=True)
class RecordedAnswer:
    """A sequence with the target's hidden states.

    Attributes:
        tokens: (length,) int64, prompt and answer, on the host.
        features: (length, hidden) each, the features that its drafter reads.
        visual: (length,) bool, positions of image and video features.
        shown: (visual positions, hidden), their input embeddings.
    """

    tokens: Tensor
    prompt: int
    features: dict[Feature, Tensor]
    visual: Tensor
    shown: Tensor

    @property
    def size(self) -> int:
        """Bytes of the hidden states."""
        return sum(x.numel() * x.element_size() for x in (*self.features.values(), self.shown))


@dataclass
class _Row:
    """A sequence that is decoding; ``passes`` are its states in prefill and verify passes, None if not recorded."""

    history: list[int]
    prompt: int
    passes: list[dict[Feature, Tensor]] | None
    visual: Tensor | None = None
    shown: Tensor | None = None
    tokens: int = 0  # emitted by steps that drafted
    steps: int = 0

    def answer(self) -> RecordedAnswer | None:
        if not self.passes:
            return None
        features = {name: torch.cat([one[name] for one in self.passes]) for name in self.passes[0]}
        length = min(len(next(iter(features.values()))), len(self.history))  # tokens after a stop are dropped
        visual, shown = torch.zeros(length, dtype=torch.bool), next(iter(features.values()))[:0]
        if self.visual is not None and self.shown is not None:
            visual[: self.prompt], shown = self.visual.cpu(), self.shown
        tokens = torch.tensor(self.history[:length])
        return RecordedAnswer(tokens, self.prompt, {name: x[:length] for name, x in features.items()}, visual, shown)


@dataclass
class Ended:
    """A sequence that has ended.

    Attributes:
        answer: None if it was not recorded.
        tokens, steps: emitted by verify passes over drafts, and their number.
    """

    answer: RecordedAnswer | None
    tokens: int
    steps: int


@dataclass(eq=False)
class RecordedDrafter(Wrapper):
    """A trained drafter whose sequences are recorded, and which is replaced while it has none.

    A copy drafts with what has been learned, and is recorded no more.

    Attributes:
        ended: sequences that have ended, for the learner to take.
        fresh: replaces ``drafter`` before its next first sequence.
    """

    drafter: TrainedDrafter
    ended: list[Ended] = field(default_factory=list)
    fresh: TrainedDrafter | None = None
    _rows: list[_Row] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Drafter:
        from copy import deepcopy

        return deepcopy(self.drafter, memo)

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        if self.fresh is not None and not self._rows:
            self.drafter, self.fresh = self.fresh, None
            assert self._target is not None
            self.drafter.attach(self._target)
        self.drafter.begin(prompt, output, history)
        length = prompt.input_ids.shape[1]
        recorded = len(self.ended) < _WAITING and length <= _LONGEST
        for number, tokens in enumerate(history):
            own = slice(length + 1 - len(tokens), None)  # without padding
            row = _Row(tokens, len(tokens) - 1, None)
            if recorded:
                row.passes = [{name: output.features[name][number, own].clone() for name in self.features}]
                if output.visual is not None and output.embeds is not None:
                    row.visual = output.visual[number, own].clone()
                    row.shown = output.embeds[number, own][row.visual].clone()
            self._rows.append(row)

    def select(self, rows: Sequence[int]) -> None:
        self.drafter.select(rows)
        kept = set(rows)
        for number, row in enumerate(self._rows):
            if number not in kept:
                self.ended.append(Ended(row.answer(), row.tokens, row.steps))
        self._rows = [self._rows[row] for row in rows]

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        self.drafter.observe(tree, verdict, output)
        path = verdict.path.clamp(min=0)[..., None]
        states = {
            name: output.features[name].gather(1, path.expand(-1, -1, output.features[name].shape[2]))
            for name in self.features
        }
        for number, (row, (accepted, _)) in enumerate(zip(self._rows, verdict.host, strict=True)):
            if tree.nodes > 1:
                row.tokens += len(accepted)
                row.steps += 1
            if row.passes is not None:
                row.passes.append({name: x[number, : len(accepted)] for name, x in states.items()})
