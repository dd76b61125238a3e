"""Early-exit drafter: the target's own first layers, final norm and output layer (LayerSkip, arXiv 2404.16710).

Weights, keys and values are the target's: those of its first layers are the same in a whole pass. Nodes that are
drafted are uncommitted nodes in the target's cache, and the verify pass overwrites them. Recurrent layers read the
target's states. Images and videos are in the prefix.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec import ops
from mmspec.core.budget import Budget
from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import CapturedDrafter
from mmspec.drafters.growth import grow_tree
from mmspec.drafters.level_passes import LevelPasses
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError
from mmspec.targets.decoder import Decoder
from mmspec.targets.transformers_target import TransformersTarget

_DEPTH, _NODES = 16, 512  # maximum tree size with static shapes


class EarlyExit(CapturedDrafter):
    """Early-exit drafter.

    Args:
        layers: number of the target's first layers that draft.
        top_k: nodes extended per level, and children per node.

    Raises:
        UserError: no number of layers, or (at ``attach``) a target that has no more layers, or whose layers are not
            those of one decoder of transformers.
    """

    learns: ClassVar[bool] = False
    _target: TransformersTarget | None = None

    def __init__(self, layers: int | str, top_k: int = 8) -> None:
        if not str(layers).isdecimal():
            raise UserError(f"early-exit takes a number of layers, as in early-exit:4: got {layers!r}")
        self.layers, self.top_k = int(layers), top_k
        self._first: Decoder | None = None
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_first": None}  # a view of the target's modules

    def attach(self, target: Target) -> None:
        if target is self._target:
            return
        if not isinstance(target, TransformersTarget):
            raise UserError("early-exit requires a target that is a model of transformers: this one is not")
        self._target, self._first = target, Decoder(target.model, self.layers)
        self.reset()

    @property
    def parts(self) -> tuple[()]:
        return ()

    @property
    def limits(self) -> tuple[int, int]:
        return _DEPTH, _NODES

    def draft_chains(self, length: int) -> None:
        self.top_k = 1

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self.join(len(history), self._attached.runner.static_shapes)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Nothing to do: the target's commit has the accepted tokens."""

    def update(self, *inputs: Tensor) -> None:
        """Nothing to do, see ``observe``."""

    def reserve(self, width: int) -> None:
        self._attached.runner.cache.reserve_nodes(1 + _DEPTH * self.top_k)

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        target = self._attached
        if self._first is None:
            self._first = Decoder(target.model, self.layers)
        passes = LevelPasses(target.runner.through(self._first), target.decoder.layers is not None)

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            return ops.top_log_probs(target.head(passes(beam, origin)), self.top_k)

        tokens, log_probs = extend(token[:, None], torch.zeros_like(token[:, None]))
        tree = grow_tree(token, (tokens[:, 0], log_probs[:, 0]), extend, budget, self.top_k)
        passes.end()
        return tree

    @property
    def _attached(self) -> TransformersTarget:
        assert self._target is not None, "attach comes first"
        return self._target

    @property
    def _version(self) -> tuple[Any, ...]:
        return self._attached.version


SPEC = DrafterSpec(
    "early-exit",
    "Early exit",
    "the target's own first layers, final norm and output layer (arXiv 2404.16710)",
    EarlyExit,
    argument="LAYERS",
)
