"""Early-exit drafter: the target's own first layers, final norm and output layer (LayerSkip, arXiv 2404.16710).

The drafter shares the target's weights, KV cache and recurrent states. Drafted nodes are uncommitted entries of the
target's cache, which the verify pass overwrites. Images and videos are in the prefix.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from torch import Tensor

from mmspec import ops
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import CapturedDrafter
from mmspec.drafters.growth import LevelPasses, grow_tree
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError
from mmspec.targets.transformers_target import FirstLayers, TransformersTarget


def first_layers(target: Target, count: int) -> FirstLayers:
    """The target's first ``count`` layers.

    Raises:
        UserError: the target is not a transformers model of one decoder with more than ``count`` layers.
    """
    if not isinstance(target, TransformersTarget):
        raise UserError("an early exit requires a target that is a model of transformers: this one is not")
    return FirstLayers(target, count)


class EarlyExit(CapturedDrafter):
    """Early-exit drafter.

    Args:
        layers: number of the target's first layers that draft.

    Raises:
        UserError: ``layers`` is not a number, or (at ``attach``) see ``first_layers``.
    """

    learns: ClassVar[bool] = False

    def __init__(self, layers: int | str, top_k: int = 8) -> None:
        if not str(layers).isdecimal():
            raise UserError(f"early-exit takes a number of layers, as in early-exit:4: got {layers!r}")
        self.layers, self.top_k = int(layers), top_k
        super().__init__()

    def attach(self, target: Target) -> None:
        if target is not self._target:
            self._first, self._target = first_layers(target, self.layers), target
            self.reset()

    @property
    def parts(self) -> tuple[()]:
        return ()

    def draft_chains(self, length: int) -> None:
        self.top_k = 1

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self.join(len(history), self._first.runner.static_shapes)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """No-op: the target commits the accepted tokens to the shared cache."""

    def update(self, *inputs: Tensor) -> None:
        """No-op, see ``observe``."""

    def reserve(self, width: int) -> None:
        self._first.runner.cache.reserve_nodes(width + 1 + self.limits[0] * self.top_k)

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        first = self._first
        passes, head = LevelPasses(first.runner, first.recurrent), first.head

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            return ops.top_log_probs(head(passes(beam, origin)), self.top_k)

        tree = grow_tree(token, None, extend, plan, self.top_k)
        passes.end()
        return tree

    @property
    def _version(self) -> tuple[Hashable, ...]:
        return self._first.version


SPEC = DrafterSpec(
    "early-exit",
    "Early exit",
    "the target's own first layers, final norm and output layer (arXiv 2404.16710)",
    EarlyExit,
    argument="LAYERS",
)
