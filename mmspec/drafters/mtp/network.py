"""Layers of native multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), as transformers builds them.

A layer projects a token's embedding and the state before it, each normed, to a decoder layer of the target's kind; the
output predicts the token after that one. The first layer takes the target's last hidden states, each further one the
outputs of the layer before it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import MtpModel

from mmspec.cache.tree_cache import TreeCache
from mmspec.errors import UserError, explained
from mmspec.targets.attention import NAME, set_attention
from mmspec.targets.masks import SLIDING

_WITHOUT_CLASS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Model types whose checkpoints have a layer with full attention, which transformers has no configuration of."""

_ATTENTION = {"full_attention", SLIDING[0]}


def layer_config(decoder: PreTrainedConfig, source: str) -> PreTrainedConfig:
    """Configuration of the layers from the target's text configuration; ``num_hidden_layers`` is their number.

    Raises:
        UserError: there are none, or they are of a kind that cannot verify trees.
    """
    config = copy.deepcopy(decoder)
    if config.model_type in _WITHOUT_CLASS:
        for name, value in {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}.items():
            if (received := getattr(config, name, value)) != value:
                raise UserError(f"{source}: {name} must be {value} for its MTP layer: got {received!r}")
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    if not getattr(config, "num_mtp_layers", None):
        raise UserError(f"{source}: expected a model with MTP layers, received {config.model_type} without any")
    with explained(f"{source}: expected MTP layers that transformers builds", ValueError):
        layers: PreTrainedConfig = config.get_mtp_config()
    if other := sorted(set(getattr(layers, "layer_types", None) or ()) - _ATTENTION):
        raise UserError(
            f"{source}: MTP layers must be full or sliding-window attention: those of {config.model_type} are "
            f"{', '.join(other)}"
        )
    return layers


def build(config: PreTrainedConfig) -> tuple[Any, Any]:
    """A model of transformers with these layers (``MtpModel``), and one on the meta device whose classes it has."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    built = MtpModel(model, config.num_hidden_layers)
    set_attention(built, NAME if model._supports_sdpa else "eager")
    return built, model


class MTPNetwork(nn.Module):
    """The layers, with masks and caches of trees.

    Args:
        built: from ``build``.
    """

    def __init__(self, built: Any) -> None:
        super().__init__()
        self.config, self.count = built.config, len(built.layers)
        self.layers = built.layers
        self.norm = built.shared_post_norm if built.use_shared_post_norm else nn.Identity()
        self.attention: str = built.config._attn_implementation
        # Not a module of this one, whose dtype its frequencies must not take.
        self._rotary: list[Any] = []
        if built.rotary_emb is not None:
            with torch.device("cpu"):
                self._rotary.append(type(built.rotary_emb)(config=self.config))
        self._by_kind = any(isinstance(value, dict) for value in (self.config.rope_parameters or {}).values())

    def forward(
        self,
        number: int,
        embeds: Tensor,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: TreeCache,
        **options: Any,
    ) -> Tensor:
        """Outputs of a layer, (batch, nodes, hidden).

        Args:
            embeds: (batch, nodes, hidden), embeddings of tokens.
            states: (batch, nodes, hidden), at the tokens before.
            positions: (batch, nodes) or (axes, batch, nodes) int64.
            mask: (batch, 1, nodes, slots); None for causal attention of a prompt, or a node that attends to everything.
            **options: further arguments of the attention.
        """
        rotation = None
        for rotary in self._rotary:
            kind = {"layer_type": self.config.layer_types[number]} if self._by_kind else {}
            rotation = rotary.to(states.device)(states, position_ids=positions, **kind)
        outputs: Tensor = self.layers[number](
            embeds.to(states.dtype),
            states,
            position_embeddings=rotation,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            **options,
        )
        return self.norm(outputs)
