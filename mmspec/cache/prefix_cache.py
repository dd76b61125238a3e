"""Prefix cache: states of prompts and answers, for later prompts with a common prefix of tokens and media."""

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
"""Minimum length of a prefix to reuse."""


@dataclass(frozen=True)
class Prefix:
    """Tokens of one row, a prompt or a prompt with its answer, and the target's states and features for them.

    Attributes:
        key: key of all inputs except tokens that the states depend on.
        cache: one-row cache of the target after the tokens.
        logits: (1, 1, vocab), logits at the last token; None after an answer.
        features: (1, length, hidden) each, hidden states that drafters read.
        embeds: (1, length, hidden), input embeddings; None if the decoder embeds the tokens itself.
        positions: (1, length) or (axes, 1, length) int64, the decoder's ``position_ids``; None if it has no such input.
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
    """Features and inputs of a running sequence: prompt and committed tokens.

    Attributes:
        prompt: number of prompt tokens.
        key, embeds, positions: prompt inputs, see ``Prefix``.
        features: (1, tokens, hidden) each, features of the prompt and of each step.
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
        """States of one row after a prefill of left-padded prompts.

        Args:
            prompt: prompt of the row, without padding.
            embeds, positions, features: values of all rows.
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
        """The prefix for ``tokens``, which start with the prompt.

        Args:
            cache: one-row cache after the tokens.
        """
        length = len(tokens)
        features = {name: torch.cat([part[name] for part in self.features], 1)[:, :length] for name in self.features[0]}
        embeds = self.embeds
        if embeds is not None:
            new = torch.tensor([tokens[self.prompt :]], dtype=torch.long, device=embeds.device)
            embeds = torch.cat([embeds, embed(new)], dim=1)
        return Prefix(tokens, self.key, cache, None, features, embeds, continued(self.positions, self.prompt, length))


class PrefixCache:
    """LRU cache of prefixes with a memory limit. Thread-safe.

    Args:
        limit: size limit in bytes; a single prefix above it is not cached.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._entries: list[Prefix] = []  # most recently used last
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PrefixCache, (self.limit,)  # copies of a pipeline start with an empty cache

    def __len__(self) -> int:
        return len(self._entries)

    def find(
        self, tokens: Sequence[int], key: Hashable, features: Sequence[Feature], least: int, whole: bool
    ) -> tuple[Prefix, int] | None:
        """The prefix with the most tokens in common with a prompt, and their number.

        Args:
            key: key of the prompt, which must equal the prefix's key.
            features: features that the prefix must have.
            least: minimum number of common tokens.
            whole: prefixes cannot be truncated: all their tokens must match.
        """
        with self._lock:
            best, most = None, max(least, LEAST_TOKENS) - 1
            for entry in self._entries:
                if entry.key == key and entry.features.keys() >= set(features):
                    shared = common(entry.tokens, tokens)
                    if shared == len(tokens) and (entry.logits is None or shared < len(entry.tokens)):
                        shared -= 1  # logits of the last token are unknown
                    if shared > most and (shared == len(entry.tokens) or not whole):
                        best, most = entry, shared
            if best is None:
                return None
            self._entries.remove(best)
            self._entries.append(best)
            return best, most

    def add(self, prefix: Prefix, whole: bool) -> None:
        """Add a prefix and drop the prefixes that it extends, unless these are only usable whole."""
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
    """Extend the positions of the first ``common`` tokens to a prompt of ``length`` tokens. The last known token and
    all later tokens are text: all axes advance by one per token."""
    if positions is None:
        return None
    known = positions[..., :common]
    return torch.cat([known, known[..., -1:] + 1 + torch.arange(length - common, device=positions.device)], dim=-1)


def at_text(positions: Tensor | None, place: int) -> bool:
    """Whether token ``place`` is at a text position.

    Args:
        positions: (batch, length) or (axes, batch, length) int64. With several axes (Qwen-VL), the last three are time,
            height and width; they differ at images and videos.
    """
    if positions is None or positions.ndim == 2:
        return True
    axes = positions[-3:, :, place]
    return bool((axes == axes[0]).all())


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _replaces(new: Prefix, old: Prefix, whole: bool) -> bool:
    """Whether a new prefix makes an old prefix redundant."""
    extends = new.key == old.key and new.tokens[: len(old.tokens)] == old.tokens
    return extends and new.features.keys() >= old.features.keys() and (new.tokens == old.tokens or not whole)


def media_key(prompt: Prompt) -> str:
    """Content hash of a prompt's inputs other than tokens."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(prompt.inputs.items()):
        if isinstance(value, Tensor) and value.shape == prompt.input_ids.shape:
            continue  # one value per token, implied by the tokens
        digest.update(f"{name} {getattr(value, 'shape', value)} {getattr(value, 'dtype', '')};".encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
