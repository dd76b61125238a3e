"""Drafting steps at fixed shapes and addresses, so that they can be captured: absorbing what was accepted and growing
the whole next tree is one replay, and the host looks at nothing in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

from torch import Tensor

from mmspec.budget import Budget
from mmspec.graphs import Graphed
from mmspec.tree import TokenTree


class CapturedSteps(ABC):
    """What a drafter does between prompts where all that it touches stays in place.

    A step is told by tensors, (batch, width, ...) or (batch,), ``width`` being that of the first; what they are, the
    drafter knows. Nothing that is captured may look at a value on the host.
    """

    def __init__(self) -> None:
        self._grow, self._absorb = Graphed(self._grown), Graphed(self._absorbed)
        self._nothing: tuple[Tensor, ...] = ()
        self._pending: list[tuple[tuple[Tensor, ...], list[int]]] = []  # of each step, what was told and counted

    @abstractmethod
    def limits(self) -> tuple[int, int]:
        """Levels of a tree below its root, and drafted nodes, at most."""

    @abstractmethod
    def make_room(self, width: int) -> Hashable:
        """Make room for a step that absorbs so many tokens and drafts a tree; what stands for the addresses that it
        uses."""

    @abstractmethod
    def absorb(self, *told: Tensor) -> None:
        """Take in a step. Captured."""

    @abstractmethod
    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        """The next tree of each row, behind ``token``, (batch,). Captured."""

    @abstractmethod
    def count(self, kept: list[int]) -> None:
        """A step was absorbed, of which the host knows this much."""

    def start(self, nothing: tuple[Tensor, ...]) -> None:
        """A prompt was absorbed. ``nothing``: what a step of width 0 would tell."""
        self._nothing, self._pending = nothing, []

    def note(self, told: tuple[Tensor, ...], counted: list[int]) -> None:
        """A step, to be absorbed when the next tree is asked for. ``counted`` goes to ``count`` then."""
        self._pending.append((told, counted))

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        """See ``Drafter``. Depth and size do not depend on how much is left to say."""
        *earlier, (last, counted) = self._pending or [(self._nothing, [])]
        self._pending = []
        for told, before in earlier:  # nothing was drafted behind them
            self._absorb(*told, version=self.make_room(told[0].shape[1]))
            self.count(before)
        deepest, most = self.limits()
        depth, nodes = min(deepest, budget.depth), min(most, budget.nodes)
        tokens, parents, log_probs = self._grow(
            token, *last, version=self.make_room(last[0].shape[1]), nodes=nodes, depth=depth
        )
        if counted:
            self.count(counted)
        tree = TokenTree(tokens, parents, log_probs=log_probs, check=False)
        tree.max_depth = min(depth, tree.nodes - 1)
        return tree

    def _grown(self, token: Tensor, *told: Tensor, nodes: int, depth: int) -> tuple[Tensor, ...]:
        """Absorb a step, and grow the next tree: its tokens, parents and log probabilities."""
        if told[0].shape[1]:
            self.absorb(*told)
        tree = self.grow(token, Budget(nodes, depth))
        assert tree.log_probs is not None
        return tree.tokens, tree.parents, tree.log_probs

    def _absorbed(self, *told: Tensor) -> tuple[Tensor, ...]:
        self.absorb(*told)
        return ()

    @property
    def captured(self) -> tuple[int, int]:
        """How many kinds of steps are replayed: those with a tree, and those without."""
        return self._grow.captured, self._absorb.captured


def hold(place: object, **values: Tensor) -> bool:
    """Write tensors where those stand that an object has under these names, if they are alike; else set them.

    Returns:
        Whether all stand where they stood.
    """
    stayed = True
    for name, value in values.items():
        held = getattr(place, name)
        if (held.shape, held.dtype, held.device) == (value.shape, value.dtype, value.device):
            held.copy_(value)
        else:
            setattr(place, name, value.clone())
            stayed = False
    return stayed
