"""Hidden-state drafters: MSD, which decouples text and visual tokens (arXiv 2505.14260), and FLASH, with compressed
images and semi-autoregressive drafting (arXiv 2505.12728).

A step appends the accepted tokens with the target's hidden states to the drafter's KV cache, then grows a dynamic tree
(EAGLE-2, arXiv 2406.16858) on predicted hidden states. One class runs all networks; ``MSDConfig`` enables compression
and semi-autoregression separately.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec import ops
from mmspec.cache.rows import RowTensor
from mmspec.cache.tree_cache import TreeCache
from mmspec.drafters import checkpoint
from mmspec.drafters.captured import CapturedDrafter, RowState, path_of, write_last
from mmspec.drafters.checkpoint import TREE, TreeShape
from mmspec.drafters.growth import grow_tree
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.transfer import on_device
from mmspec.quantisation.packing import pack_drafter
from mmspec.speculation.budget import Budget
from mmspec.speculation.tree import TokenTree
from mmspec.speculation.verify import Verdict
from mmspec.targets.target import Feature, Prompt, Step, Target
from vision.drafters import published
from vision.drafters.latents import packing, take
from vision.drafters.levels import Levels, TokenLinear
from vision.drafters.network import MSDConfig, MSDNetwork, Rotary, Rotation

_AHEAD = 1024
"""KV slots reserved after a prompt."""


@dataclass(frozen=True)
class _Settings(TreeShape):
    """Contents of ``config.json``."""

    network: MSDConfig


class MSD(CapturedDrafter):
    """MSD drafter, for any target that provides hidden states and the mask of visual positions.

    Args:
        network: the trained network, moved to the target's device and dtype.
        draft_ids: (n,) int64, draft vocabulary, for a smaller head; None is the full one.
        top_k: nodes extended per level, and children per node.
        depth: maximum tree depth.
        total_tokens: maximum number of drafted nodes.
        verifier: the target that it was trained for, see ``checkpoint.Verifier``.
    """

    layouts: ClassVar[tuple[str, ...]] = ("msd", "vispec", "eagle3")  # of published checkpoints
    decoupled: ClassVar[bool] = True  # setting of published checkpoints
    name: ClassVar[str] = "msd"  # as registered
    learns: ClassVar[bool] = False
    features: ClassVar[tuple[Feature, ...]] = ("last",)
    published: dict[str, Any] | None = None  # target sizes of a published checkpoint

    def __init__(
        self,
        network: MSDNetwork,
        draft_ids: Tensor | None = None,
        *,
        top_k: int = 10,
        depth: int = 6,
        total_tokens: int = 59,
        verifier: dict[str, Any] | None = None,
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.draft_ids = draft_ids
        TreeShape(top_k, depth, total_tokens)
        self.top_k, self.depth, self.total_tokens = top_k, depth, total_tokens
        self.verifier = verifier
        self._rotary = Rotary(network.config.head_dim, network.config.rope_theta)
        self._target: Target | None = None
        self._scores: Callable[[Tensor], Tensor] | None = None
        super().__init__()

    def reset(self, static: bool = False) -> None:
        super().reset(static)
        self.cache = TreeCache(1, in_place=static)
        self._output = RowTensor(static)  # (rows, hidden or 2 * hidden), at each row's last entry
        self._position = RowTensor(static)  # (rows,) int64, of the next entry
        self._history: list[list[int]] = []

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder contains a published drafter of this kind, or one known to be unsupported."""
        return published.recognise(folder) in cls.layouts

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Self:
        """Load a checkpoint of ``save`` or a published one; raises ``UserError`` if it is invalid."""
        if checkpoint.drafter_name(folder) is None:
            shape, tensors, found = published.read_published(folder, cls.decoupled)
            drafter = cls(network_from(shape, tensors, folder))
            drafter.published = found["verifier"]
            return drafter
        settings, verifier, tensors = checkpoint.read(folder, _Settings)
        draft_ids = checkpoint.take_draft_ids(tensors, verifier["vocab_size"], folder)
        tree = {name: getattr(settings, name) for name in TREE}
        return cls(network_from(settings.network, tensors, folder), draft_ids, **tree, verifier=verifier)

    def save(self, folder: Path, target: Any) -> None:
        """Write a drafter checkpoint for ``target``."""
        tensors = dict(self.network.state_dict())
        if self.draft_ids is not None:
            tensors["draft_ids"] = self.draft_ids
        settings = {name: getattr(self, name) for name in TREE}
        checkpoint.write(folder, self.name, {"network": asdict(self.network.config), **settings}, tensors, target)

    def attach(self, target: Target) -> None:
        if target is self._target:
            return  # captured graphs refer to the current weights
        if self.verifier is not None:
            checkpoint.check_verifier(self.verifier, target)
        if self.published is not None:
            published.check_target(self.published, target)
        probe = target.embed(torch.zeros(1, dtype=torch.long, device=target.device))
        width = self.network.config.hidden_size
        if probe.shape[-1] != width:
            raise UserError(
                f"{self.name} must have the target's hidden size {probe.shape[-1]}: the drafter has {width}"
            )
        pack_drafter(self.network, probe)
        if self.published is not None and self.published["vocab_size"] < target.head(probe).shape[-1]:
            self.draft_ids = torch.arange(self.published["vocab_size"])
        self._target = target
        self.reset()
        self._scores = target.head if self.draft_ids is None else target.narrow_head(self.draft_ids)
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(probe.device)
        with torch.inference_mode():
            self.fuse = TokenLinear(self.network.fc, target.embed, self.draft_ids)
            if self.network.config.slots > 1:
                self.into = TokenLinear(self.network.cell.into, target.embed, self.draft_ids)

    # ------------------------------------------------------------------ rows

    @property
    def parts(self) -> tuple[RowState, ...]:
        return self.cache, self._output, self._position

    @torch.inference_mode()
    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        target, network, hidden = self.target, self.network, step.features["last"]
        batch, length = prompt.input_ids.shape
        mask = None if prompt.attention_mask is None else prompt.attention_mask.bool()
        position = torch.full((batch,), length, device=hidden.device) if mask is None else mask.sum(1)
        first = on_device([[row[-1]] for row in history], hidden.device)
        fed = target.embed(prompt.input_ids) if step.embeds is None else step.embeds  # None for text
        embeds = torch.cat([fed[:, 1:], target.embed(first)], dim=1)
        visual = None if step.visual is None else F.pad(step.visual[:, 1:], (0, 1))
        at: slice | Tensor = slice(0, length) if mask is None else (mask.long().cumsum(1) - 1).clamp(min=0)
        if visual is not None and mask is not None:
            visual = visual & mask  # an image at the start of a row has no entry for its first token
        images = None if visual is None else network.images(visual)
        if images is not None:
            assert visual is not None
            kept = images.kept(visual)
            order, mask = packing(kept if mask is None else kept & mask, left=True)
            at = order if isinstance(at, slice) else at.gather(1, order)
            embeds, hidden = (take(x, order) for x in network.with_latents(embeds, hidden, images))
            visual = visual.gather(1, order)
            mask = None if bool(mask.all()) else mask
        self.join(batch, kernels.fixed_shapes(hidden.device))
        x = network.combine(embeds, hidden, visual)
        self._rotary.reserve(length + _AHEAD, x)
        entries = x.shape[1]
        allowed = None
        if mask is not None:
            allowed = mask[:, None, None] & torch.ones(entries, entries, device=x.device).tril().bool()
            # Padding attends to itself, so that no row of the mask is empty.
            allowed = allowed | torch.eye(entries, dtype=torch.bool, device=x.device)
        alone = not (self.static or self.cache.rows)
        cache = TreeCache(1, reserve=entries + (_AHEAD if alone else 1))
        outputs = self.forward(x, self._rotary(at), allowed, cache)
        cache.commit_prompt(entries, mask, batch)
        if alone:
            self.cache = cache
        else:
            self.cache.append(cache, entries + _AHEAD)
        self._output.append(outputs[:, -1])
        self._position.append(position)
        self._history += history

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._history = [self._history[row] for row in rows]

    # ------------------------------------------------------------------ steps

    @property
    def limits(self) -> tuple[int, int]:
        return self.depth, self.total_tokens

    @property
    def _version(self) -> tuple[Hashable, ...]:
        return *super()._version, self._rotary.version

    def reserve(self, width: int) -> None:
        self.cache.reserve_nodes(width + self.top_k * self.network.config.slots * (self.depth + 1))
        self._rotary.reserve(max(map(len, self._history)) + self.depth, self.network.fc.weight)

    def advance(self, accepted: list[int]) -> None:
        self.cache.advance(accepted)

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """Queue the accepted tokens and the target's hidden states at their parents."""
        hidden, path = step.features["last"], verdict.path.clamp(min=0)
        self.queue((verdict.tokens, take(hidden, path)), verdict)

    def absorb(self, tokens: Tensor, states: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Append accepted tokens, (batch, width), with the target's previous hidden states, (batch, width, hidden)."""
        self.cache.offset = 0  # reset after a failed capture
        batch, width = tokens.shape
        x = self.network.combine(self.target.embed(tokens), states, None)
        chain = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril().expand(batch, -1, -1)
        outputs = self.forward(x, self.rotation(batch, width), self.allowed(chain), self.cache)
        if self.static:
            self.cache.commit_on_device(path_of(length, width))
        else:
            self.cache.commit(path_of(length, width), [list(range(count)) for count in length.tolist()])
        self._position.data[:batch] += length
        write_last(self._output, outputs, length)

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        self.cache.offset = 0
        predicted, carried = self.network.begin(self._output.data[: len(token)])
        first = self.children(predicted)
        levels = Levels(self, predicted, carried)
        tree = grow_tree(token, first, levels.extend, budget, self.top_k, depth=self.depth, nodes=self.total_tokens)
        self.cache.offset = 0
        if self.draft_ids is not None:
            tree.tokens[:, 1:] = self.draft_ids[tree.tokens[:, 1:]]
        return tree

    def rotation(self, batch: int, count: int) -> Rotation:
        """Rotation of the next ``count`` positions of each row, (batch, count, 1, head_dim) each."""
        step = torch.arange(count, device=self._position.data.device)
        return self._rotary(self._position.data[:batch, None] + step)

    def allowed(self, reach: Tensor) -> Tensor:
        """Attention mask, (batch, 1, nodes, slots) bool: ``reach``, after the prefix unless shapes are static."""
        cache = self.cache
        if self.static:
            return reach[:, None]
        batch, nodes = reach.shape[:2]
        prefix = cache.attended[:, None, :] if cache.padded else reach.new_ones(1, 1, 1)
        return torch.cat([prefix.expand(batch, nodes, cache.length), reach], dim=-1)[:, None]

    def forward(self, x: Tensor, rotation: Rotation, allowed: Tensor | None, cache: TreeCache) -> Tensor:
        """Run the network on new entries and write them to the cache.

        Args:
            x: (batch, nodes, hidden), inputs.
            rotation: rotation of their positions.
            allowed: attention mask, see ``allowed``; None for a prompt without padding.
            cache: the KV cache.

        Returns:
            (batch, nodes, hidden or 2 * hidden).
        """
        layer: Any = cache.layers[0]
        if cache.in_place:
            cache.set_write_slots(x.shape[1])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = layer.update(k, v)
            if cache.in_place:
                assert cache.bounds is not None
                assert allowed is not None
                bounds = cache.bounds.first(len(q))
                read = ops.tree_attention(q, keys, values, bounds.lengths, allowed[:, 0], start=bounds.start)
                return read.transpose(1, 2)
            return F.scaled_dot_product_attention(q, keys, values, allowed, is_causal=allowed is None, enable_gqa=True)

        return self.network(x, rotation, attend)

    def children(self, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k draft-vocabulary indices and log probabilities, (..., top_k) each, from predicted states,
        (..., hidden)."""
        assert self._scores is not None, "attach comes first"
        return ops.top_log_probs(self._scores(predicted), self.top_k)

    @property
    def target(self) -> Target:
        """The attached target."""
        assert self._target is not None, "attach comes first"
        return self._target


def network_from(shape: MSDConfig, tensors: dict[str, Tensor], folder: Path) -> MSDNetwork:
    """Build a network from its tensors.

    Raises:
        UserError: a tensor is missing, unexpected or of the wrong shape.
    """
    with torch.device("meta"):
        network = MSDNetwork(shape)
    checkpoint.load_exactly(network, tensors, folder)
    return network


class Eagle(MSD):
    """EAGLE drafter (arXiv 2401.15077): MSD without decoupling, visual positions are fused as text is."""

    layouts = ("eagle",)
    decoupled = False

    def __init__(self, network: MSDNetwork, draft_ids: Tensor | None = None, **settings: Any) -> None:
        network.config = replace(network.config, decoupled=False)
        super().__init__(network, draft_ids, **settings)


class Flash(MSD):
    """FLASH drafter (arXiv 2505.12728): MSD with latents or several slots."""

    layouts = ()
    name = "flash"
