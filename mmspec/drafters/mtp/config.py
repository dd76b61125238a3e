"""Configuration of the network of native MTP layers."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.drafters.shape import RopeShape


@dataclass(frozen=True)
class MTPConfig(RopeShape):
    """Configuration of an ``MTPNetwork``: a ``RopeShape``. Heads that turn in part are in ``turning_order``."""
