"""Options of ``mmspec train mamba``; see ``mmspec.training.options``."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.checks import inherited
from mmspec.ssm.drafters.mamba import MambaConfig
from mmspec.training.options import TreeOptions


@dataclass(frozen=True, kw_only=True)
class MambaOptions(TreeOptions):
    """The options: those of the run, and of the network."""

    hidden_size: int = inherited(MambaConfig, "hidden_size", "Width.")
    layers: int = inherited(MambaConfig, "layers", "Mamba-2 layers.")
    heads: int = inherited(MambaConfig, "heads", "Heads per layer.")
    head_dim: int = inherited(MambaConfig, "head_dim", "Channels per head.")
    state: int = inherited(MambaConfig, "state", "State size per channel.")
    window: int = inherited(MambaConfig, "window", "Width of its convolution.")
