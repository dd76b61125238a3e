"""Published Kangaroo adapters, and plain loops over their tensors."""

from __future__ import annotations

import json

import torch
from transformers import LlamaConfig, LlamaModel

from tests.draft_checks import plain_pass

SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
ATTENTION = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
NAMES = [*ATTENTION, "layers.0.input_layernorm.weight", "norm.weight"]


def configuration(**changes):
    sizes = SIZES | {"intermediate_size": 80, "num_hidden_layers": 1, "vocab_size": 101, "rope_theta": 5e5}
    return {**sizes, "model_type": "llama", "architectures": ["LlamaForCausalLM"], **changes}


def adapter(tensors=None):
    """Transformers' Llama of one layer, whose MLP gives nothing; random weights by default."""
    torch.manual_seed(3)
    model = LlamaModel(LlamaConfig(**SIZES, intermediate_size=8, num_hidden_layers=1, vocab_size=8)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in NAMES:
                parameter.copy_(torch.randn_like(parameter) * 0.3 if tensors is None else tensors[name])
        model.layers[0].mlp.down_proj.weight.zero_()
    return model


def published(folder, model, **changes):
    """A folder of an adapter as it is published."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in NAMES}
    (folder / "config.json").write_text(json.dumps(configuration(**changes)))
    torch.save(tensors, folder / "pytorch_model.bin")
    return tensors


@torch.no_grad()
def logits(model, layers, plain, row, said):
    """Logits of the adapter after the prompt and every token of the answer, (1 + tokens, vocab).

    Args:
        layers: number of target layers that run.
        plain: the adapter.
    """
    early = plain_pass(model, row, said).outputs[layers - 1][None]
    last = plain(inputs_embeds=early, use_cache=False).last_hidden_state
    return model.get_output_embeddings()(last)[0, row["input_ids"].shape[1] - 1 :]
