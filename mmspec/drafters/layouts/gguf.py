"""EAGLE-3 heads in GGUF files of llama.cpp's converter (architecture ``eagle3``), as a published configuration and
tensors of the layout ``eagle3``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.errors import explained, shown
from mmspec.targets.gguf_file import GGUFFile
from mmspec.targets.gguf_keys import ATTENTION, MLP, OUTER, SIZES, Keys, decoder

_FIELDS = SIZES | {name: name for name in ("vocab_size", "target_hidden_size")}
_LAYER = ATTENTION | MLP | {"attn_norm_2": "hidden_norm"}
_NAMES = {name: str(place).removeprefix("model.") for name, place in OUTER.items()}
_NAMES |= {"fc": "fc", "enc.output_norm": "input_norm"}
_NAMES |= {f"blk.0.{name}": f"midlayer.{place}" for name, place in _LAYER.items()}


def read_eagle3(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of ``config.json`` and tensors.

    Raises:
        UserError: another architecture, a missing or unknown key, or a tensor that no EAGLE-3 head has, such as
            factors of rotary frequencies.
    """
    keys = Keys(file)
    with explained(f"cannot load drafter {str(file.path)!r}", ValueError):
        if (name := file.architecture()) != "eagle3":
            raise ValueError(f"expected the architecture eagle3, found {name!r}")
        config = {field: keys.uniform(key) for key, field in _FIELDS.items()} | decoder(keys)
        config["eagle_aux_hidden_state_layer_ids"] = keys("target_layers")
        config |= {switch: keys(switch, False) for switch in ("norm_before_residual", "norm_before_fc")}
        for key, value in keys.unread().items():
            raise ValueError(f"expected keys of eagle3 heads, found {name}.{key} = {shown(value)}, which is not known")
        tensors = {}
        for stored, tensor in file.tensors.items():
            if stored == "d2t":  # tokens, not offsets
                tokens = tensor.data().view(torch.int64)
                tensors[stored] = tokens - torch.arange(len(tokens))
            elif (place := _NAMES.get(stored.removesuffix(".weight"))) is None:
                raise ValueError(f"expected tensors of eagle3 heads, found {stored}, which has no place in it")
            else:
                tensors[f"{place}.weight"] = tensor[...]
    kind = {"architectures": ["LlamaForCausalLMEagle3"], "rope_is_neox_style": False}
    head = tensors.get("lm_head.weight")
    return {**config, **kind, "draft_vocab_size": config["vocab_size"] if head is None else len(head)}, tensors
