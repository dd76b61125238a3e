"""Drafters in GGUF files of llama.cpp's converter, as configurations and tensors of the layouts of the same names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.errors import explained, shown
from mmspec.targets.gguf_file import GGUFFile
from mmspec.targets.gguf_keys import ATTENTION, HEAD_NORMS, MLP, OUTER, SIZES, Keys, decoder, head_size, sliding

ARCHITECTURES = {"dflash": "hidden_norm", "eagle3": "input_norm"}
"""Names of the architectures and of the norm of their inputs."""

_LAYER = ATTENTION | HEAD_NORMS | MLP | {"attn_norm_2": "hidden_norm"}
_OUTER = {name: str(place).removeprefix("model.") for name, place in OUTER.items()} | {"fc": "fc"}
_OUTER |= {f"markov_{one}": f"markov_head.markov_{one}" for one in ("w1", "w2")} | {"conf_proj": "confidence_head.proj"}
_OUTER["selector_hidden"] = "candidate_selector.hidden_projection"
_OUTER |= {f"selector_{one}.weight": f"candidate_selector.{one}_codebook" for one in ("predecessor", "successor")}
for _theirs, _ours in (("attn_conv", "attention_conv"), ("ffn_conv", "mlp_conv")):
    _LAYER |= {f"{_theirs}_base": f"{_ours}.base_kernel", f"{_theirs}_proj": f"{_ours}.kernel_projection"}


def read(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of ``config.json`` and tensors. Raises ``UserError``: another architecture, a missing or unknown key, or
    an unknown tensor, such as rotary factors."""
    keys = Keys(file)
    with explained(f"cannot load drafter {str(file.path)!r}", ValueError):
        if (name := file.architecture()) not in ARCHITECTURES:
            raise ValueError(f"expected the architecture {' or '.join(ARCHITECTURES)}, found {name!r}")
        sizes = {field: keys.uniform(key) for key, field in SIZES.items() if key != "context_length" or key in keys}
        fields = decoder(keys)
        if fields["rope_parameters"]["partial_rotary_factor"] == 1.0:
            del fields["rope_parameters"]["partial_rotary_factor"]
        config = {**sizes, **fields, **(_eagle3(keys) if name == "eagle3" else _dflash(keys, file))}
        for key, value in keys.unread().items():
            raise ValueError(
                f"expected keys of {name} drafters, found {name}.{key} = {shown(value)}, which is not known"
            )
        places = {**_OUTER, "enc.output_norm": ARCHITECTURES[name]}
        for layer in range(config["num_hidden_layers"]):
            places |= {f"blk.{layer}.{one}": f"layers.{layer}.{place}" for one, place in _LAYER.items()}
        tensors = {}
        for stored, tensor in file.tensors.items():
            module, _, leaf = stored.rpartition(".")
            if stored == "d2t":  # tokens, not offsets
                tokens = tensor.data().view(torch.int64)
                tensors[stored] = tokens - torch.arange(len(tokens))
            elif stored in places:
                tensors[places[stored]] = tensor[...]
            elif module in places and leaf in ("weight", "bias"):
                tensors[f"{places[module]}.{leaf}"] = tensor[...]
            else:
                raise ValueError(f"expected tensors of {name} drafters, found {stored}, which has no place in it")
    head = tensors.get("lm_head.weight")
    return {**config, "draft_vocab_size": config["vocab_size"] if head is None else len(head)}, tensors


def _eagle3(keys: Keys) -> dict[str, Any]:
    config = {name: keys(name) for name in ("vocab_size", "target_hidden_size")}
    config |= {name: keys(name, False) for name in ("norm_before_residual", "norm_before_fc")}
    config["eagle_aux_hidden_state_layer_ids"] = keys("target_layers")
    return config | {"architectures": ["LlamaForCausalLMEagle3"], "rope_is_neox_style": False}


def _dflash(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    """If a file does not say whether layers with a window are causal inside a block, its class decides."""
    width = keys("embedding_length")
    markov, confidence, table = (file.tensors.get(f"{one}.weight") for one in ("markov_w1", "conf_proj", "token_embd"))
    keys.expect("hidden_act", "silu")
    keys.expect("rope.dimension_sections", [head_size(keys) // 2, 0, 0, 0])  # positions have one axis
    # Gemma's embedding, which the target applies, is scaled.
    scaled = () if table else (torch.tensor(width, dtype=torch.float32).sqrt().item(),)
    keys.expect("embedding_scale", 1.0, *scaled)
    own = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {name: keys(name) for name in own if name in keys} | {
        **sliding(keys, window=0),
        "architectures": ["DSparkDraftModel" if "sample_from_anchor" in keys else "DFlashDraftModel"],
        "block_size": keys("block_size"),
        "confidence_head_with_markov": bool(confidence and confidence.shape[-1] > width),
        "dflash_config": {"target_layer_ids": [layer - 1 for layer in keys("target_layers")]},
        "enable_confidence_head": keys("has_confidence_head", False),
        "is_causal": keys("attention.causal", None),
        "markov_rank": markov.shape[-1] if markov else 0,
        "mask_token_id": file.count("tokenizer.ggml.mask_token_id", least=0),
        "sample_from_anchor": keys("sample_from_anchor", False),
        "vocab_size": len(file.metadata.get("tokenizer.ggml.tokens", ())) or None,
    }
