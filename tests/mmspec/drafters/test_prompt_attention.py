"""Attention weights of prompts, against those that transformers' eager attention returns."""

from __future__ import annotations

import pytest
import torch

from mmspec import plugins
from mmspec.core.target import Prompt
from mmspec.drafters.prompt_share import attention_layers, prompt_attention
from mmspec.targets.packing import pack_model
from mmspec.targets.transformers_target import TransformersTarget
from tests.compiled import needs_kernels
from tests.mmspec.targets.packed import GEMMA3, model_of
from tests.targets import prefilled, prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import VISION_CONFIGS
from tests.tiny.models import text_inputs, text_model, vision_inputs, vision_model

QUERIES = 3


def model_and_inputs(name):
    if name not in VISION_CONFIGS:
        return text_model(name), text_inputs(2, 9)
    return vision_model(name), vision_inputs(name, 1 if name == "llava_onevision" else 2)


@torch.no_grad()
def eager_weights(model, inputs):
    """(batch, queries, length) of each layer of attention, the mean over heads."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation(usual)
    return [weights.mean(1)[:, -QUERIES:] for weights in found if weights is not None]


@pytest.mark.parametrize(
    "name", ["llava", "llava_bamba", "llava_onevision", "qwen2_vl", "qwen3_vl", "qwen3_5", "gemma2"]
)
def test_weights_are_those_of_eager_attention(name):
    """With padding, images, several position axes, other layers in between, and limited scores."""
    model, inputs = model_and_inputs(name)
    expected = eager_weights(model, inputs)
    target, prompt = plugins.target_class(model.config)(model), prompt_of(inputs)
    layers = attention_layers(target.config)
    batch = len(prompt.input_ids)
    prefilled(target, Prompt(torch.tensor([[7, 8, 9]])), 8)  # a row before them, of another length
    output = prefilled(target, prompt, reads=layers)
    if name == "gemma2":
        assert layers == [1]  # layer 0 has a window
        expected = expected[1:]
    for layer, weights in zip(layers, expected, strict=True):
        found = prompt_attention(target, layer, output, 1, QUERIES)
        assert found.shape == (batch, QUERIES, prompt.input_ids.shape[1])
        torch.testing.assert_close(found, weights, atol=1e-5, rtol=1e-4)
    again = prefilled(target, prompt, 8)  # the attention implementation is restored
    assert torch.equal(again.logits, output.logits)


def test_a_prompt_in_chunks():
    model, inputs = shared_model("qwen2_vl"), vision_inputs("qwen2_vl", 1)
    target = plugins.target_class(model.config)(model)
    whole = prefilled(target, prompt_of(inputs), reads=(1,))
    output = prefilled(target, prompt_of(inputs), 8, (1,), 5)
    expected = prompt_attention(target, 1, whole, 0, QUERIES)
    torch.testing.assert_close(prompt_attention(target, 1, output, 1, QUERIES), expected, atol=1e-5, rtol=1e-4)


@needs_kernels
def test_packed_forward():
    """Whose queries and keys have their features in another order, and keys are bfloat16."""
    model, ids = model_of(GEMMA3), torch.arange(5, 25)[None]
    expected = eager_weights(model, {"input_ids": ids})[1]
    pack_model(model, "bfloat16")
    target = TransformersTarget(model)
    assert attention_layers(target.config) == [1]
    output = prefilled(target, Prompt(ids), reads=(1,))
    found = prompt_attention(target, 1, output, 0, QUERIES)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.05)
    assert torch.allclose(found.sum(-1), torch.ones(1, QUERIES))


def test_layers_that_are_not_read():
    assert attention_layers(text_model("mistral-window").config) == []
    model = text_model("doge")  # its layers have masks of their own
    target = TransformersTarget(model)
    assert (
        prompt_attention(target, 1, prefilled(target, Prompt(torch.tensor([[5, 6, 7, 8]])), reads=(1,)), 0, 2) is None
    )
