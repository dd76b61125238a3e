"""Every architecture of llama.cpp that is read: files written by hand have the logits of the model that they are of.

Tensors are named by the package gguf's own table; keys, and the order and values of weights, as by llama.cpp's
converters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

import mmspec
from mmspec.drafters.registry import make_drafter
from mmspec.targets import sources
from mmspec.targets.gguf_file import GGUFFile
from mmspec.targets.gguf_models import ARCHITECTURES
from tests import gguf_mixtures
from tests.mmspec.drafters.test_drafters import check_paths
from tests.model_folders import write_gguf
from tests.mtp import appended, gain_of, mtp_model, nextn_name
from tests.tiny.models import text_inputs

package = pytest.importorskip("gguf", reason="the package gguf is not installed")

Weights = Mapping[str, Tensor]
BASE = 5e4
LENGTH = 40  # of the prompt: beyond all windows and original contexts
FULL, LOCAL = "full_attention", "sliding_attention"
FIELDS = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-9,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
}
KEYS = {
    "context_length": 128,
    "embedding_length": 48,
    "feed_forward_length": 80,
    "block_count": 3,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 2.0**-9,
    "rope.freq_base": BASE,
}
EPSILON = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 2.0**-9}


def as_it_is(config: Any, name: str, weight: Tensor) -> Weights:
    return {name: weight}


def paired(config: Any, name: str, weight: Tensor) -> Weights:
    """The rows of a pair that turns together are adjacent."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return {name: weight}
    return {name: weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)}


def plus_one(config: Any, name: str, weight: Tensor) -> Weights:
    return {name: weight + 1 if name.endswith("norm.weight") else weight}


def of_falcon(config: Any, name: str, weight: Tensor) -> Weights:
    if "query_key_value" not in name:
        return {name: weight}
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    parts = weight.view(groups, config.num_attention_heads // groups + 2, config.head_dim, -1)
    return {name: torch.cat([parts[:, :-2].flatten(0, 2), parts[:, -2].flatten(0, 1), parts[:, -1].flatten(0, 1)])}


def of_bloom(config: Any, name: str, weight: Tensor) -> Weights:
    name = name.removeprefix("transformer.")
    if "query_key_value" not in name:
        return {name: weight}
    parts = weight.view(config.n_head, 3, -1, *weight.shape[1:])
    return {name: torch.cat([parts[:, part].flatten(0, 1) for part in range(3)])}


def of_gpt2(config: Any, name: str, weight: Tensor) -> Weights:
    return {name: weight.t() if weight.ndim > 1 and ".h." in name else weight}


def of_gemma4(config: Any, name: str, weight: Tensor) -> Weights:
    if found := re.fullmatch(r"model\.layers\.(\d+)\.router\.(per_expert_)?scale", name):
        return {f"blk.{found[1]}.ffn_{'down_exps' if found[2] else 'gate_inp'}.scale": weight}
    return {f"{name}.weight" if name.endswith(("layer_scalar", "gate_up_proj", "experts.down_proj")) else name: weight}


def of_stablelm(config: Any, name: str, weight: Tensor) -> Weights:
    """Norms by head are rows of one tensor."""
    if found := re.fullmatch(r"(model\.layers\.\d+\.self_attn\.._layernorm)\.norms\.(\d+)(\.weight)", name):
        return {found[1] + found[3]: weight[None]}
    return {name: weight}


def of_qwen3moe(config: Any, name: str, weight: Tensor) -> Weights:
    place = name.rpartition(".")[0]
    if name.endswith("experts.gate_up_proj"):
        return {
            f"{place}.{part}_proj.weight": one for part, one in zip(("gate", "up"), weight.chunk(2, 1), strict=True)
        }
    return {f"{name}.weight" if name.endswith("experts.down_proj") else name: weight}


@dataclass(frozen=True)
class Case:
    """A small model and how llama.cpp's converter writes it.

    Attributes:
        architecture: llama.cpp's name.
        kind: prefix of transformers' configuration class.
        fields: of the configuration, in place of ``FIELDS``.
        keys: metadata below the architecture's name, in place of ``KEYS``; None leaves a key out.
        change: (configuration, name, weight) -> the tensors written of a weight, by names as in a checkpoint.
        more: further tensors of the file.
        without: weights that are not written.
    """

    architecture: str
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Any, str, Tensor], Weights] = as_it_is
    more: Weights = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def config(self) -> Any:
        return getattr(transformers, f"{self.kind}Config")(**{**FIELDS, **self.fields})

    def model(self) -> Any:
        """With norms and biases that matter."""
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(self.config()).float().eval()
        random = torch.Generator().manual_seed(1)
        for weight in made.state_dict().values():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn(weight.shape, generator=random)
        return made

    def save(
        self,
        path: Path,
        model: Any,
        keys: Mapping[str, Any] | None = None,
        also: Weights = MappingProxyType({}),
        fuse: bool = False,
        **tensors: Any,
    ) -> Path:
        """Write the file, with other ``keys`` and ``tensors``, None leaves one out. Weights in ``also`` are converted
        as the model's. ``fuse`` joins queries, keys and values, as the converter's option does."""
        kind = {name: one for one, name in package.MODEL_ARCH_NAMES.items()}[self.architecture]
        names = package.get_tensor_name_map(kind, model.config.num_hidden_layers + 1)
        written: dict[str, Any] = dict(self.more)
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        for name, weight in {**model.state_dict(), **also}.items():
            if name not in tied and not name.endswith(self.without or "\0"):
                for part, tensor in self.change(model.config, name, weight).items():
                    place = nextn_name(part) or names.get_name(part, try_suffixes=(".weight", ".bias", ".scale"))
                    assert place is not None, part
                    written[place] = torch.cat([written[place], tensor]) if place in written else tensor
        for query in [name for name in written if fuse and ".attn_q." in name]:
            several = [query.replace("attn_q", f"attn_{part}") for part in "qkv"]
            if all(name in written for name in several):
                written[query.replace("attn_q", "attn_qkv")] = torch.cat([written.pop(name) for name in several])
        written = {name: one.contiguous().numpy() for name, one in written.items() if name not in tensors}
        written |= {name: one.numpy() for name, one in tensors.items() if one is not None}
        given = {**KEYS, **self.keys, **(keys or {})}
        metadata = {f"{self.architecture}.{name}": value for name, value in given.items()}
        write_gguf(path, {"general.architecture": self.architecture, **metadata}, written)
        return path


