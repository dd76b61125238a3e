"""Mamba-2 drafter: declaration and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.checks import Checked, option, required, whole, within
from mmspec.drafters.spec import DrafterSpec


@dataclass(frozen=True)
class MambaConfig(Checked):
    """Configuration of a ``MambaNetwork``.

    Attributes:
        vocab_size: the target's vocabulary size.
        hidden_size: width of the residual stream.
        layers: number of layers.
        heads, head_dim: shape of the scan; their product is the inner width.
        state: state size per channel.
        window: kernel size of the convolution.
        norm_eps: epsilon of all norms.
    """

    vocab_size: int = required(whole(1, 2**24))
    hidden_size: int = option(128, whole(1, 2**16))
    layers: int = option(1, whole(1, 2**8))
    heads: int = option(8, whole(1, 2**10))
    head_dim: int = option(32, whole(1, 2**12))
    state: int = option(32, whole(1, 2**12))
    window: int = option(4, whole(1, 2**8))
    norm_eps: float = option(1e-5, within(1e-12, 1))

    @property
    def inner(self) -> int:
        """Number of channels of the scan."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: x, B and C."""
        return self.inner + 2 * self.state


SPEC = DrafterSpec(
    "mamba",
    "Mamba",
    "a small Mamba-2 language model of the target's vocabulary, distilled from it (Mamba-2: arXiv 2405.21060)",
    "mmspec.ssm.drafters.mamba.drafter:Mamba",
    weights="required",
    train="mamba",
)
