"""Early-exit drafter: the target's own first layers, final norm and output layer (LayerSkip, arXiv 2404.16710).

The drafter shares the target's weights, KV cache and recurrent states. Drafted nodes are uncommitted entries of the
target's cache, which the verify pass overwrites. Images and videos are in the prefix.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

from torch import Tensor

from mmspec import ops
from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import CapturedDrafter
from mmspec.drafters.growth import LevelPasses, grow_tree
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError
from mmspec.targets.decoder import Decoder
from mmspec.targets.transformers_target import TransformersTarget


class FirstLayers:
    """Runs a target's first layers over draft trees with the target's cache.

    Args:
        target: a transformers model.
        layers: number of first layers to run.

    Raises:
        UserError: the target is not a transformers model of one decoder with more than ``layers`` layers.
    """

    def __init__(self, target: Target, layers: int) -> None:
        if not isinstance(target, TransformersTarget):
            raise UserError("an early exit requires a target that is a model of transformers: this one is not")
        self.target, self._layers = target, layers
        self._decoder: Decoder | None = Decoder(target.model, layers)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_decoder": None}  # a view of the target's modules

    def passes(self, read: Feature = "last") -> LevelPasses:
        """Forward passes over the levels of a new tree, which return the feature ``read``."""
        if self._decoder is None:
            self._decoder = Decoder(self.target.model, self._layers)
        runner = self.target.runner.through(self._decoder)
        return LevelPasses(runner, self.target.decoder.layers is not None, read)


class EarlyExit(CapturedDrafter):
    """Early-exit drafter.

    Args:
        layers: number of the target's first layers that draft.
        top_k: nodes extended per level, and children per node.

    Raises:
        UserError: ``layers`` is not a number, or (at ``attach``) see ``FirstLayers``.
    """

    learns: ClassVar[bool] = False

    def __init__(self, layers: int | str, top_k: int = 8) -> None:
        if not str(layers).isdecimal():
            raise UserError(f"early-exit takes a number of layers, as in early-exit:4: got {layers!r}")
        self.layers, self.top_k = int(layers), top_k
        super().__init__()

    def attach(self, target: Target) -> None:
        if target is not self._target:
            self._first, self._target = FirstLayers(target, self.layers), target
            self.reset()

    @property
    def parts(self) -> tuple[()]:
        return ()

    def draft_chains(self, length: int) -> None:
        self.top_k = 1

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self.join(len(history), self._first.target.runner.static_shapes)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """No-op: the target commits the accepted tokens to the shared cache."""

    def update(self, *inputs: Tensor) -> None:
        """No-op, see ``observe``."""

    def reserve(self, width: int) -> None:
        self._first.target.runner.cache.reserve_nodes(width + 1 + self.limits[0] * self.top_k)

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        passes, head = self._first.passes(), self._first.target.head

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            return ops.top_log_probs(head(passes(beam, origin)), self.top_k)

        tree = grow_tree(token, None, extend, plan, self.top_k)
        passes.end()
        return tree

    @property
    def _version(self) -> tuple[Hashable, ...]:
        return self._first.target.version


SPEC = DrafterSpec(
    "early-exit",
    "Early exit",
    "the target's own first layers, final norm and output layer (arXiv 2404.16710)",
    EarlyExit,
    argument="LAYERS",
)
