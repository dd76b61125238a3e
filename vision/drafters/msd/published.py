"""Published MSD drafters (arXiv 2505.14260), such as those for LLaVA-1.5 and Qwen2-VL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmspec.drafters.eagle.published import Layout
from mmspec.vision.drafters.msd.config import MSDConfig
from mmspec.vision.drafters.msd.network import MSDNetwork


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    # Drafters for Qwen2-VL are full Qwen2-VL layers; all others lack the first norm.
    whole = {"input_norm": True, "qkv_bias": True} if config.get("model_type") == "qwen2_vl" else {}
    return {"decoupled": True, **whole}


LAYOUT = Layout("msd", MSDConfig, MSDNetwork, _settings, embedding=True)
