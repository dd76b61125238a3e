"""Checkpoints of targets with native MTP layers; drafting without a past, by these and by ``MtpModel``."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from mmspec.cache.tree_cache import TreeCache
from mmspec.drafters.mtp import MTPNetwork
from tests.draft_checks import Pass, check_drafts, plain_pass
from tests.targets import CACHE, row_of
from tests.tiny.configs import _shrink


def mtp_tensors(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of an MTP layer for a model, in the order and shapes of published checkpoints."""
    config, g = model.config.get_text_config(), torch.Generator().manual_seed(seed)
    width, head_dim, mlp = config.hidden_size, config.head_dim, config.intermediate_size
    inner, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    at = "mtp.layers.0."
    shapes = {
        "mtp.fc": (width, 2 * width),
        f"{at}input_layernorm": (width,),
        f"{at}mlp.down_proj": (width, mlp),
        f"{at}mlp.gate_proj": (mlp, width),
        f"{at}mlp.up_proj": (mlp, width),
        f"{at}post_attention_layernorm": (width,),
        f"{at}self_attn.k_norm": (head_dim,),
        f"{at}self_attn.k_proj": (keys, width),
        f"{at}self_attn.o_proj": (width, inner),
        f"{at}self_attn.q_norm": (head_dim,),
        f"{at}self_attn.q_proj": (2 * inner, width),
        f"{at}self_attn.v_proj": (keys, width),
        "mtp.norm": (width,),
        "mtp.pre_fc_norm_embedding": (width,),
        "mtp.pre_fc_norm_hidden": (width,),
    }
    return {f"{name}.weight": torch.randn(shape, generator=g) * 0.25 for name, shape in shapes.items()}


def write_target(folder: Any, model: PreTrainedModel, tensors: dict[str, Tensor], shards: bool = False) -> Any:
    """A model's folder as it lies on the hub, whose weights contain further tensors, in one file or several."""
    model.save_pretrained(folder, **({"max_shard_size": "60KB"} if shards else {}))
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    if not shards:
        save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    file = folder / "model.safetensors.index.json"
    index, names = json.loads(file.read_text()), sorted(tensors)
    last = sorted(set(index["weight_map"].values()))[-1]
    for shard, some in ((last, names[:5]), ("mtp.safetensors", names[5:])):
        before = load_file(folder / shard) if (folder / shard).exists() else {}
        save_file(before | {name: tensors[name] for name in some}, folder / shard, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(some, shard)
    file.write_text(json.dumps(index))
    return folder


@torch.no_grad()
def _gain(model: PreTrainedModel, network: MTPNetwork, seen: Pass, path: list[int]) -> float:
    """Path probability of drafted tokens: the network's one layer computes the whole sequence for each token."""
    gain, embeds, states, positions = 1.0, seen.embeds[1:], seen.last[:-1], seen.positions[:, :-1]
    for token in path:
        places = positions[:, None] if network.config.model_type.startswith("qwen3_5") else positions[:1]
        cache = TreeCache(1)
        cache.commit_prompt(0, None, 1)
        last = network(0, embeds[None], states[None], places, None, cache)[0, -1]
        gain *= float(model.get_output_embeddings()(last).softmax(-1)[token])
        embeds = torch.cat([embeds, model.get_input_embeddings()(torch.tensor([token]))])
        states = torch.cat([states, last[None]])
        positions = torch.cat([positions, positions[:, -1:].amax(0, keepdim=True).expand(3, 1) + 1], dim=1)
    return gain


def check_mtp(model: PreTrainedModel, inputs: Any, drafter: Any, **asked: Any) -> Any:
    """Decode; every tree's every node must have the probability that the layer gives it without a cache, and every
    output token be right."""

    def gains(target: Any, b: int, said: list[int], paths: list[list[int]]) -> list[float]:
        seen = plain_pass(model, row_of(inputs, b), said)
        return [_gain(model, drafter.network, seen, path) for path in paths]

    return check_drafts(model, inputs, drafter, gains, **asked)


# ---------------------------------------------------------------------- transformers' own layers


_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LATENT = dict(head_dim=8, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
_EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1)
_WINDOWS = {"full_attention": _ROPE, "sliding_attention": _ROPE | {"rope_theta": 5e3}}
CONFIGS = {
    "deepseek_v3": lambda layers: _shrink(
        transformers.DeepseekV3Config, **_LATENT, **_EXPERTS, num_key_value_heads=4, num_mtp_layers=layers
    ),
    "glm4_moe": lambda layers: _shrink(transformers.Glm4MoeConfig, **_EXPERTS, num_mtp_layers=layers),
    "mellum": lambda layers: _shrink(
        transformers.MellumConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_mtp_layers=layers,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters=_WINDOWS,
    ),
}
LAYERS = [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 2), ("mellum", 1)]