YARN = {
    "rope_type": "yarn",
    "rope_theta": BASE,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
LINEAR = {"rope_type": "linear", "rope_theta": BASE, "factor": 4.0}
GROUPS = {"multi_query": True, "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 2.0**-9}
SCALES = {
    "embedding_multiplier": 2.5,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.125,
}
SCALE_KEYS = {"embedding_scale": 2.5, "logit_scale": 3.0, "residual_scale": 0.25, "attention.scale": 0.125}
GEMMA2 = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 13}
GEMMA2_KEYS = {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 13}
OLD = {"layer_norm_epsilon": 2.0**-9}


def partly(part: float, base: float = BASE) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part}}


def factors(step: float, count: int) -> list[float]:
    return [1 + step * number for number in range(count)]


def by_kind(full: Mapping[str, Any], local: float) -> dict[str, Any]:
    return {"rope_parameters": {FULL: dict(full), LOCAL: {"rope_type": "default", "rope_theta": local}}}


def head(size: int) -> dict[str, int]:
    return {"attention.key_length": size, "attention.value_length": size}


PROPORTIONAL = {"rope_type": "proportional", "rope_theta": BASE, "partial_rotary_factor": 0.25}
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 13, "vocab_size_per_layer_input": 96}
GEMMA4_KEYS = {
    **head(16),
    "attention.key_length_swa": 8,
    "attention.value_length_swa": 8,
    "attention.sliding_window": 13,
    "rope.freq_base_swa": 1000.0,
    "rope.dimension_count": 16,
    "rope.dimension_count_swa": 8,
}

