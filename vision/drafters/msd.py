"""Hidden-state drafters: MSD, which decouples text and visual tokens (arXiv 2505.14260), and FLASH, with compressed
images and semi-autoregressive drafting (arXiv 2505.12728).

A step appends the accepted tokens with the target's hidden states to the drafter's KV cache, then grows a dynamic tree
(EAGLE-2, arXiv 2406.16858) on predicted hidden states. One class runs all networks; ``MSDConfig`` enables compression
and semi-autoregression separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.core.target import Prompt, Step, Target
from mmspec.drafters import checkpoint
from mmspec.drafters.checkpoint import TREE, TreeShape
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.transfer import on_device
from mmspec.vision.drafters import published
from mmspec.vision.drafters.hidden_state import AHEAD, HiddenStateDrafter
from mmspec.vision.drafters.latents import Images, packing, take
from mmspec.vision.drafters.layer import Rotary, rotary_frequencies
from mmspec.vision.drafters.levels import NativeCell, TokenLinear
from mmspec.vision.drafters.network import MSDConfig, MSDNetwork


@dataclass(frozen=True)
class _Settings(TreeShape):
    """Contents of ``config.json``."""

    network: MSDConfig


class MSD(HiddenStateDrafter):
    """MSD drafter, for any target that provides hidden states and the mask of visual positions.

    Args:
        network: the trained network, moved to the target's device and dtype.
        draft_ids: (n,) int64, draft vocabulary, for a smaller head; None is the full one.
        top_k, depth, total_tokens, verifier: see ``HiddenStateDrafter``.
    """

    layouts: ClassVar[tuple[str, ...]] = ("msd", *published.REFUSED)  # of published checkpoints
    decoupled: ClassVar[bool | None] = True  # setting of published checkpoints; None is theirs
    name: ClassVar[str] = "msd"
    network_class: ClassVar[type[MSDNetwork]] = MSDNetwork

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
        config = network.config
        if config.rank and depth > config.slots:
            raise UserError(f"depth must be at most the {config.slots} slots of a pass, with rank: got {depth}")
        if config.head and draft_ids is not None and len(draft_ids) != config.head:
            raise UserError(f"head must have a row per draft token, {len(draft_ids)}: got {config.head}")
        rotary = Rotary(rotary_frequencies(config.head_dim, config.rope_theta))
        tree = {"top_k": top_k, "depth": depth, "total_tokens": total_tokens}
        super().__init__(network, rotary, 1, draft_ids, **tree, verifier=verifier)
        self.features = ("last", *config.reads)

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder contains a published drafter of this kind, or one known to be unsupported."""
        return published.recognise(folder) in cls.layouts

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Self:
        """Load a checkpoint of ``save`` or a published one; raises ``UserError`` if it is invalid."""
        if checkpoint.drafter_name(folder) is None:
            shape, tensors, found = published.read_published(folder, cls.decoupled)
            if found["layout"] not in cls.layouts and cls.decoupled is None:
                raise UserError(f"{folder}: expected the tensors of a {cls.name} drafter, received {found['layout']}")
            drafter = cls(network_from(shape, tensors, folder, cls.network_class))
            drafter.published = found["verifier"]
            return drafter
        settings, verifier, tensors = checkpoint.read(folder, _Settings)
        draft_ids = checkpoint.take_draft_ids(tensors, verifier["vocab_size"], folder)
        tree = {name: getattr(settings, name) for name in TREE}
        network = network_from(settings.network, tensors, folder, cls.network_class)
        return cls(network, draft_ids, **tree, verifier=verifier)

    def scoring(self, target: Target, probe: Tensor) -> Callable[[Tensor], Tensor]:
        layers = getattr(getattr(target, "config", None), "num_hidden_layers", 0)
        if max(self.network.config.reads, default=0) >= layers > 0:
            raise UserError(f"reads must name layers of the target, below {layers}: got {self.network.config.reads}")
        if self.published is not None and self.published["vocab_size"] < target.head(probe).shape[-1]:
            self.draft_ids = torch.arange(self.published["vocab_size"], device=probe.device)
        self.fuse = TokenLinear(self.network.fc, target.embed, self.draft_ids)
        if self.slots > 1:
            self.into = TokenLinear(self.network.cell.into, target.embed, self.draft_ids)
        head = target.head if self.draft_ids is None else target.narrow_head(self.draft_ids)
        self.native = NativeCell.of(self.network, self.into, head) if self.slots > 1 else None
        return head

    @property
    def slots(self) -> int:
        return self.network.config.slots

    def states(self, step: Step) -> Tensor:
        read = [step.features[name] for name in self.features]
        return torch.cat(read, dim=-1) if len(read) > 1 else read[0]

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        return self.network.combine(self.target.embed(tokens), self.network.states(states), None)

    def adjusted(self, tokens: Tensor, log_probs: Tensor, predicted: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        if not self.network.config.confidence:
            return tokens, log_probs
        together = self.network.coverage(predicted, carried.to(predicted.dtype))
        return tokens, log_probs.log_softmax(-1) + F.logsigmoid(together.float())

    def prompt_states(self, embeds: Tensor, hidden: Tensor, images: Images | None) -> tuple[Tensor, Tensor]:
        """Embeddings and hidden states of a prompt's entries, (batch, entries, hidden) each, with its latents."""
        return (embeds, hidden) if images is None else self.network.with_latents(embeds, hidden, images)

    @torch.inference_mode()
    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        target, network = self.target, self.network
        hidden = network.states(self.states(step))
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
        self.join(batch, kernels.fixed_shapes(hidden.device))
        images = None if visual is None else network.images(visual)
        embeds, hidden = self.prompt_states(embeds, hidden, images)
        kept = None if visual is None else network.kept(visual, images)
        if kept is not None:
            assert visual is not None
            order, mask = packing(kept if mask is None else kept & mask, left=True)
            at = order if isinstance(at, slice) else at.gather(1, order)
            embeds, hidden = take(embeds, order), take(hidden, order)
            visual = visual.gather(1, order)
            mask = None if bool(mask.all()) else mask
        x = network.combine(embeds, hidden, visual)
        self._rotary.reserve(length + AHEAD, x)
        self.start(x, self._rotary(at), mask, position, history)


def network_from(
    shape: MSDConfig, tensors: dict[str, Tensor], folder: Path, kind: type[MSDNetwork] = MSDNetwork
) -> MSDNetwork:
    """Build a network of class ``kind`` from its tensors.

    Raises:
        UserError: a tensor is missing, unexpected or of the wrong shape.
    """
    with torch.device("meta"):
        network = kind(shape)
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
