"""Mixers that compute their recurrence themselves: what their adapters add to the tests of all recurrent layers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList

import mmspec
from mmspec import UserError
from mmspec.core.target import Prompt
from mmspec.targets.transformers_target import TransformersTarget
from tests.targets import assert_trees_equal_paths, plain_logits, prefilled
from tests.tiny import random_tree, root_path, shared_model
from tests.tiny.configs import MIXER_CONFIGS
from tests.tiny.models import text_inputs, text_model


def biased():
    """A RecurrentGemma with biases, as checkpoints have: padding then enters transformers' convolutions."""
    model = text_model("recurrent_gemma")
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_(std=0.3)
    return model


def layered(*kinds):
    """A MiniMax with these kinds of layers."""
    torch.manual_seed(0)
    config = MIXER_CONFIGS["minimax"]()
    config.layer_types = [f"{kind}_attention" for kind in kinds]
    config.num_hidden_layers = len(kinds)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kinds", [("linear", "linear", "full", "linear"), ("full", "full", "linear"), ("linear",) * 3])
def test_lightning_attention_in_any_layer(kinds):
    assert_trees_equal_paths(layered(*kinds), text_inputs(2, 9), steps=3)


def test_padding_does_not_enter_convolutions():
    """Rows equal their prompts without padding. They differ in transformers' own pass over the padded batch."""
    model, inputs = biased(), text_inputs(3, 9)
    assert_trees_equal_paths(model, inputs, steps=3)
    alone = plain_logits(model, {"input_ids": inputs["input_ids"][2:, 2:]}, [])[-1]
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(**inputs, position_ids=positions, use_cache=False).logits[2, -1]
    assert (padded - alone).abs().max() > 0.1


@pytest.mark.parametrize("name", MIXER_CONFIGS)
def test_plain_decoding_goes_on_between_passes(name):
    """Another caller's states, which RecurrentGemma's modules hold, are not those of the target."""
    model, ids, said = shared_model(name), text_inputs(1, 9)["input_ids"], []
    target, g = TransformersTarget(model), torch.Generator().manual_seed(0)

    def interrupt(ids, scores):
        prefilled(target, Prompt(torch.randint(3, 90, (1, 7), generator=g)), 16)
        tree = random_tree(g, 1, 6, 90, ragged=False)
        target.verify(tree)
        path = root_path(tree, 0, 5)
        with torch.inference_mode():
            target.runner.commit_nodes(torch.tensor([path]), lambda: [path])
        target.keep([])
        said.append(path)
        return scores

    options = dict(max_new_tokens=10, do_sample=False, eos_token_id=None)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    expected = model.generate(ids, **options)
    with target.decoder.layers.applied():  # as while a pass of another thread runs
        found = model.generate(ids, **options, logits_processor=LogitsProcessorList([interrupt]))
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    assert len(said) == 10


def test_windows_beside_lightning_attention_are_refused():
    config = MIXER_CONFIGS["minimax"]()
    config.sliding_window = 8
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="must have no window: got 8 tokens"):
        mmspec.generate(model, torch.tensor([[5, 6]]), drafter=None, max_new_tokens=2)
