"""Drafters on the target's own first layers, for any target of transformers: early exit and Kangaroo.

Early exit (LayerSkip, arXiv 2404.16710) adds the target's final norm and output layer. The drafter shares the target's
weights, KV cache and recurrent states. Drafted nodes are uncommitted entries of the target's cache, which the verify
pass overwrites. Images and videos are in the prefix.

In Kangaroo (arXiv 2404.18911), a network follows the first layers: an attention layer without MLP and a norm (section
3.1). It has its own KV cache, at token-count positions; entry j of a row reads the target's early-exit state at token
j. ``StepPlan.least_gain`` stops growth instead of the paper's confidence threshold for chains.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from torch import Tensor, nn

from mmspec import ops
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, Target, TargetOutput, output_of
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import CapturedDrafter
from mmspec.drafters.growth import LevelPasses, grow_tree
from mmspec.drafters.hidden_state import HiddenStateDrafter
from mmspec.drafters.layer import Attend, LlamaLayer, Norm, Rotation
from mmspec.drafters.spec import DrafterSpec, RotaryShape
from mmspec.errors import UserError
from mmspec.targets.transformers_target import FirstLayers
from mmspec.validation import option, options


class EarlyExit(CapturedDrafter):
    """Early-exit drafter.

    Args:
        layers: number of the target's first layers that draft.

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


EARLY_EXIT = DrafterSpec(
    "early-exit",
    "Early exit",
    "the target's own first layers, final norm and output layer (arXiv 2404.16710)",
    EarlyExit,
    argument="LAYERS",
)


@options
class KangarooConfig(RotaryShape):
    """Configuration of a ``KangarooNetwork``: a ``RotaryShape`` of the target's hidden size, and

    Attributes:
        mlp: always 0: the layer has no MLP.
        exit_layer: number of the target's first layers to run, 2 in ``kangaroo:FOLDER@2``.
    """

    mlp: int = option(0, ge=0, le=0)
    exit_layer: int = option(2, ge=1, le=2**10)


class KangarooNetwork(nn.Module):
    """Attention layer and norm between the target's early-exit states and its output layer."""

    def __init__(self, config: KangarooConfig) -> None:
        super().__init__()
        self.config = config
        self.layers: Any = nn.ModuleList([LlamaLayer(config)])
        self.norm = Norm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Inputs of the target's output layer, (batch, nodes, hidden), from its early-exit states. ``x``: (batch,
        nodes, hidden)."""
        return self.norm(self.layers[0](x, rotation, attend))


class Kangaroo(HiddenStateDrafter):
    name: ClassVar[str] = "kangaroo"
    config_class = KangarooConfig
    network_class = KangarooNetwork

    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        exit_layer = self.network.config.exit_layer
        self._first, self.features = FirstLayers(target, exit_layer), (output_of(exit_layer - 1),)
        return self.target_head(target)

    def join(self, rows: int, static_shapes: bool) -> None:
        super().join(rows, static_shapes and self._first.runner.static_shapes)

    def reserve(self, width: int) -> None:
        super().reserve(width)
        self._first.runner.cache.reserve_nodes(width + self.depth * self.top_k)

    @property
    def _version(self) -> tuple[Hashable, ...]:
        return *super()._version, *self._first.version

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        passes = LevelPasses(self._first.runner, self._first.recurrent, self.features[0])
        state = self._tree_state(len(token), self.depth)

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            states = state.run(self.run, passes(beam, origin), origin)
            tokens, log_probs = self.children(states, states)
            return self.target_tokens(tokens), log_probs

        tree = grow_tree(token, None, extend, plan, self.top_k, depth=self.depth, nodes=self.total_tokens)
        passes.end()
        state.end()
        return tree


KANGAROO = DrafterSpec(
    "kangaroo",
    "Kangaroo",
    "the target's own first layers, and a trained attention layer before its output layer (arXiv 2404.18911)",
    Kangaroo,
    weights="required",
    parse_settings=lambda layers: {"exit_layer": int(layers)} if layers.isdecimal() else None,
    train="kangaroo",
)
