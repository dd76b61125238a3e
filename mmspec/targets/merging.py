"""Which decoders have layers that ``MergedLayer`` computes."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.targets.decoder_layer import PROJECTIONS, MergedLayer
from mmspec.targets.stack import Stack

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_GEMMA_PARTS = {*_PARTS, "pre_feedforward_layernorm", "post_feedforward_layernorm"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def merge_layers(decoder: nn.Module) -> None:
    """Replace a decoder's layers by ``MergedLayer`` where that computes the same; others stay as they are."""
    rotary = getattr(decoder, "rotary_emb", None)
    layers = getattr(decoder, "layers", None)
    if rotary is None or not isinstance(layers, nn.ModuleList) or not all(map(_has_parts, layers)):
        return
    if len({type(layer) for layer in layers}) == 1 and _computes_the_same(layers[0], rotary):
        for index in range(len(layers)):
            layers[index] = MergedLayer(layers[index], last=index == len(layers) - 1)
        Stack([layer for layer in layers if isinstance(layer, MergedLayer)])


def _has_parts(layer: Any) -> bool:
    """Whether a layer has the parts of a Llama's, Qwen3's or Gemma 3's and no others."""
    names = lambda module: {name for name, _ in module.named_children()}  # noqa: E731
    if names(layer) not in (_PARTS, _GEMMA_PARTS) or names(layer.mlp) - _MLP:
        return False
    projections = {*PROJECTIONS, "o_proj"}
    if names(layer.self_attn) not in (projections, projections | _HEAD_NORMS):
        return False
    if getattr(layer.self_attn, "attn_logit_softcapping", None):  # Gemma 2; small scores do not reveal it
        return False
    linear = [
        *(getattr(layer.self_attn, name) for name in projections),
        layer.mlp.gate_proj,
        layer.mlp.up_proj,
        layer.mlp.down_proj,
    ]
    own = [*layer.parameters(recurse=False), *layer.self_attn.parameters(recurse=False)]
    return all(type(part) is nn.Linear for part in linear) and not own


@torch.inference_mode()
def _computes_the_same(layer: Any, rotary: nn.Module) -> bool:
    """Whether ``MergedLayer`` reproduces a layer's output, on random hidden states at spread positions."""
    plain = copy.deepcopy(layer).float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, plain.mlp.down_proj.out_features, generator=generator)
    positions = torch.tensor([[0, 1, 2, 3, 4], [3, 5, 9, 20, 50]])
    takes_type = "layer_type" in signature(rotary.forward).parameters  # one of several sets of frequencies
    try:
        kind = {"layer_type": layer.self_attn.layer_type} if takes_type else {}
        options = {"position_ids": positions, "position_embeddings": rotary(x, position_ids=positions, **kind)}
        expected = plain(x, **options)
        merged = MergedLayer(plain)(x, **options)
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError):
        return False
    rotated_once = options["position_embeddings"][0].ndim == 3  # else by axis of an image
    return rotated_once and isinstance(expected, Tensor) and torch.allclose(merged, expected, atol=1e-4, rtol=1e-4)
