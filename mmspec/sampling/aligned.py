"""Grammar-aligned decoding (arXiv 2405.21047): samples the model's distribution conditioned on the grammar.

Grammar masks distort this distribution, as they renormalise each token separately: they ignore how probably a prefix
can be completed within the grammar. Here, tokens are drawn without masks, and an output is rejected at its first
forbidden token and restarted (adaptive rejection sampling; accepted outputs are exact). Rejected continuations are
excluded from later attempts: each prefix x of a rejected output has a weight, the probability that its continuation is
not known to violate the grammar,

    w(x) = sum over tokens t of p(t | x) w(x t),    w = 0 after a forbidden token, w = 1 for unexplored prefixes,

and later outputs draw t with probability proportional to p(t | x) w(x t).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mmspec.errors import UserError
from mmspec.ops.transfer import on_device

_MOST = 1000  # maximum rejected outputs per sequence


class RejectedError(Exception):
    """The sampled token is forbidden by the grammar: the output must be restarted."""


@dataclass(slots=True)
class _Beginning:
    """Trie node of an output prefix.

    Attributes:
        prob: probability of the prefix's last token.
        weight: w(x), see the module.
        rest: total probability of allowed tokens not in ``children``; None before the first draw.
        children: longer prefixes by sampled, allowed token.
    """

    prob: float = 1.0
    weight: float = 1.0
    rest: float | None = None
    children: dict[int, _Beginning] = field(default_factory=dict)


class Alignment:
    """Trie of the rejected outputs of one sequence."""

    def __init__(self) -> None:
        self.rejected = 0
        self._path = [_Beginning()]  # prefixes of the current output, by length

    def weighted(self, length: int, scores: Tensor, allowed: Tensor) -> Tensor:
        """Reweight the scores for the next draw; pass the sampled token to ``take``.

        Args:
            length: number of output tokens so far.
            scores: (1, vocab) float32, after all processors.
            allowed: (vocab,) bool, the grammar's mask.
        """
        del self._path[length + 1 :]
        here, weights = self._path[length], on_device(allowed, scores.device).double()
        self._probs = scores[0].double().softmax(-1) * weights
        self._allowed = allowed
        if here.rest is None:
            return scores
        for token, below in here.children.items():
            weights[token] = below.weight
        return scores + weights.log().to(scores.dtype)

    def take(self, token: int) -> bool:
        """Append a sampled token; returns whether the grammar allows it."""
        here, probs, allowed = self._path[-1], self._probs, bool(self._allowed[token])
        if allowed:
            self._path.append(here.children.setdefault(token, _Beginning()))
            self._path[-1].prob = float(probs[token])
        probs[list(here.children)] = 0.0
        here.rest = float(probs.sum())  # summed without cancellation: exactly 0 after all tokens were drawn
        return allowed

    def reject(self) -> None:
        """Update the weights along the rejected output, from its last token to its first.

        Raises:
            UserError: no output is left, or too many were rejected.
        """
        self.rejected += 1
        for here in reversed(self._path):
            assert here.rest is not None
            here.weight = here.rest + sum(below.prob * below.weight for below in here.children.values())
        if not self._path[0].weight:
            raise UserError("no output that logits processors and sampling parameters leave satisfies the grammar")
        if self.rejected >= _MOST:
            raise UserError(
                f"an output of the model must satisfy the grammar with grammar_aligned: {_MOST} did not, and of others "
                f"the probability is at most {self._path[0].weight:.1g}"
            )
