"""Datastore drafter: continuations of the sequence's last tokens in an index of texts on disk.

REST (arXiv 2311.08252) takes the longest context that occurs; here, its counts are mixed with those of a shorter one.
The continuations of all occurrences are merged to one tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.drafters.datastore.index import SuffixIndex
from mmspec.drafters.lookup import Children, LookUpDrafter, mixed
from mmspec.errors import UserError

_OCCURRENCES = 64  # of a context, at most; of more, evenly spaced ones are read
_FEW = 8  # occurrences of a context; if there are fewer, a shorter one is read too

_State = tuple[list[int], ...]  # positions of the next token, per context, the longest first


class Datastore(LookUpDrafter):
    """Datastore drafter. Proposals depend on the sequence and the store alone.

    Args:
        folder: of a store that ``mmspec datastore build`` wrote.

    Raises:
        UserError: it is none.
    """

    learns = False

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.index = SuffixIndex(Path(folder))

    def attach(self, target: Target) -> None:
        if target is self._target:
            return
        expected = self.index.config.vocab_size
        received = target.head(target.embed(torch.zeros(1, dtype=torch.long, device=target.device))).shape[-1]
        if expected != received:
            raise UserError(f"the datastore is of a model with {expected} tokens: the target has {received}")
        self._target = target
        self.select([])

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self.rows += history

    def start(self, row: int, path: Sequence[int] = ()) -> tuple[_State, Children]:
        tokens = [*self.rows[row], *path] if path else self.rows[row]
        length, places = self.index.longest(tokens)
        state = [self.index.following(places, length, _OCCURRENCES)]
        if length > 1 and len(places) < _FEW:
            shorter = length // 2
            state.append(self.index.following(self.index.find(tokens[-shorter:]), shorter, _OCCURRENCES))
        return tuple(state), self._children

    def _children(self, state: _State) -> Iterator[tuple[int, float, _State]]:
        groups: list[dict[int, list[int]]] = []
        for positions in state:
            groups.append({})
            for position in positions:
                token = self.index.token(position)
                if token < self.index.config.vocab_size:
                    groups[-1].setdefault(token, []).append(position + 1)
        probs = mixed({token: len(after) for token, after in group.items()} for group in groups)
        for token, p in probs.items():
            yield token, p, tuple(group[token] for group in groups if token in group)
