"""Sampling that follows the model's own distribution given the grammar (grammar-aligned decoding, arXiv 2405.21047).

Masks renormalise every token by itself, so that a beginning which few outputs of the model would continue within the
grammar is as probable as one which nearly all would. Here, tokens are drawn without masks. An output is rejected at its
first forbidden token and begun anew: adaptive rejection sampling, whose accepted outputs are exact, whatever was
rejected before. What has been rejected is excluded from then on: each beginning of an output where one was rejected has
a weight, the probability that it is not known to leave the grammar,

    w(x) = sum over tokens t of p(t | x) w(x t),    w = 0 after a forbidden token, w = 1 of what is not known,

and later outputs draw t with a probability in proportion to p(t | x) w(x t).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mmspec.errors import UserError
from mmspec.ops.transfer import on_device

_MOST = 1000  # rejected outputs of a sequence


class RejectedError(Exception):
    """A token was drawn that the grammar forbids: the output is to be begun anew."""


@dataclass(slots=True)
class _Beginning:
    """A beginning of outputs.

    Attributes:
        prob: probability of its last token.
        weight: as above.
        rest: probability of all allowed tokens that are not in ``children``; None before a token was drawn.
        children: by token, if it was drawn and allowed.
    """

    prob: float = 1.0
    weight: float = 1.0
    rest: float | None = None
    children: dict[int, _Beginning] = field(default_factory=dict)


class Alignment:
    """What the outputs of a sequence have shown about its grammar."""

    def __init__(self) -> None:
        self.rejected = 0
        self._path = [_Beginning()]  # of the output so far, by number of tokens

    def weighted(self, length: int, scores: Tensor, allowed: Tensor) -> Tensor:
        """The scores to draw a token from, which ``take`` then gets.

        Args:
            length: number of tokens before, of the output that earlier calls have drawn.
            scores: (1, vocab) float32, after all processors.
            allowed: (vocab,) bool, by the grammar.
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
        """Go on with a token; returns whether the grammar allows it."""
        here, probs, allowed = self._path[-1], self._probs, bool(self._allowed[token])
        if allowed:
            self._path.append(here.children.setdefault(token, _Beginning()))
            self._path[-1].prob = float(probs[token])
        probs[list(here.children)] = 0.0
        here.rest = float(probs.sum())  # without cancellation: 0 where all were drawn
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
