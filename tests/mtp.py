"""Checkpoints of targets with native MTP layers; Qwen3.5's layer as plain loops over the tensors, without a cache, and
transformers' own ``MtpModel``."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.draft_checks import check_drafts
from tests.targets import row_of
from tests.tiny.configs import _shrink


def mtp_tensors(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of an MTP layer for a model, in the order and shapes of the published ones."""
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


class PlainMTP:
    """An MTP layer by loops, in float32; every call computes the whole sequence."""

    def __init__(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        self.config, self.t = model.config.get_text_config(), tensors
        self.embed, self.head = model.get_input_embeddings(), model.get_output_embeddings()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * (1 + self.t[f"{name}.weight"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.t[f"mtp.layers.0.{name}_proj.weight"].T

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """(length, head_dim) of one head by positions (3, length): the first features turn, in pairs."""
        rope, x = self.config.rope_parameters, x.clone()
        turned = int(self.config.head_dim * rope["partial_rotary_factor"])
        section, half, before = rope["mrope_section"], turned // 2, x.clone()
        for i in range(half):
            axis = next((a for a in (1, 2) if i % 3 == a and i < 3 * section[a]), 0)
            angle = positions[axis] * rope["rope_theta"] ** (-2 * i / turned)
            x[:, i] = before[:, i] * angle.cos() - before[:, i + half] * angle.sin()
            x[:, i + half] = before[:, i + half] * angle.cos() + before[:, i] * angle.sin()
        return x

    def attention(self, x: Tensor, positions: Tensor) -> Tensor:
        heads, kv_heads, dim = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        k, v = (self.linear(x, f"self_attn.{n}").unflatten(-1, (-1, dim)) for n in "kv")
        both, read = self.linear(x, "self_attn.q").unflatten(-1, (heads, 2 * dim)), []
        for head in range(heads):
            query, gate = both[:, head, :dim], both[:, head, dim:]
            own = head * kv_heads // heads
            query = self.turn(self.norm(query, "mtp.layers.0.self_attn.q_norm"), positions)
            key = self.turn(self.norm(k[:, own], "mtp.layers.0.self_attn.k_norm"), positions)
            scores = query @ key.T / math.sqrt(dim)
            scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
            read.append(scores.softmax(-1) @ v[:, own] / (1 + torch.exp(-gate)))
        return self.linear(torch.cat(read, dim=-1), "self_attn.o")

    def outputs(self, embeds: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """The predicted states at every entry, (length, hidden)."""
        normed = [self.norm(embeds, "mtp.pre_fc_norm_embedding"), self.norm(states, "mtp.pre_fc_norm_hidden")]
        x = torch.cat(normed, dim=-1) @ self.t["mtp.fc.weight"].T
        x = x + self.attention(self.norm(x, "mtp.layers.0.input_layernorm"), positions)
        inner = self.norm(x, "mtp.layers.0.post_attention_layernorm")
        gate = self.linear(inner, "mlp.gate")
        x = x + self.linear(gate / (1 + torch.exp(-gate)) * self.linear(inner, "mlp.up"), "mlp.down")
        return self.norm(x, "mtp.norm")

    def levels(self, embeds: Tensor, states: Tensor, positions: Tensor, path: list[int]) -> list[Tensor]:
        """Logits before each token of ``path``, and after its last, (vocab,) each.

        Args:
            embeds: input embeddings of the entries, (length, hidden): one ahead of their states.
            states: the target's last hidden states, (length, hidden).
            positions: (3, length).
            path: drafted tokens.
        """
        found = []
        for token in [*path, None]:
            last = self.outputs(embeds, states, positions)[-1]
            found.append(self.head(last))
            if token is not None:
                embeds = torch.cat([embeds, self.embed(torch.tensor([token]))])
                states = torch.cat([states, last[None]])
                positions = torch.cat([positions, positions[:, -1:].amax(0, keepdim=True).expand(3, 1) + 1], dim=1)
        return found

    @torch.no_grad()
    def gain(self, embeds: Tensor, states: Tensor, positions: Tensor, path: list[int]) -> float:
        """Path probability of drafted tokens."""
        levels = self.levels(embeds, states, positions, path[:-1])
        return math.prod(float(logits.softmax(-1)[token]) for logits, token in zip(levels, path, strict=True))


@torch.no_grad()
def entries_of(model: PreTrainedModel, row: dict[str, Any], said: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, states and positions of the entries of a row's prompt and what was said, by the plain model."""
    extended = dict(row)
    extended["input_ids"] = torch.cat([row["input_ids"], torch.tensor([said], dtype=torch.long)], dim=1)
    if "mm_token_type_ids" in row:
        extended["mm_token_type_ids"] = torch.nn.functional.pad(row["mm_token_type_ids"], (0, len(said)))
    given: dict[str, Any] = {}
    decoder = model.get_decoder()
    hook = decoder.register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)
    norm = decoder.norm.register_forward_hook(lambda _, args, out: given.update(last=out))
    model(**extended, use_cache=False)
    hook.remove()
    norm.remove()
    length, positions = extended["input_ids"].shape[1], given.get("position_ids")
    if positions is None or positions.ndim < 3:
        positions = torch.arange(length).expand(3, 1, length)
    embeds = given.get("inputs_embeds")
    if embeds is None:
        embeds = model.get_input_embeddings()(extended["input_ids"])
    return embeds[0, 1:], given["last"][0, :-1], positions[-3:, 0, :-1]


def check_mtp(model: PreTrainedModel, inputs: Any, drafter: Any, tensors: dict[str, Tensor], **asked: Any) -> Any:
    """Decode; every tree's every node must have the probability of the plain loop, and every output token be right."""
    rows = [row_of(inputs, b) for b in range(inputs["input_ids"].shape[0])]
    plain = PlainMTP(model, tensors)

    def gains(target: Any, b: int, said: list[int], paths: list[list[int]]) -> list[float]:
        entries = entries_of(model, rows[b], said)
        return [plain.gain(*entries, path) for path in paths]

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
if not hasattr(transformers, "MellumConfig") or "num_mtp_layers" not in transformers.MellumConfig.attribute_map:
    LAYERS.remove(("mellum", 1))  # added after transformers 5.17


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
    """The tensors of MTP layers under published names: those of layers after the model's ``first`` ones, or ``mtp.*``
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
            past_key_values=cache,
            **built.create_masks_for_mtp_layer(number, embeds, cache, positions),
        )
        gain *= float(model.lm_head(states[0, -1]).softmax(-1)[token])
        ids = torch.cat([ids[:, 1:], torch.tensor([[token]])], dim=1)
        positions = positions + 1
    return gain
