"""Base classes of drafters that update their state with the accepted tokens and then grow a tree.

With static shapes (``kernels.static_shapes``), both run as one CUDA graph without host syncs, with the batch padded to
a power of two. Otherwise, pending steps share one forward pass, and ``StepPlan.least_gain`` may stop a tree early.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmspec import ops
from mmspec.cache.rows import RowTensor, batch_bucket, pad_rows
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.drafter import Drafter
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters import checkpoint, layouts
from mmspec.drafters.spec import TREE, TreeShape
from mmspec.ops.graphs import Graphed
from mmspec.ops.transfer import on_device

Inputs = tuple[Tensor, ...]
Counts = Callable[[], list[int]]
"""Returns the accepted tokens per row; the device-to-host copy happens when called."""

AHEAD = 1024
"""KV slots reserved after a prompt."""


class RowState(Protocol):
    """Interface of per-sequence state: ``RowTensor``, ``TreeCache`` or a ``VerifyRunner``."""

    @property
    def version(self) -> Hashable:
        """Changes whenever a buffer is reallocated."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""


class CapturedDrafter(Drafter):
    """Drafter that updates its state and grows a tree in one CUDA graph if shapes are static.

    A step's inputs are drafter-specific tensors, (batch, width, ...), and the number of accepted tokens, (batch,)
    int64, 0 for idle rows.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, static_shapes: bool = False) -> None:
        """Drop all rows and captured graphs."""
        self.rows, self.static_shapes = 0, static_shapes
        self._pending: list[tuple[Inputs, Counts]] = []  # inputs and accepted tokens per row of pending steps
        self._grow, self._update = Graphed(self._grown), Graphed(self._updated)

    @property
    @abstractmethod
    def parts(self) -> Sequence[RowState]:
        """All per-sequence state, for row selection and detection of reallocated buffers."""

    @property
    def drafts_ahead(self) -> bool:
        return self.static_shapes

    @property
    def limits(self) -> tuple[int, int]:
        """Maximum tree depth and number of drafted nodes, with static shapes."""
        return 16, 512

    @abstractmethod
    def update(self, *inputs: Tensor) -> None:
        """Update the state with a step's accepted tokens. Captured."""

    @abstractmethod
    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        """Grow a tree per row after ``token``, (batch,) int64. Captured."""

    def reserve(self, width: int) -> None:
        """Reserve buffers for ``width`` accepted tokens per row and a new tree."""

    def begin_idle(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> Sequence[CapturedDrafter]:
        self.begin(prompt, output, history)
        return [self]

    def advance(self, accepted: Counts) -> None:
        """Advance the host's row lengths after a captured ``update``."""

    def join(self, rows: int, static_shapes: bool) -> None:
        """Register new rows; the caller then appends their state to ``parts``."""
        if static_shapes != self.static_shapes:
            self.reset(static_shapes)
        self.rows += rows
        self._pending = [
            (tuple(pad_rows(x, self.rows) for x in inputs), partial(list, accepted() + [0] * rows))
            for inputs, accepted in self._pending
        ]

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            part.select(rows)
        pending, self._pending, self.rows = self._pending, [], len(rows)
        for inputs, before in pending:
            counts = before()
            if any(accepted := [counts[row] for row in rows]):
                kept = on_device(list(rows), inputs[0].device)
                self._pending.append((tuple(x[kept] for x in inputs), partial(list, accepted)))

    def queue(self, inputs: Inputs, verdict: Verdict) -> None:
        """Queue a step's inputs until the next ``propose``."""
        self._pending.append(((*inputs, verdict.length), verdict.accepted))

    @torch.inference_mode()
    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        if not self.static_shapes:
            inputs = self._merged()
            self.reserve(inputs[0].shape[1] if inputs else 0)
            if inputs:
                self.update(*inputs)
            return self.grow(token, plan)
        *earlier, (inputs, accepted) = self._pending or [((), list)]
        self._update_all(earlier)
        self._pending = []
        rows, (max_depth, max_nodes) = len(token), self.limits
        depth, nodes = min(max_depth, plan.depth), min(max_nodes, plan.nodes)
        token, *padded = self._padded((token, *inputs))
        self.reserve(inputs[0].shape[1] if inputs else 0)
        grown = self._grow(token, *padded, version=self._version, nodes=nodes, depth=depth, chain=plan.chain)
        if inputs:
            self.advance(accepted)
        tokens, parents, log_probs = (x[:rows] for x in grown)
        tree = TokenTree(tokens, parents, log_probs=log_probs, check=False)
        tree.max_depth = min(depth, tree.nodes - 1)
        return tree

    def _update_all(self, steps: list[tuple[Inputs, Counts]]) -> None:
        for inputs, accepted in steps:
            self.reserve(inputs[0].shape[1])
            self._update(*self._padded(inputs), version=self._version)
            self.advance(accepted)

    def _merged(self) -> Inputs:
        """Inputs of all pending steps, merged; empty if no step is pending."""
        steps, self._pending = self._pending, []
        read = [(inputs, accepted()) for inputs, accepted in steps]
        accepted = [sum(counts) for counts in zip(*(counts for _, counts in read), strict=True)]
        if not any(accepted):
            return ()
        if len(steps) == 1:
            merged = [x[:, : max(accepted)] for x in steps[0][0][:-1]]
        else:
            merged = [
                pad_sequence(
                    [torch.cat([x[at][row, : counts[row]] for x, counts in read]) for row in range(self.rows)],
                    batch_first=True,
                )
                for at in range(len(steps[0][0]) - 1)
            ]
        return *merged, torch.tensor(accepted, dtype=torch.long, device=merged[0].device)

    def _padded(self, inputs: Inputs) -> Inputs:
        return tuple(pad_rows(x, batch_bucket(self.rows)) for x in inputs)

    @property
    def _version(self) -> tuple[Hashable, ...]:
        return tuple(part.version for part in self.parts)

    def _grown(self, token: Tensor, *inputs: Tensor, nodes: int, depth: int, chain: bool) -> Inputs:
        """Captured body of ``propose``: update with a step, if given, and grow a tree (tokens, parents, log probs)."""
        if inputs:
            self.update(*inputs)
        tree = self.grow(token, StepPlan(nodes, depth, chain))
        assert tree.log_probs is not None
        return tree.tokens, tree.parents, tree.log_probs

    def _updated(self, *inputs: Tensor) -> Inputs:
        self.update(*inputs)
        return ()


def path_of(length: Tensor, width: int) -> Tensor:
    """Node indices of a chain's first ``length``, (batch,), nodes: (batch, width) int64, padded with -1."""
    step = torch.arange(width, device=length.device)
    return torch.where(step < length[:, None], step, -1)


def commit_chain(caches: Sequence[TreeCache], length: Tensor, width: int) -> None:
    """Commit the first ``length``, (batch,) int64, of the last ``width`` entries of each row in each cache."""
    if caches[0].static_shapes:
        path = path_of(length, width) if len(length) > 1 else None  # a single row needs no compaction
        for cache in caches:
            cache.commit_on_device(path) if path is not None else cache.advance_on_device(length)
        return
    path = path_of(length, width)
    rows = [list(range(accepted)) for accepted in length.tolist()]
    for cache in caches:
        cache.commit(path, rows)


def write_last(state: RowTensor, outputs: Tensor, length: Tensor) -> None:
    """Set each row of ``state``, (rows, n), to its last valid output.

    Args:
        outputs: (batch, width, n).
        length: (batch,) int64, valid outputs per row; a row with 0 keeps its state.
    """
    ops.write_last(state.data[: len(length)], outputs, length)


class TreeDrafter(CapturedDrafter):
    """Drafter with a network, which grows trees of a configured shape. ``verifier``: target that the network was
    trained for, see ``checkpoint.check_verifier``; None if unknown."""

    name: ClassVar[str]  # as registered
    learns: ClassVar[bool] = False
    usual_tree: ClassVar[TreeShape] = TreeShape(top_k=10, depth=6, total_tokens=59)
    verifier: dict[str, Any] | None = None

    def __init__(self, network: Any, **tree: int) -> None:
        shape = replace(self.usual_tree, **tree)
        self.network = network
        self.top_k, self.depth, self.total_tokens = shape.top_k, shape.depth, shape.total_tokens
        super().__init__()

    def attach(self, target: Target) -> None:
        if target is self._target:
            return  # captured graphs refer to the current weights
        if self.verifier is not None:
            checkpoint.check_verifier(self.verifier, target)
        probe = target.embed(torch.zeros(1, dtype=torch.long, device=target.device))
        self.place(target, probe)
        self._target = target
        self.reset()

    @abstractmethod
    def place(self, target: Target, probe: Tensor) -> None:
        """Move the network to the device and dtype of ``probe``, (1, hidden), an embedding of the target. Raises
        ``UserError``: the network does not fit the target."""

    @property
    def target(self) -> Target:
        assert self._target is not None, "attach comes first"
        return self._target

    @property
    def checks(self) -> str:
        trained = "the target that it was trained for, the number of training steps (too few?)"
        return f"{trained}, chat template, rotary positions, positions after images"

    @property
    def limits(self) -> tuple[int, int]:
        return self.depth, self.total_tokens

    @property
    def tree_size(self) -> int:
        return self.total_tokens

    def draft_chains(self, length: int) -> None:
        self.top_k, self.depth, self.total_tokens = 1, length, length


class TrainedDrafter(TreeDrafter):
    """``TreeDrafter`` with checkpoints of its own; published checkpoints have the layout of its name in ``LAYOUTS``.
    ``draft_ids``: (n,) int64, draft vocabulary; None is the target's whole vocabulary."""

    config_class: ClassVar[type[Any]]
    network_class: ClassVar[type[nn.Module]]

    def __init__(
        self, network: Any, draft_ids: Tensor | None = None, *, verifier: dict[str, Any] | None = None, **tree: int
    ) -> None:
        self.draft_ids, self.verifier = draft_ids, verifier
        super().__init__(network, **tree)

    @classmethod
    def from_checkpoint(cls, folder: Path, **changes: Any) -> Self:
        """Load a checkpoint of ``save`` or a published one. ``changes``: fields of the network's configuration that
        override the checkpoint."""
        tree: dict[str, int] = {}
        if cls.name in layouts.LAYOUTS and checkpoint.drafter_name(folder) is None:
            config, tensors, draft_ids, verifier = layouts.read(folder, cls)
        else:
            config, tensors, draft_ids, verifier, tree = checkpoint.read_network(folder, cls.config_class)
        network = checkpoint.load_network(cls.network_class, replace(config, **changes), tensors, folder)
        return cls(network, draft_ids, verifier=verifier, **tree)

    @classmethod
    def convert(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> layouts.Published:
        """Convert the contents of a published checkpoint's files; ``where`` is its name in messages."""
        return layouts.convert(config, tensors, cls, where)

    @property
    def checks(self) -> str:
        return "" if self.verifier is None else super().checks

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """Map draft-vocabulary indices to target tokens, (...) int64."""
        return drafted if self.draft_ids is None else self.draft_ids[drafted]

    def renewed(self, network: Any) -> Self:
        """A copy of this drafter with another network of the same shape, without rows and unattached."""
        fresh = copy.copy(self)
        fresh.network, fresh._target = network.eval().requires_grad_(False), None
        fresh.reset()
        return fresh

    def save(self, folder: Path, target: Any) -> None:
        """Write a drafter checkpoint for ``target``."""
        tensors = dict(self.network.state_dict())
        if self.draft_ids is not None:
            tensors["draft_ids"] = self.draft_ids
        settings = {name: getattr(self, name) for name in TREE}
        checkpoint.write(folder, self.name, {"network": asdict(self.network.config), **settings}, tensors, target)