@cache
def dense(name, layers):
    """A target with MTP layers, and these as transformers builds them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](layers)).eval()
    model.lm_head.weight.data.normal_(std=0.5)
    return model, mtp_model(model)


def published(folder, name, layers):
    model, built = dense(name, layers)
    return write_target(folder, model, published_tensors(built, None if name == "mellum" else 2))


def mtp_model(model: PreTrainedModel, seed: int = 0) -> Any:
    """Random MTP layers for a model, of transformers."""
    torch.manual_seed(seed)
    built = MtpModel(model, model.config.num_mtp_layers).eval()
    for name, parameter in built.layers.named_parameters():
        parameter.data.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return built


def published_tensors(built: Any, first: int | None) -> dict[str, Tensor]:
    """The tensors of MTP layers under published names: layers after the model's ``first`` ones, or ``mtp.*``
    for None."""
    found: dict[str, Tensor] = {}
    for name, value in built.layers.state_dict().items():
        number, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.")
        if first is not None:
            rest = "shared_head.norm.weight" if rest == "post_norm.weight" else rest
            at = f"model.layers.{first + int(number)}.{rest}"
        else:
            renamed = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
            part = rest.removesuffix(".weight")
            at = f"mtp.{(renamed | {'post_norm': 'norm'}).get(part, f'layers.{number}.{part}')}.weight"
            at = at if rest.endswith(".weight") else f"mtp.layers.{number}.{rest}"
        if at.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                for one, part_of in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[at.replace("gate_up_proj", f"{expert}.{one}_proj.weight")] = part_of
        elif at.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                found[at.replace("down_proj", f"{expert}.down_proj.weight")] = down
        else:
            found[at] = value
    return {name: value.clone() for name, value in found.items()}


def appended(built: Any, first: int) -> dict[str, Tensor]:
    """The tensors of MTP layers by names of layers after the model's ``first`` ones, with joined experts."""
    layers = [layer.state_dict().items() for layer in built.layers]
    return {
        f"model.layers.{number}.{name.removeprefix('mtp_block.').replace('post_norm', 'shared_head.norm')}": value
        for number, layer in enumerate(layers, first)
        for name, value in layer
    }


def nextn_name(name: str) -> str | None:
    """llama.cpp's name of a tensor of ``appended`` outside of its decoder layer; None for others."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight", name)
    return found and f"blk.{found[1]}.nextn.{found[2].replace('.', '_')}.weight"


@torch.no_grad()
def gain_of(built: Any, model: PreTrainedModel, tokens: list[int], path: list[int]) -> float:
    """Probability of drafted tokens after a sequence, at most one per layer, by transformers' layers without a past."""
    states = model.model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
    ids, positions, gain = torch.tensor([tokens[1:]]), torch.arange(1, len(tokens))[None], 1.0
    cache = MtpCache(config=built.config)
    by_kind = any(isinstance(value, dict) for value in built.config.rope_parameters.values())
    rotary = model.model.rotary_emb
    for number, token in enumerate(path):
        axes = positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions
        embeds = model.get_input_embeddings()(ids)
        kind = {"layer_type": built.config.layer_types[number]} if by_kind else {}
        states = built.layers[number](
            embeds,
            states,
            position_embeddings=rotary(embeds, position_ids=axes, **kind),
            position_ids=positions,
            **{CACHE: cache},
            **built.create_masks_for_mtp_layer(number, embeds, cache, positions),
        )
        gain *= float(model.lm_head(states[0, -1]).softmax(-1)[token])
        ids = torch.cat([ids[:, 1:], torch.tensor([[token]])], dim=1)
        positions = positions + 1
    return gain