CASES: dict[str, Case] = {
    "bloom": Case(
        "bloom",
        "Bloom",
        {"n_layer": 3, "n_head": 6, **OLD},
        {**EPSILON, "feed_forward_length": 192, "attention.head_count_kv": 6, "rope.freq_base": None},
        of_bloom,
    ),
    "cohere2": Case(
        "cohere2",
        "Cohere2",
        {"num_hidden_layers": 5, "layer_norm_eps": 2.0**-9, "logit_scale": 0.25, "sliding_window": 13},
        {
            **EPSILON,
            "block_count": 5,
            "logit_scale": 0.25,
            "attention.sliding_window": 13,
            "rope.scaling.type": "none",
            "rope.dimension_count": 8,
        },
    ),
    "command-r": Case(
        "command-r",
        "Cohere",
        {"layer_norm_eps": 2.0**-9, "logit_scale": 0.25, "use_qk_norm": True},
        {**EPSILON, "logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "command-r without a scale": Case(
        "command-r", "Cohere", {"layer_norm_eps": 2.0**-9, "logit_scale": 1.0}, {**EPSILON, "rope.scaling.type": "none"}
    ),
    "deci": Case("deci", "Llama", {}, {"rope.dimension_count": 8, "attention.head_count": [6, 6, 6]}, paired),
    "ernie4_5": Case("ernie4_5", "Ernie4_5", {"head_dim": 16}, head(16)),
    "exaone4": Case(
        "exaone4",
        "Exaone4",
        {"num_hidden_layers": 5, "sliding_window": 13, "sliding_window_pattern": 4, "head_dim": 8},
        {
            **head(8),
            "block_count": 5,
            "attention.sliding_window": 13,
            "attention.sliding_window_pattern": [True, True, True, False, True],
        },
    ),
    "exaone4 without windows": Case("exaone4", "Exaone4", {"sliding_window": None, "layer_types": [FULL] * 3}),
    "falcon": Case(
        "falcon",
        "Falcon",
        {**GROUPS, "num_kv_heads": 1},
        {**EPSILON, "feed_forward_length": 192, "attention.head_count_kv": 1, "tensor_data_layout": "jploski"},
        of_falcon,
    ),
    "falcon of two norms": Case(
        "falcon",
        "Falcon",
        {**GROUPS, "num_kv_heads": 2, "new_decoder_architecture": True, "tie_word_embeddings": False},
        {**EPSILON, "feed_forward_length": 192},
        of_falcon,
    ),
    "falcon of one norm": Case(
        "falcon",
        "Falcon",
        {**GROUPS, "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        {**EPSILON, "feed_forward_length": 192},
        of_falcon,
    ),
    "gemma": Case("gemma", "Gemma", {"head_dim": 16}, head(16), plus_one),
    "gemma2": Case(
        "gemma2",
        "Gemma2",
        {**GEMMA2, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        {**GEMMA2_KEYS, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        plus_one,
    ),
    "gemma2 of 46 layers": Case(
        "gemma2",
        "Gemma2",
        {**GEMMA2, "query_pre_attn_scalar": 8, "num_hidden_layers": 46, "initializer_range": 0.1},
        {**GEMMA2_KEYS, "block_count": 46},
        plus_one,
    ),
    "gemma3": Case(
        "gemma3",
        "Gemma3Text",
        {**GEMMA2, "num_hidden_layers": 8, "final_logit_softcapping": 5.0, **by_kind(LINEAR, 1000.0)},
        {
            **GEMMA2_KEYS,
            "block_count": 8,
            "final_logit_softcapping": 5.0,
            "rope.freq_base_swa": 1000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
        plus_one,
    ),
    "gemma3 of 62 layers, none with a window": Case(
        "gemma3",
        "Gemma3Text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 8,
            "num_hidden_layers": 62,
            "initializer_range": 0.1,
            "layer_types": [FULL] * 62,
            "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": BASE}},
        },
        {**head(16), "block_count": 62},
        plus_one,
    ),
    "gemma4": Case(
        "gemma4",
        "Gemma4Text",
        {
            **GEMMA4,
            **by_kind(PROPORTIONAL, 1000.0),
            "num_hidden_layers": 6,
            "layer_types": [LOCAL, FULL, LOCAL, FULL, LOCAL, FULL],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 5.0,
        },
        {
            **GEMMA4_KEYS,
            "block_count": 6,
            "feed_forward_length": [80] * 4 + [160] * 2,
            "attention.sliding_window_pattern": [True, False] * 3,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 8,
            "final_logit_softcapping": 5.0,
        },
        of_gemma4,
        {"rope_freqs.weight": torch.tensor([1.0, 1.0] + [1e30] * 6), "blk.5.attn_k.weight": torch.ones(32, 48)},
    ),
    "gemma4 with keys as values": Case(
        "gemma4",
        "Gemma4Text",
        {
            **GEMMA4,
            **by_kind(PROPORTIONAL, 1000.0),
            "layer_types": [LOCAL, LOCAL, FULL],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
        },
        {
            **GEMMA4_KEYS,
            "attention.head_count_kv": [2, 2, 1],
            "attention.sliding_window_pattern": [True, True, False],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
        },
        of_gemma4,
        {"rope_freqs.weight": torch.tensor([1.0, 1.0] + [1e30] * 6)},
    ),
    "gemma4 with experts": Case(
        "gemma4",
        "Gemma4Text",
        {
            **GEMMA4,
            **by_kind(PROPORTIONAL, 1000.0),
            "layer_types": [LOCAL, LOCAL, FULL],
            "hidden_size_per_layer_input": 0,
        }
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
        {**GEMMA4_KEYS, "attention.sliding_window_pattern": [True, True, False]}
        | {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24},
        of_gemma4,
        {"rope_freqs.weight": torch.tensor([1.0, 1.0] + [1e30] * 6)},
    ),
    "glm4": Case(
        "glm4", "Glm4", {"head_dim": 16, "attention_bias": True, **partly(0.5)}, {**head(16), "rope.dimension_count": 8}
    ),
    "gpt2": Case(
        "gpt2",
        "GPT2",
        {"n_positions": 128, "n_embd": 48, "n_layer": 3, "n_head": 6, **OLD},
        {**EPSILON, "feed_forward_length": 192, "attention.head_count_kv": None, "rope.freq_base": None},
        of_gpt2,
    ),
    "granite": Case(
        "granite",
        "Granite",
        {**SCALES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {**SCALE_KEYS, "rope.dimension_count": 8, "rope.scaling.finetuned": True},
        paired,
    ),
    "hunyuan-dense": Case(
        "hunyuan-dense",
        "HunYuanDenseV1",
        {"head_dim": 16},
        {**head(16), "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "expert_count": 0},
    ),
    "internlm2": Case("internlm2", "Llama", {"rope_parameters": LINEAR}, {"rope.scale_linear": 4.0}, paired),
    "llama": Case(
        "llama",
        "Llama",
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
        {**head(16), "rope.dimension_count": 16, "expert_count": 0, "expert_used_count": 0},
        paired,
    ),
    "llama of as many key heads": Case(
        "llama",
        "Llama",
        {"num_key_value_heads": 6, "rope_parameters": LINEAR},
        {"attention.head_count_kv": None, "rope.scaling.factor": 4.0},
        paired,
    ),
    "minicpm": Case(
        "minicpm",
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 48 / 256,
            "residual_multiplier": 1.4 / math.sqrt(3),
            "attention_multiplier": 8**-0.5,
        },
        {},
        paired,
    ),
    "mistral3": Case(
        "mistral3",
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.25},
        },
        {**head(16), **YARN_KEYS, "rope.scaling.yarn_log_multiplier": 0.5, "attention.temperature_scale": 0.25},
        paired,
    ),
    "mistral3 of one temperature": Case("mistral3", "Mistral", {"sliding_window": None}, {}, paired),
    "nemotron": Case(
        "nemotron",
        "Nemotron",
        {"norm_eps": 2.0**-9, "attention_bias": True, "mlp_bias": True, **partly(0.5)},
        {"attention.layer_norm_epsilon": 2.0**-9, "rope.dimension_count": 4, "rope.scaling.type": "none"},
        plus_one,
    ),
    "olmo": Case(
        "olmo",
        "Olmo",
        {"clip_qkv": 0.75},
        {**EPSILON, "attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.75},
        paired,
    ),
    "olmo2": Case("olmo2", "Olmo2"),
    "olmo2 with windows": Case(
        "olmo2",
        "Olmo3",
        {"num_hidden_layers": 5, "sliding_window": 13, **by_kind(YARN, BASE)},
        {**YARN_KEYS, "block_count": 5, "attention.sliding_window": 13},
    ),
    "phi2": Case(
        "phi2",
        "Phi",
        {"layer_norm_eps": 2.0**-9, "num_key_value_heads": 6, **partly(0.5, 10_000.0)},
        {**EPSILON, "attention.head_count_kv": 6, "rope.dimension_count": 4, "rope.freq_base": None},
    ),
    "phi3": Case(
        "phi3",
        "Phi3",
        {"sliding_window": 13, **partly(0.5)},
        {"attention.sliding_window": 13, "rope.dimension_count": 4, "rope.scaling.original_context_length": 128},
    ),
    "phi3 of longer contexts": Case(
        "phi3",
        "Phi3",
        {
            "hidden_size": 96,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": BASE,
                "partial_rotary_factor": 0.75,
                "short_factor": factors(0.125, 6),
                "long_factor": factors(0.5, 6),
                "original_max_position_embeddings": 32,
                "attention_factor": 1.25,
            },
        },
        {
            "embedding_length": 96,
            "attention.sliding_window": 0,
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.25,
        },
        more={
            "rope_factors_short.weight": torch.tensor(factors(0.125, 6)),
            "rope_factors_long.weight": torch.tensor(factors(0.5, 6)),
        },
    ),
    "qwen2": Case("qwen2", "Qwen2", {"rope_parameters": YARN}, YARN_KEYS),
    "qwen2vl": Case("qwen2vl", "Qwen2", {}, {"rope.dimension_sections": [1, 1, 2, 0]}),
    "qwen3": Case("qwen3", "Qwen3", {"head_dim": 16}, head(16)),
    "qwen3moe": Case(
        "qwen3moe",
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        {**head(16), "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24},
        of_qwen3moe,
    ),
    "qwen3vl": Case(
        "qwen3vl",
        "Qwen3",
        {"head_dim": 16},
        {**head(16), "rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3},
    ),
    "seed_oss": Case("seed_oss", "SeedOss", {"head_dim": 16, "attention_out_bias": True}, head(16)),
    "smollm3": Case("smollm3", "SmolLM3", {"num_hidden_layers": 5}, {"block_count": 5}, paired),
    "stablelm": Case(
        "stablelm",
        "StableLm",
        {"layer_norm_eps": 2.0**-9, "use_qkv_bias": True, **partly(0.25)},
        {**EPSILON, "rope.dimension_count": 2, "use_parallel_residual": True},
    ),
    "stablelm of parallel residuals": Case(
        "stablelm",
        "StableLm",
        {"layer_norm_eps": 2.0**-9, "use_parallel_residual": True, **partly(1.0)},
        {**EPSILON, "rope.dimension_count": 8, "use_parallel_residual": True},
    ),
    "stablelm with norms by head": Case(
        "stablelm",
        "StableLm",
        {"layer_norm_eps": 2.0**-9, "use_parallel_residual": True, "qk_layernorm": True, **partly(0.5)},
        {**EPSILON, "rope.dimension_count": 4},
        of_stablelm,
    ),
    "starcoder2": Case("starcoder2", "Starcoder2", {"norm_epsilon": 2.0**-9}, EPSILON),
    "starcoder2 without biases": Case(
        "starcoder2", "Starcoder2", {"norm_epsilon": 2.0**-9, "use_bias": False}, EPSILON
    ),
}
"""A row of the table of architectures has a case of its name, and further cases with more of its keys."""


def recurrent(*renames: tuple[str, str], also: Callable[[Any, str, Tensor], Weights] = as_it_is) -> Any:
    """Weights of recurrent layers: -exp(A_log), convolutions without the axis of size 1, and other names."""

    def change(config: Any, name: str, weight: Tensor) -> Weights:
        weight = -weight.exp() if name.endswith("A_log") else weight.squeeze() if "conv" in name else weight
        found = also(config, name, weight)
        for pattern, replacement in ((r"\.dt_bias$", ".dt_proj.bias"), *renames):
            found = {re.sub(pattern, replacement, one): value for one, value in found.items()}
        return found

    return change


def of_mamba2(config: Any, name: str, weight: Tensor) -> Weights:
    """Columns of A and D, and a row of the norm per group."""
    if name.endswith(("A_log", ".D")):
        return {name: weight[:, None]}
    groups = getattr(config, "mamba_n_groups", None) or config.n_groups
    return {name: weight.view(groups, -1) if re.search(r"(mamba|mixer)\.norm\.weight$", name) else weight}


def of_hybrid(config: Any, name: str, weight: Tensor) -> Weights:
    name, weight = next(iter(of_mamba2(config, name, weight).items()))
    name, weight = next(iter(paired(config, name, weight).items()))
    block = name.partition("layers.")[2].partition(".")[0]
    for place, end in (("shared_mlp.input_linear.weight", "shexp"), ("experts.gate_up_proj", "exps")):
        if name.endswith(place):
            end = end if config.num_local_experts else ""
            parts = zip(("gate", "up"), weight.chunk(2, -2), strict=True)
            return {f"blk.{block}.ffn_{part}{end and '_'}{end}.weight": one for part, one in parts}
    return {name: weight}


def tiled(config: Any, weight: Tensor, axis: int, size: int) -> Tensor:
    """The first value head of each key head, then the second, and so on."""
    groups = config.linear_num_key_heads
    values = config.linear_num_value_heads // groups
    return weight.unflatten(axis, (groups, values, size)).transpose(axis, axis + 1).flatten(axis, axis + 2)


def of_qwen35(config: Any, name: str, weight: Tensor) -> Weights:
    size, before = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if "in_proj_qkv." in name or "conv1d" in name:
        return {name: torch.cat([weight[:before], tiled(config, weight[before:], 0, size)])}
    if "linear_attn.out_proj" in name:
        return {name: tiled(config, weight, 1, size)}
    if "in_proj_z" in name or "in_proj_a" in name or "in_proj_b" in name or name.endswith(("A_log", "dt_bias")):
        return {name: tiled(config, weight, 0, size if "in_proj_z" in name else 1)}
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: weight + 1}
    return of_qwen3moe(config, name, weight)


def of_qwen3next(config: Any, name: str, weight: Tensor) -> Weights:
    if "in_proj_qkvz" in name:
        key, groups = config.linear_key_head_dim, config.linear_num_key_heads
        value = config.linear_num_value_heads // groups * config.linear_value_head_dim
        parts = weight.view(groups, -1, weight.shape[1]).split([key, key, value, value], 1)
        query, keys, values, gate = (part.flatten(0, 1) for part in parts)
        place = f"blk.{name.split('.')[2]}.attn"
        return {f"{place}_qkv.weight": torch.cat([query, keys, values]), f"{place}_gate.weight": gate}
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: weight + 1}
    return of_qwen3moe(config, name, weight)


def of_kimi(config: Any, name: str, weight: Tensor) -> Weights:
    name, block = name.replace("forget_gate.", ""), name.partition("layers.")[2].partition(".")[0]
    if "conv" in name:
        parts = zip("qkv", weight.chunk(3), strict=True)
        return {name.replace("conv1d", f"{part}_conv1d"): one[None, :, None] for part, one in parts}
    if "kv_b_proj" in name:
        sizes = [config.qk_nope_head_dim, config.v_head_dim]
        keys, values = weight.view(config.num_attention_heads, -1, weight.shape[1]).split(sizes, 1)
        return {f"blk.{block}.attn_k_b.weight": keys.mT, f"blk.{block}.attn_v_b.weight": values}
    if name.endswith("e_score_correction_bias"):
        return {f"blk.{block}.exp_probs_b.bias": weight}
    return of_qwen3moe(config, name, weight)


def of_jamba(config: Any, name: str, weight: Tensor) -> Weights:
    if "feed_forward.experts" in name:
        return of_qwen3moe(config, name.replace("feed_forward", "mlp"), weight)
    return {name: weight}


def of_lfm2(config: Any, name: str, weight: Tensor) -> Weights:
    if name.endswith("expert_bias"):
        return {f"{name}.bias": weight}
    return of_qwen3moe(config, name.replace("feed_forward.experts", "mlp.experts"), weight)


def of_nemotron(config: Any, name: str, weight: Tensor) -> Weights:
    name, weight = next(iter(of_mamba2(config, name, weight).items()))
    name = name.replace("mixer.dt_bias", "mixer.dt.bias").replace("e_score_correction_bias", "e_score_correction.bias")
    if "mixer.experts" in name:
        return {f"{name.replace('mixer', 'mlp')}.weight": weight}
    return {re.sub("^model", "model" if "experts" in name and "shared" not in name else "backbone", name): weight}


MIXERS = ["linear_attention", FULL, "linear_attention", "linear_attention"]
SSM_KEYS = {"ssm.conv_kernel": 3, "ssm.state_size": 16, "ssm.inner_size": 96, "ssm.time_step_rank": 6}
MAMBA2_KEYS = {**SSM_KEYS, "ssm.group_count": 2}
NO_HEADS = {
    "attention.head_count": 0,
    "attention.head_count_kv": None,
    "feed_forward_length": 0,
    "rope.freq_base": None,
}
MAMBA = {
    "intermediate_size": 96,
    "state_size": 16,
    "conv_kernel": 3,
    "layer_norm_epsilon": 2.0**-9,
    "time_step_rank": 6,
}
HYBRID = {"num_hidden_layers": 4, "mamba_d_conv": 3, "mamba_d_state": 16, "mamba_n_heads": 6, "mamba_d_head": 16}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "layer_types": MIXERS,
    **partly(0.5),
}
DELTA_KEYS = {
    **head(16),
    "block_count": 4,
    "attention.recurrent_layers": [kind != FULL for kind in MIXERS],
    "full_attention_interval": 4,
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 3,
    "ssm.state_size": 12,
    "ssm.inner_size": 48,
    "ssm.time_step_rank": 6,
    "ssm.group_count": 2,
}
SHARED = {"shared_expert_intermediate_size": 20, "norm_topk_prob": True}
SECTIONS = {"mrope_section": [1, 2, 1], "mrope_interleaved": True}
QWEN35 = {**DELTA, "rope_parameters": {**DELTA["rope_parameters"], **SECTIONS}}
QWEN35_KEYS = {**DELTA_KEYS, "rope.dimension_sections": [1, 2, 1, 0]}
LFM2 = {"num_hidden_layers": 4, "norm_eps": 2.0**-9, "conv_L_cache": 4}
LFM2 |= {"layer_types": ["conv", FULL, "conv", "conv"], "tie_word_embeddings": True}
LFM2_KEYS = {"block_count": 4, "shortconv.l_cache": 4, "attention.head_count_kv": [0, 2, 0, 0]}
NEMOTRON = {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
    "head_dim": 16,
    "layer_norm_epsilon": 2.0**-9,
    "ssm_state_size": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 3,
}
NEMOTRON_KEYS = {
    **head(16),
    **MAMBA2_KEYS,
    "block_count": 4,
    "feed_forward_length": [0, 80, 0, 0],
    "attention.head_count_kv": [0, 0, 2, 0],
    "rope.freq_base": None,
}
CASES |= {
    "falcon-h1": Case(
        "falcon-h1",
        "FalconH1",
        {**HYBRID, "head_dim": 16, "mamba_d_ssm": 96, "mamba_n_groups": 2, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": False},
        {**head(16), **MAMBA2_KEYS, "block_count": 4},
        recurrent((r"model\.layers\.(\d+)\.pre_ff_layernorm", r"blk.\1.ffn_norm"), also=of_mamba2),
    ),
    "granitehybrid": Case(
        "granitehybrid",
        "GraniteMoeHybrid",
        {**HYBRID, **SCALES, "mamba_n_groups": 2, "shared_intermediate_size": 80, "num_local_experts": 0}
        | {"num_experts_per_tok": 0, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
        {**MAMBA2_KEYS, **SCALE_KEYS, "block_count": 4, "attention.head_count_kv": [0, 2, 0, 0]}
        | {"rope.scaling.finetuned": False},
        recurrent((r"model\.layers\.(\d+)\.shared_mlp\.output_linear", r"blk.\1.ffn_down"), also=of_hybrid),
    ),
    "granitehybrid with experts": Case(
        "granitehybrid",
        "GraniteMoeHybrid",
        {**HYBRID, **SCALES, "mamba_n_groups": 2, "shared_intermediate_size": 20, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "layer_types": ["mamba", "attention", "mamba", "mamba"]}
        | {"position_embedding_type": "rope"},
        {**MAMBA2_KEYS, **SCALE_KEYS, "block_count": 4, "attention.head_count_kv": [0, 2, 0, 0], "expert_count": 4}
        | {"expert_used_count": 2, "expert_shared_feed_forward_length": 20},
        recurrent(
            (r"model\.layers\.(\d+)\.block_sparse_moe\.router", r"blk.\1.ffn_gate_inp"),
            (r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.down_proj", r"blk.\1.ffn_down_exps.weight"),
            also=of_hybrid,
        ),
    ),
    "jamba": Case(
        "jamba",
        "Jamba",
        {"num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2}
        | {"expert_layer_offset": 1, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 16}
        | {"mamba_d_conv": 3, "mamba_expand": 2, "mamba_dt_rank": 6, "use_mamba_kernels": False},
        {**SSM_KEYS, "block_count": 5, "attention.head_count_kv": [0, 2, 0, 0, 2], "rope.freq_base": None}
        | {"expert_count": 4, "expert_used_count": 2},
        recurrent(also=of_jamba),
    ),
    "kimi-linear": Case(
        "kimi-linear",
        "KimiLinear",
        {
            **ROUTED,
            "num_hidden_layers": 4,
            "num_key_value_heads": 6,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
        }
        | {"kv_lora_rank": 12, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 10, "layer_types": MIXERS}
        | {"linear_head_dim": 8, "linear_num_heads": 6, "linear_conv_kernel_dim": 3}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        {**ROUTED_KEYS, "block_count": 4, "attention.head_count_kv": [0, 1, 0, 0], "expert_shared_count": 2}
        | {"leading_dense_block_count": 1, "expert_weights_scale": 1.5, "expert_gating_func": 2, "kda.head_dim": 8}
        | {"attention.kv_lora_rank": 12, "attention.key_length": 18, "attention.key_length_mla": 14}
        | {"attention.value_length_mla": 10, "rope.dimension_count": 6, "ssm.conv_kernel": 3},
        recurrent(also=of_kimi),
    ),
    "lfm2": Case(
        "lfm2",
        "Lfm2",
        {**LFM2, "block_auto_adjust_ff_dim": False},
        LFM2_KEYS,
        recurrent(),
    ),
    "lfm2moe": Case(
        "lfm2moe",
        "Lfm2Moe",
        {**LFM2, **ROUTED, "num_dense_layers": 1},
        {**LFM2_KEYS, **ROUTED_KEYS, "leading_dense_block_count": 1, "expert_gating_func": 2},
        recurrent(also=of_lfm2),
    ),
    "mamba": Case("mamba", "Mamba", MAMBA, {**NO_HEADS, **SSM_KEYS, "ssm.dt_b_c_rms": False}, recurrent()),
    "mamba of Falcon": Case(
        "mamba",
        "FalconMamba",
        {**MAMBA, "mixer_rms_eps": 2.0**-9},
        {**NO_HEADS, **SSM_KEYS, "ssm.dt_b_c_rms": True},
        recurrent(),
    ),
    "mamba2": Case(
        "mamba2",
        "Mamba2",
        {**MAMBA, "num_heads": 6, "head_dim": 16, "n_groups": 2},
        {**NO_HEADS, **MAMBA2_KEYS},
        recurrent(also=of_mamba2),
    ),
    "nemotron_h": Case("nemotron_h", "NemotronH", NEMOTRON, NEMOTRON_KEYS, recurrent(also=of_nemotron)),
    "nemotron_h_moe": Case(
        "nemotron_h_moe",
        "NemotronH",
        {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "mamba"], "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20}
        | {"routed_scaling_factor": 1.5},
        {**NEMOTRON_KEYS, **ROUTED_KEYS, "expert_shared_feed_forward_length": 20, "expert_shared_count": 1}
        | {"expert_weights_norm": True, "expert_weights_scale": 1.5, "expert_group_count": 1},
        recurrent(also=of_nemotron),
    ),
    "qwen35": Case("qwen35", "Qwen3_5Text", QWEN35, QWEN35_KEYS, recurrent(also=of_qwen35)),
    "qwen35moe": Case(
        "qwen35moe",
        "Qwen3_5MoeText",
        {**QWEN35, **ROUTED, **SHARED},
        {**QWEN35_KEYS, **ROUTED_KEYS, "expert_shared_feed_forward_length": 20, "feed_forward_length": None},
        recurrent(also=of_qwen35),
    ),
    "qwen3next": Case(
        "qwen3next",
        "Qwen3Next",
        {**DELTA, **ROUTED, **SHARED},
        {**DELTA_KEYS, **ROUTED_KEYS, "expert_shared_feed_forward_length": 20},
        recurrent(also=of_qwen3next),
    ),
}


def read(file: Path) -> Any:
    source = sources.find(str(file))
    made, _ = source.model(AutoModelForCausalLM, source.config(), torch.float32, True)
    return made.eval()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.model()
    found = read(case.save(tmp_path / "a.gguf", model))
    ids = torch.arange(3, 3 + LENGTH)[None]
    with torch.no_grad():
        expected = model(ids).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(found(ids).logits, expected, rtol=0, atol=1e-5)
    assert getattr(found.config, "max_position_embeddings", None) in (128, None) or case.kind == "Falcon"


@pytest.mark.parametrize(
    "name", ["deci", "gemma4", "glm4", "jamba", "llama of as many key heads", "qwen2", "starcoder2"]
)
def test_fused_queries_keys_and_values(name: str, tmp_path: Path) -> None:
    """As by ``--fuse-qkv``, with biases."""
    case = CASES[name]
    model = case.model()
    found, plain = read(case.save(tmp_path / "a.gguf", model, fuse=True)), read(case.save(tmp_path / "b.gguf", model))
    assert "blk.1.attn_qkv.weight" in GGUFFile(tmp_path / "a.gguf").tensors
    weights = plain.state_dict()
    assert found.state_dict().keys() == weights.keys()
    assert all(torch.equal(weights[key], weight) for key, weight in found.state_dict().items())


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen3next"])
def test_a_block_after_the_layers_drafts(name: str, tmp_path: Path) -> None:
    """Trees have the probabilities of transformers' layer with the weights that were written."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", FULL]
    case = replace(CASES[name], fields={**CASES[name].fields, "layer_types": kinds})
    model = case.model()
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, [FULL]
    built = mtp_model(model)
    del model.config.num_mtp_layers, model.config.mtp_layer_types
    recurrent = [*(kind != FULL for kind in kinds), False]
    keys = {"block_count": 5, "nextn_predict_layers": 1, "attention.recurrent_layers": recurrent}
    file = case.save(tmp_path / "a.gguf", model, keys, appended(built, 4))
    drafter: Any = make_drafter("mtp", str(file))
    expected, found = built.layers.state_dict(), drafter.network.layers.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)
    drafter.top_k = 3
    check_paths(read(file), text_inputs(2, 9), drafter, partial(gain_of, built, model), nodes=7, depth=1, new=6)
    others = dict.fromkeys(tensor for tensor in GGUFFile(file).tensors if re.match(r"blk\.[0-3]\.", tensor))
    alone = case.save(tmp_path / "mtp.gguf", model, keys, appended(built, 4), **others)
    for spec in (str(alone), f"mtp:{alone}"):
        weights = make_drafter(spec).network.layers.state_dict()  # type: ignore[union-attr]
        assert all(torch.equal(weights[key], value) for key, value in found.items())
    with pytest.raises(mmspec.UserError, match="expected a model, found only layers that draft for one: --drafter mtp"):
        read(alone)


def test_a_block_that_lacks_a_tensor_does_not_draft(tmp_path: Path) -> None:
    case = CASES["qwen35"]
    ones = {"blk.4.nextn.eh_proj.weight": torch.ones(48, 96)}
    keys = {"block_count": 5, "nextn_predict_layers": 1}
    file = case.save(tmp_path / "a.gguf", case.model(), keys, **ones)
    with pytest.raises(mmspec.UserError, match=r"a\.gguf: expected exactly .* MTP layers, .*missing layers\.0\.enorm"):
        make_drafter("mtp", str(file))
    with pytest.raises(mmspec.UserError, match=r"native MTP layers, received none"):
        make_drafter("mtp", str(case.save(tmp_path / "b.gguf", case.model())))


def test_every_architecture_has_a_case() -> None:
    mixtures = {row.partition(" ")[0] for row in gguf_mixtures.ROWS}
    assert {case.architecture for case in CASES.values()} | mixtures == set(ARCHITECTURES)


REFUSED: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    r"found llama\.attention\.novel = 3, which is not known": ("llama", {"attention.novel": 3}, {}),
    r"found blk\.1\.ffn_novel\.weight, which has no place": ("llama", {}, {"blk.1.ffn_novel.weight": torch.ones(8)}),
    r"found blk\.1\.attn_qkv\.weight, which has no place": ("llama", {}, {"blk.1.attn_qkv.weight": torch.ones(7, 48)}),
    r"layers\.1\.mlp\.down_proj\.weight": ("llama", {}, {"blk.1.ffn_down.weight": None}),
    r"expected the key llama\.embedding_length, found none": ("llama", {"embedding_length": None}, {}),
    r"whole numbers from 0 to .* in llama\.attention\.head_count, found 'six'": (
        "llama",
        {"attention.head_count": "six"},
        {},
    ),
    r"one value for all layers as deci\.attention\.head_count, got \[6, 6, 0\]": (
        "deci",
        {"attention.head_count": [6, 6, 0]},
        {},
    ),
    r"5 values as exaone4\.attention\.sliding_window_pattern, got 2": (
        "exaone4",
        {"attention.sliding_window_pattern": [True, False]},
        {},
    ),
    r"llama\.rope\.dimension_count = 16, of llama models of this size, got 8": (
        "llama",
        {"rope.dimension_count": 8},
        {},
    ),
    r"found llama\.attention\.causal = False, which is not known": ("llama", {"attention.causal": False}, {}),
    r"expected bloom\.feed_forward_length = 192, got 190": ("bloom", {"feed_forward_length": 190}, {}),
    **{
        rf"expected {name}\.attention\.head_count_kv = 6, got 3": (name, {"attention.head_count_kv": 3}, {})
        for name in ("bloom", "gpt2")
    },
    r"expected granite\.rope\.scaling\.finetuned = True, got False": ("granite", {"rope.scaling.finetuned": False}, {}),
    r"expected attention\.layer_norm_epsilon 1e-5": ("olmo", {"attention.layer_norm_epsilon": 1e-6}, {}),
    r"expected gemma4\.attention\.value_length = 16, got 8": ("gemma4", {"attention.value_length": 8}, {}),
    r"one number of key heads for each kind of layer": ("gemma4", {"attention.head_count_kv": [2, 2, 1, 2, 2, 2]}, {}),
    r"expected rope_freqs\.weight of ones": ("gemma4", {}, {"rope_freqs.weight": torch.full((8,), 2.0)}),
    r"expected rope\.scaling\.type linear, yarn, longrope or none, got 'novel'": (
        "qwen2",
        {"rope.scaling.type": "novel"},
        {},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_read_is_refused_by_its_name(message: str, tmp_path: Path) -> None:
    name, keys, tensors = REFUSED[message]
    file = CASES[name].save(tmp_path / "a.gguf", CASES[name].model(), keys, **tensors)
    with pytest.raises(mmspec.UserError, match=message):
        read(file)


@pytest.mark.parametrize(("part", "whole"), [(2, 98), (122, 448), (96, 128)])
def test_parts_of_heads_turn_at_every_size(part: int, whole: int, tmp_path: Path) -> None:
    """The configuration has a fraction, whose product with the size is rounded down."""
    sizes = {"hidden_size": 2 * whole, "num_attention_heads": 2, "num_key_value_heads": 2}
    keys = {"embedding_length": 2 * whole, "attention.head_count": 2, "rope.dimension_count": part}
    case = Case("phi3", "Phi3", sizes, keys)
    assert 2 * read(case.save(tmp_path / "a.gguf", case.model())).model.rotary_emb.inv_freq.numel() == part
