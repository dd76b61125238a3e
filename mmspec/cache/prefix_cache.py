"""States of prompts and their answers, kept for later prompts that begin with the same tokens and media."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.cache.tree_cache import TreeCache
from mmspec.core.target import Feature, Prompt

LEAST_TOKENS = 8
"""Shorter prefixes are computed again."""


@dataclass(frozen=True)
class Prefix:
    """Tokens of one row, a prompt or a prompt and its answer, and the target's states and features of them.

    Attributes:
        key: of everything but the tokens that the states depend on.
        cache: the target's cache after the tokens, of one row.
        logits: (1, 1, vocab), at the last token; None after an answer.
        features: (1, length, hidden) each, hidden states that drafters read.
        embeds: (1, length, hidden), input embeddings; None where the decoder embeds the tokens itself.
        positions: (1, length) or (axes, 1, length) int64, the decoder's ``position_ids``; None if it takes none.
    """

    tokens: list[int]
    key: Hashable
    cache: TreeCache
    logits: Tensor | None
    features: dict[Feature, Tensor]
    embeds: Tensor | None
    positions: Tensor | None

    @property
    def nbytes(self) -> int:
        tensors = [self.logits, self.embeds, self.positions, *self.features.values(), *self.cache.tensors()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass
class RunningStates:
    """Features and inputs of a running sequence: of its prompt, and of each token committed after it.

    Attributes:
        prompt: number of tokens.
        key, embeds, positions: of the prompt, see ``Prefix``.
        features: (1, tokens, hidden) each, of the prompt and of every step.
    """

    prompt: int
    key: Hashable
    embeds: Tensor | None
    positions: Tensor | None
    features: list[dict[Feature, Tensor]]

    @classmethod
    def of(
        cls,
        row: int,
        prompt: Prompt,
        key: Hashable,
        embeds: Tensor | None,
        positions: Tensor | None,
        features: dict[Feature, Tensor],
    ) -> RunningStates:
        """The answer to a row of a prefill of left-padded prompts.

        Args:
            prompt: the row's, without padding.
            embeds, positions, features: of all rows.
        """
        length = prompt.input_ids.shape[1]
        own, last = slice(row, row + 1), slice(-length, None)
        return cls(
            length,
            key,
            None if embeds is None else embeds[own, last],
            None if positions is None else positions[..., own, last],
            [{name: states[own, last] for name, states in features.items()}],
        )

    def prefix(self, tokens: list[int], cache: TreeCache, embed: Callable[[Tensor], Tensor]) -> Prefix:
        """The prefix of ``tokens``, which begin with the prompt's.

        Args:
            cache: after the tokens, of one row.
        """
        length = len(tokens)
        features = {name: torch.cat([part[name] for part in self.features], 1)[:, :length] for name in self.features[0]}
        embeds = self.embeds
        if embeds is not None:
            new = torch.tensor([tokens[self.prompt :]], dtype=torch.long, device=embeds.device)
            embeds = torch.cat([embeds, embed(new)], dim=1)
        return Prefix(tokens, self.key, cache, None, features, embeds, continued(self.positions, self.prompt, length))


class PrefixCache:
    """The most recently used prefixes within a memory limit. Threads may share it.

    Args:
        limit: bytes; a prefix that exceeds it alone is not kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._entries: list[Prefix] = []  # the most recently used one is last
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PrefixCache, (self.limit,)  # copies of a pipeline begin with an empty one

    def __len__(self) -> int:
        return len(self._entries)

    def find(
        self, tokens: Sequence[int], key: Hashable, features: Sequence[Feature], least: int, whole: bool
    ) -> tuple[Prefix, int] | None:
        """The prefix that has most tokens in common with a prompt, and their number.

        Args:
            key: of the prompt, equal to the prefix's.
            features: that the prefix must have.
            least: tokens that must be in common.
            whole: prefixes cannot be cut: all their tokens must be in common.
        """
        with self._lock:
            best, most = None, max(least, LEAST_TOKENS) - 1
            for entry in self._entries:
                if entry.key == key and entry.features.keys() >= set(features):
                    shared = common(entry.tokens, tokens)
                    if shared == len(tokens) and (entry.logits is None or shared < len(entry.tokens)):
                        shared -= 1  # the last token's logits are not known
                    if shared > most and (shared == len(entry.tokens) or not whole):
                        best, most = entry, shared
            if best is None:
                return None
            self._entries.remove(best)
            self._entries.append(best)
            return best, most

    def add(self, prefix: Prefix, whole: bool) -> None:
        """Keep a prefix, in place of those that it extends; not if they are needed whole."""
        size = prefix.nbytes
        if size > self.limit:
            return
        with self._lock:
            self._entries = [entry for entry in self._entries if not _replaces(prefix, entry, whole)]
            sizes = [entry.nbytes for entry in self._entries]
            while sum(sizes) + size > self.limit:
                self._entries, sizes = self._entries[1:], sizes[1:]
            self._entries.append(prefix)
            self.nbytes = sum(sizes) + size

    def clear(self) -> None:
        """Drop all prefixes."""
        with self._lock:
            self._entries, self.nbytes = [], 0


def continued(positions: Tensor | None, common: int, length: int) -> Tensor | None:
    """Positions of a prompt of ``length`` tokens whose first ``common`` ones have known positions, the last of them and
    the rest being text: all axes advance by one per token."""
    if positions is None:
        return None
    known = positions[..., :common]
    return torch.cat([known, known[..., -1:] + 1 + torch.arange(length - common, device=positions.device)], dim=-1)


def at_text(positions: Tensor | None, place: int) -> bool:
    """Whether token ``place`` has one position, as text has.

    Args:
        positions: (batch, length) or (axes, batch, length) int64. With several axes (Qwen-VL), the last three are time,
            height and width; they differ at images and videos.
    """
    if positions is None or positions.ndim == 2:
        return True
    axes = positions[-3:, :, place]
    return bool((axes == axes[0]).all())


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of equal elements that two sequences begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _replaces(new: Prefix, old: Prefix, whole: bool) -> bool:
    """Whether a prefix makes an earlier one superfluous."""
    extends = new.key == old.key and new.tokens[: len(old.tokens)] == old.tokens
    return extends and new.features.keys() >= old.features.keys() and (new.tokens == old.tokens or not whole)


def media_key(prompt: Prompt) -> str:
    """A key of a prompt's inputs other than tokens: equal for equal contents."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(prompt.inputs.items()):
        if isinstance(value, Tensor) and value.shape == prompt.input_ids.shape:
            continue  # one value per token, which follows from the tokens
        digest.update(f"{name} {getattr(value, 'shape', value)} {getattr(value, 'dtype', '')};".encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
