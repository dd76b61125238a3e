"""Vision-language models as targets: trees behind images equal plain passes."""

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

import mmspec
from mmspec import UserError, plugins
from mmspec.checking.oracle import Oracle
from mmspec.core.target import Prompt
from mmspec.drafters.small import Small
from tests.targets import assert_trees_equal_paths, prefilled, prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import IMAGE, TINY_SIZES, VIDEO, VISION_CONFIGS
from tests.tiny.models import video_inputs, vision_inputs, vision_model


@pytest.mark.parametrize("name", VISION_CONFIGS)
@pytest.mark.parametrize(("batch", "images"), [(1, 2), (3, 1), (1, 0)])
def test_every_node_equals_its_path(name, batch, images):
    assert_trees_equal_paths(shared_model(name), vision_inputs(name, batch, images), steps=2, nodes=6, seed=batch)


@pytest.mark.parametrize("name", VISION_CONFIGS)
def test_eager_attention(name):
    model = vision_model(name)
    model.set_attn_implementation("eager")
    assert_trees_equal_paths(model, vision_inputs(name, 2, 1), steps=1, nodes=6)


@pytest.mark.parametrize("name", VISION_CONFIGS)
def test_a_prompt_that_ends_with_an_image(name):
    """With several position axes, ``generate`` goes on from each axis of the image's last token, the model's own
    forward from the greatest one of the image."""
    inputs, model = vision_inputs(name, 1, 1), shared_model(name)
    keep = int(torch.isin(inputs["input_ids"][0], torch.tensor([IMAGE, VIDEO])).nonzero().max()) + 1
    for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if key in inputs:
            inputs[key] = inputs[key][:, :keep]
    options = {**inputs, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    if name.startswith("qwen"):
        with pytest.raises(UserError, match=r"^a prompt with several position axes must end on text: got an image or"):
            mmspec.generate(model, drafter="ngram", nodes=6, **options)
    else:
        assert_trees_equal_paths(model, inputs, steps=1, nodes=5)
        assert torch.equal(mmspec.generate(model, drafter="ngram", nodes=6, **options), model.generate(**options))


@pytest.mark.parametrize("name", [name for name in VISION_CONFIGS if name.startswith("qwen")])
def test_text_after_a_video_of_many_frames(name):
    """Its positions follow the picture's size, and may be below those of the last frames."""
    model, inputs = shared_model(name), video_inputs(name)
    assert_trees_equal_paths(model, inputs, steps=1, nodes=5)
    options = {**inputs, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    reference = model.generate(**options)
    oracle = Oracle(reference[:, inputs["input_ids"].shape[1] :].tolist(), vocab=90)
    assert torch.equal(mmspec.generate(model, drafter=oracle, nodes=10, **options), reference)


@pytest.mark.parametrize("name", VISION_CONFIGS)
def test_visual_positions_and_what_was_fed_there(name):
    inputs = vision_inputs(name, 2, 1)
    target = plugins.target_class(shared_model(name).config)(shared_model(name))
    output = prefilled(target, prompt_of(inputs), 8)
    ids = inputs["input_ids"]
    assert torch.equal(output.visual, (ids == IMAGE) | (ids == VIDEO))
    assert output.embeds.shape == (*ids.shape, 48)
    text = ~output.visual
    with torch.no_grad():
        torch.testing.assert_close(output.embeds[text], target.embed(ids)[text])
        assert not torch.allclose(output.embeds[~text], target.embed(ids)[~text])
    assert output.features["last"].shape == output.embeds.shape


@pytest.mark.parametrize("name", ["llava", "llava_onevision", "qwen3_vl"])
def test_prompts_with_images_are_prefilled_in_chunks(name):
    model = shared_model(name)
    target, prompt = plugins.target_class(model.config)(model), prompt_of(vision_inputs(name, 1))
    *_, whole = target.prefill([prompt], [8], ("last",))
    *earlier, last = target.prefill([prompt], [8], ("last",), 7)
    assert len(earlier) == -(-prompt.input_ids.shape[1] // 7) - 1
    torch.testing.assert_close(last.logits, whole.logits, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(last.features["last"], whole.features["last"], atol=2e-4, rtol=2e-4)


def gemma3():
    """Its image tokens attend to each other in both directions."""
    sizes = {name: size for name, size in TINY_SIZES.items() if name != "pad_token_id"}
    torch.manual_seed(0)
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**sizes, sliding_window=64, query_pre_attn_scalar=12),
        vision_config=SiglipVisionConfig(**vision, image_size=16, patch_size=4),
        mm_tokens_per_image=16,
        image_token_index=IMAGE,
        initializer_range=0.25,
    )
    ids = torch.tensor([[5, 6, 7, *[IMAGE] * 16, 8, 9, 10, 11, 12]])
    pixels = torch.randn(1, 3, 16, 16)
    return Gemma3ForConditionalGeneration(config).eval(), ids, pixels


@pytest.mark.drafter_fails
def test_images_with_attention_in_both_directions_are_prefilled_whole(caplog):
    model, ids, pixels = gemma3()
    inputs = {"pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}
    with torch.no_grad():
        expected = model(input_ids=ids, **inputs).logits[:, -1:]
    target = plugins.target_class(model.config)(model)
    for chunk in (None, 7):
        *earlier, last = target.prefill([Prompt(ids, None, inputs)], [8], ("last",), chunk)
        assert not earlier
        torch.testing.assert_close(last.logits, expected, atol=2e-4, rtol=2e-4)
    draft = Small(model, share=0.5)
    options = {"max_new_tokens": 8, "do_sample": False, **inputs}
    given = mmspec.generate(model, input_ids=ids, drafter=draft, **options)
    assert torch.equal(given, model.generate(input_ids=ids, **options))
    assert "visual tokens can be left out where attention is causal and each token's inputs are its own" in caplog.text
