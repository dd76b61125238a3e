"""Network of MSD and FLASH (arXiv 2505.14260, 2505.12728): one decoder layer between an input projection and the
target's head.

It predicts the target's next hidden state, and with several slots the following ones. Embedding, final norm and head
are the target's and not part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.fields import Checked, Within
from mmspec.errors import UserError
from vision.drafters.latents import Images, Latents, compress, find_images

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class MSDConfig(Checked):
    """Configuration of an ``MSDNetwork``.

    Attributes:
        hidden_size: the target's hidden size.
        heads, kv_heads, head_dim: attention shape.
        mlp: intermediate size of the gated MLP.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of RMSNorm.
        input_norm: RMSNorm before the attention; used by published drafters for Qwen2-VL, but not for LLaVA.
        qkv_bias: bias on queries, keys and values.
        decoupled: visual positions take the raw visual feature (MSD); False fuses them with a hidden state, as text
            (EAGLE, arXiv 2401.15077).
        visual_states: separate projection of feature and hidden state at visual positions, which costs nothing per
            token. False is MSD as published.
        latents: latents per image (FLASH); 0 disables compression.
        span: maximum visual tokens per image: longer runs are split into several images; 0 never splits.
        slots: tokens drafted per pass of the layer (FLASH); 1 is MSD.
    """

    hidden_size: Annotated[int, Within(1, 2**16)]
    heads: Annotated[int, Within(1, 2**10)]
    kv_heads: Annotated[int, Within(1, 2**10)]
    head_dim: Annotated[int, Within(2, 2**12)]
    mlp: Annotated[int, Within(1, 2**18)]
    rope_theta: Annotated[float, Within(1, 1e12)] = 10000.0
    norm_eps: Annotated[float, Within(1e-12, 1)] = 1e-6
    input_norm: bool = False
    qkv_bias: bool = False
    decoupled: bool = True
    visual_states: bool = False
    latents: Annotated[int, Within(0, 2**12)] = 0
    span: Annotated[int, Within(0, 2**20)] = 0
    slots: Annotated[int, Within(1, 64)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise UserError(f"kv_heads must divide heads: got {self.kv_heads} for {self.heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even, as rotary positions turn pairs: got {self.head_dim}")

    @classmethod
    def like(cls, config: object, **changes: object) -> MSDConfig:
        """Configuration for a target's text configuration."""
        get = lambda name, default=None: getattr(config, name, None) or default  # noqa: E731
        heads = get("num_attention_heads")
        if heads is None:
            name = type(config).__name__
            raise UserError(f"the drafter requires a target with attention: {name} has no num_attention_heads")
        rope = get("rope_parameters", {})
        fields = {
            "hidden_size": get("hidden_size"),
            "heads": heads,
            "kv_heads": get("num_key_value_heads", heads),
            "head_dim": get("head_dim", get("hidden_size") // heads),
            "mlp": get("intermediate_size"),
            "rope_theta": rope.get("rope_theta", 10000.0),
            "norm_eps": get("rms_norm_eps", 1e-6),
        }
        return cls(**(fields | changes))


class Norm(nn.RMSNorm):
    """RMSNorm that computes in float32 under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.dtype == self.weight.dtype else x.float())


class Cell(nn.Module):
    """Recurrent cell between the slots of a pass: a carried state, (..., hidden), is updated by each drafted token and
    predicts the next hidden state."""

    def __init__(self, config: MSDConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.first = nn.Linear(2 * width, width)
        self.into = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, width, bias=False)
        self.guess = nn.Linear(width, width)
        # LayerNorm is one kernel; RMSNorm is several on a CPU, half of the cell's time.
        self.norm = nn.LayerNorm(width, config.norm_eps)

    def begin(self, output: Tensor) -> Tensor:
        """Initial carried state from the layer's output: (..., 2 * hidden) -> (..., hidden)."""
        return self.norm(self.first(output))

    def forward(self, embeds: Tensor, carried: Tensor) -> Tensor:
        """Carried state of the next slot, given the embeddings of tokens drafted from ``carried``."""
        return self.carry(self.into(torch.cat([embeds, carried], dim=-1)), carried)

    def carry(self, read: Tensor, carried: Tensor) -> Tensor:
        """``forward`` with the output of ``into``."""
        return self.norm(carried + self.out(F.silu(read)))


class MSDNetwork(nn.Module):
    """See the module. Parameters are (out, in); ``qkv`` stacks queries, keys and values, ``gate_up`` gate and up."""

    def __init__(self, config: MSDConfig) -> None:
        super().__init__()
        self.config = config
        width, inner = config.hidden_size, config.heads * config.head_dim
        self.fc = nn.Linear(2 * width, width)
        self.qkv = nn.Linear(width, inner + 2 * config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(inner, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, width, bias=False)
        self.input_norm = Norm(width, config.norm_eps) if config.input_norm else nn.Identity()
        self.post_norm = Norm(width, config.norm_eps)
        if config.decoupled and config.visual_states:
            self.visual_fc = nn.Linear(2 * width, width)
        if config.latents:
            self.latents = Latents(config.latents, width)
        if config.slots > 1:
            self.cell = Cell(config)

    def combine(self, embeds: Tensor, hidden: Tensor, visual: Tensor | None) -> Tensor:
        """Layer inputs, with decoupled text and visual positions (arXiv 2505.14260, section 3.2).

        Text positions fuse the next token's embedding with the previous hidden state; visual positions are the raw
        visual feature, or have their own projection.

        Args:
            embeds: (batch, nodes, hidden) input embeddings of the target, one position ahead of ``hidden``.
            hidden: (batch, nodes, hidden) last hidden states, of the target or predicted.
            visual: (batch, nodes) bool, which of ``embeds`` are visual features; None if all are text.
        """
        both = torch.cat([embeds, hidden], dim=-1)
        fused = self.fc(both)
        if visual is None or not self.config.decoupled:
            return fused
        apart = self.visual_fc(both) if self.config.visual_states else embeds
        return torch.where(visual[..., None], apart, fused)

    def images(self, visual: Tensor) -> Images | None:
        """Images to compress among ``visual`` entries, (batch, entries) bool; None if there are none."""
        config = self.config
        return find_images(visual, config.latents, config.span) if config.latents else None

    def with_latents(self, embeds: Tensor, hidden: Tensor, images: Images) -> tuple[Tensor, Tensor]:
        """``embeds`` and ``hidden``, see ``combine``, with latents at their spots; no entry is dropped yet."""
        weights = self.latents(hidden, images)
        return compress(embeds, weights, images), compress(hidden, weights, images)

    def begin(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Split the layer's output into predictions and the first slots' carried states (empty for one slot)."""
        width = self.config.hidden_size
        return output[..., :width], self.cell.begin(output) if self.config.slots > 1 else output[..., width:]

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Predict the next hidden states.

        Args:
            x: (batch, nodes, hidden) from ``combine``.
            rotation: cosines and sines from ``Rotary``, broadcastable to (batch, nodes, heads, head_dim).
            attend: attention function of queries, keys and values, (batch, heads or kv_heads, nodes, head_dim); owns
                cache and mask.

        Returns:
            (batch, nodes, hidden), or with several slots the input of ``begin``, (batch, nodes, 2 * hidden).
        """
        config = self.config
        batch, nodes, _ = x.shape
        turned = config.heads + config.kv_heads
        qkv = self.qkv(self.input_norm(x)).view(batch, nodes, turned + config.kv_heads, config.head_dim)
        qk = rotate(qkv[:, :, :turned], rotation)
        q, k = qk[:, :, : config.heads].transpose(1, 2), qk[:, :, config.heads :].transpose(1, 2)
        read = attend(q, k, qkv[:, :, turned:].transpose(1, 2))
        x = x + self.out(read.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        guess = x + self.down(F.silu(gate) * up)
        return guess if config.slots == 1 else torch.cat([guess, x], dim=-1)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves paired as in Llama: (batch, nodes, heads, head_dim)."""
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Rotary:
    """Cosines and signed sines by position, computed in float32 and grown when needed."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim, self.theta = head_dim, theta
        self._tables: Rotation | None = None
        self.version = object()  # replaced whenever the tables are recomputed

    def reserve(self, length: int, like: Tensor) -> None:
        """Compute tables for positions below ``length``, in the dtype and on the device of ``like``."""
        have = self._tables[0] if self._tables else None
        if have is not None and have.shape[0] >= length and (have.dtype, have.device) == (like.dtype, like.device):
            return
        length = 1 << (length - 1).bit_length()
        self.version = object()
        half = torch.arange(0, self.head_dim, 2, device=like.device, dtype=torch.float32) / self.head_dim
        angle = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), self.theta**-half)
        cos, sin = angle.cos(), angle.sin()
        # The sign of the rotated half goes into the sine, which saves a negation per call.
        tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        self._tables = tables[0].to(like.dtype)[:, None], tables[1].to(like.dtype)[:, None]

    def __call__(self, positions: Tensor | slice) -> Rotation:
        """Rotation at positions, a slice or (...) int64: cosines and sines, (..., 1, head_dim) each."""
        assert self._tables is not None, "reserve comes first"
        return self._tables[0][positions], self._tables[1][positions]
