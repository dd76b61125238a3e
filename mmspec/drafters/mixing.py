"""Probabilities of next tokens from counts in contexts: prediction by partial matching."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_ESCAPE = 0.5  # weight of all shorter contexts against one occurrence of a context


def mixed(contexts: Iterable[Mapping[int, int]]) -> dict[int, float]:
    """Probabilities of tokens.

    Args:
        contexts: counts of the tokens after each context, the longest context first.
    """
    probs: dict[int, float] = {}
    weight = 1.0
    for counts in contexts:
        total = sum(counts.values()) + _ESCAPE
        for token, count in counts.items():
            probs[token] = probs.get(token, 0.0) + weight * count / total
        weight *= _ESCAPE / total
    return probs
