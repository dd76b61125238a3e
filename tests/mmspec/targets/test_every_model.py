"""Every causal language model class of transformers: the tokens of ``generate``, or one line that says why not."""

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

import mmspec
from eval.decoding.oracle import Oracle
from mmspec import UserError
from tests.cutting import cut, random_model

_CLASSES = {config_class.model_type: config_class for config_class in MODEL_FOR_CAUSAL_LM_MAPPING}
_LINEAR, _FULL = "linear_attention", "full_attention"
_CHANGES = {  # what the general cut leaves inconsistent
    "bamba": dict(attn_layer_indices=[1]),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": dict(layer_types=[_LINEAR, _FULL] * 2),
    "hunyuan_v1_dense": dict(head_dim=16),
    "hunyuan_v1_moe": dict(head_dim=16),
    "jamba": dict(num_hidden_layers=8),
    "lfm2": dict(layer_types=["conv", _FULL] * 2),
    "lfm2_moe": dict(layer_types=["conv", _FULL] * 2),
    "mamba2": dict(num_heads=8),
    "ministral": dict(head_dim=16),
    "zamba": dict(layers_block_type=[_LINEAR, "hybrid"] * 2),
    "zamba2": dict(layers_block_type=[_LINEAR, "hybrid"] * 2),
}
# transformers cannot build these from their defaults, or cannot generate with them, at any or at these sizes.
_UNBUILT = (
    *("axk2", "bailing_hybrid", "blenderbot", "blt", "cohere_compass_text", "dbrx", "deepseek_v2", "deepseek_v32"),
    *("dots1", "dots3_note", "dots3_note_text", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant"),
    *("glm_moe_dsa", "kimi_linear", "musicgen", "musicgen_melody", "nemotron", "qwen4_exp", "qwen4_exp_text"),
    *("reformer", "xlstm", "xmod"),
)
_EQUAL = ("mamba2", "moshi", "llama", "gpt2", "gemma2", "olmoe", "qwen3_next", "olmo_hybrid", "lfm2")
_EQUAL += ("mamba", "falcon_mamba", "jamba")
_REFUSED = ("git", "electra", "rembert", "bert", "xlm", "rwkv")


def _outcomes(name):
    """Whether a prompt, and a padded batch, are answered as by ``generate`` (True) or refused (False)."""
    model = random_model(cut(_CLASSES[name], **_CHANGES.get(name, {})))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    for rows, length in ((1, 12), (2, 5)):
        ids = torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[1:, :2] = 0
        inputs = dict(input_ids=ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
        reference = model.generate(**inputs)
        oracle = Oracle(reference[:, length:].tolist(), vocab=90)
        refused = ""
        try:
            tokens = mmspec.generate(model, drafter=oracle, nodes=8, **inputs)
        except UserError as error:
            refused = str(error)
        assert len(refused.splitlines()) == 1 if refused else torch.equal(tokens, reference)
        yield not refused


@pytest.mark.parametrize("name", _EQUAL)
def test_the_same_tokens(name):
    assert list(_outcomes(name)) == [True, True]


@pytest.mark.parametrize("name", _REFUSED)
def test_one_line(name):
    assert list(_outcomes(name)) == [False, False]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(_CLASSES.keys() - {*_EQUAL, *_REFUSED, *_UNBUILT}))
def test_the_same_tokens_or_one_line(name):
    assert len(list(_outcomes(name))) == 2
