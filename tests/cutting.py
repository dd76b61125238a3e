"""Any model class of transformers, built from its default configuration with sizes cut and random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB = 128
_SIZES = {
    64: "hidden_size n_embd d_model dim emb_dim intermediate_size ffn_dim d_inner n_inner d_ff dim_ff ffn_hidden_size "
    "decoder_ffn_dim encoder_ffn_dim expert_ffn_hidden_size lru_width",
    32: "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp q_lora_rank kv_lora_rank",
    16: "head_dim v_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_d_state",
    8: "qk_rope_head_dim rotary_dim sliding_window attention_chunk_size chunk_size mamba_n_heads",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_attention_heads n_head n_heads "
    "encoder_attention_heads decoder_attention_heads linear_num_key_heads linear_num_value_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts",
    2: "num_key_value_heads num_experts_per_tok moe_topk moe_k",
    1: "n_group topk_group first_k_dense_replace num_kv_shared_layers mamba_n_groups",
}
"""Names that configurations give to sizes, by what each is cut to: 4 heads of 16 in 2 groups."""
_VOCABULARIES = ("vocab_size", "n_words", "vocab_size_per_layer_input")


def cut(config_class: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """A class's default configuration with sizes cut: no field is added, token ids beyond the vocabulary become 0.

    Args:
        changes: further fields of the class, where sizes depend on each other in a way of its own.
    """
    default = config_class()
    fields = vars(default)
    sizes = {name: size for size, names in _SIZES.items() for name in names.split()}
    if "qk_rope_head_dim" in fields:  # multi-head latent attention, where these are equal by definition
        sizes |= {"head_dim": sizes["qk_rope_head_dim"], "num_key_value_heads": sizes["num_attention_heads"]}
    values: dict[str, Any] = {name: VOCAB for name in _VOCABULARIES if name in fields}
    for name, size in sizes.items():
        if isinstance(fields.get(name), int) and fields[name] > size:
            values[name] = size
    for name, value in fields.items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= VOCAB:
            values[name] = 0
        elif isinstance(value, PreTrainedConfig):
            values[name] = cut(type(value))
    if unknown := sorted(changes.keys() - fields.keys()):
        raise TypeError(f"{config_class.__name__} has no {', '.join(unknown)}")
    return config_class(**{**values, **changes})


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model whose greedy answers vary."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if (head := model.get_output_embeddings()) is not None:
        head.weight.data.normal_(std=0.5)
    return model
