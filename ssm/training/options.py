"""Options of ``mmspec train mamba``; see ``mmspec.training.options``."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.checks import again
from mmspec.ssm.drafters.mamba import MambaConfig
from mmspec.training.options import TreeOptions


@dataclass(frozen=True, kw_only=True)
class MambaOptions(TreeOptions):
    """The options: those of the run, and of the network."""

    hidden_size: int = again(MambaConfig, "hidden_size", "Width.")
    layers: int = again(MambaConfig, "layers", "Mamba-2 layers.")
    heads: int = again(MambaConfig, "heads", "Heads per layer.")
    head_dim: int = again(MambaConfig, "head_dim", "Channels per head.")
    state: int = again(MambaConfig, "state", "State size per channel.")
    window: int = again(MambaConfig, "window", "Width of its convolution.")
