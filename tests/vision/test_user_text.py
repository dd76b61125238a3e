"""Tests of special tokens typed in prompts with images, with the processors of LLaVA and Qwen-VL."""

import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

import mmspec
from mmspec.vision.processor import VisionProcessor
from tests.mmspec.targets.test_user_text import chatml
from tests.model_folders import save_llava

_IMAGE = np.arange(3 * 56 * 56, dtype=np.uint8).reshape(56, 56, 3)


class _QwenProcessor(Qwen2VLProcessor):
    """Without the video processor, which needs torchvision."""

    def __init__(self, images, tokenizer):
        self.image_processor, self.tokenizer, self.chat_template = images, tokenizer, tokenizer.chat_template
        self.video_processor = None
        for kind in ("image", "video"):
            setattr(self, f"{kind}_token", f"<|{kind}_pad|>")
            setattr(self, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return mmspec.load(str(save_llava(tmp_path_factory.mktemp("llava"))), None)


def _qwen():
    tokenizer = chatml()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    return VisionProcessor(_QwenProcessor(Qwen2VLImageProcessorPil(), tokenizer))


@pytest.fixture(params=["llava", "qwen"])
def processor(request, llava):
    return llava.processor if request.param == "llava" else _qwen()


def _specials(processor):
    return [t.content for t in processor.tokenizer.added_tokens_decoder.values() if t.special]


def _encode(processor, *prompts):
    requests = [{"prompt": p, "images": [_IMAGE]} if isinstance(p, str) else p for p in prompts]
    return processor.encode(requests)


def test_typed_special_tokens_are_encoded_as_text(processor):
    plain = _encode(processor, "What is Q this?")
    control = torch.tensor([processor.tokenizer.convert_tokens_to_ids(name) for name in _specials(processor)])
    for special in _specials(processor):
        prompt = _encode(processor, f"What is {special} this?")
        assert f"What is {special} this?" in processor.tokenizer.decode(prompt.input_ids[0])
        kept = [ids[torch.isin(ids, control)] for ids in (plain.input_ids[0], prompt.input_ids[0])]
        assert torch.equal(*kept)
        for name, value in plain.inputs.items():
            if name != "mm_token_type_ids":
                assert torch.equal(value, prompt.inputs[name])


def test_typed_tokens_do_not_affect_other_rows(processor):
    special = _specials(processor)[-1]
    alone = _encode(processor, "What is this?").input_ids[0]
    both = _encode(processor, "What is this?", f"A longer one: what is {special}{special}?")
    assert torch.equal(both.input_ids[0, -len(alone) :], alone)
    assert both.attention_mask is not None
    assert int(both.attention_mask[0].sum()) == len(alone)


def test_items_that_spell_a_special_token_together(processor):
    """The templates join them without a separator."""
    specials = _specials(processor)
    control = torch.tensor(processor.tokenizer.convert_tokens_to_ids(specials))
    kept = []
    for texts in (("a", "b"), *((special[:2], f"{special[2:]}b") for special in specials)):
        content = [{"type": "image"}, *({"type": "text", "text": text} for text in texts)]
        ids = _encode(processor, {"prompt": [{"role": "user", "content": content}], "images": [_IMAGE]}).input_ids[0]
        assert "".join(texts) in processor.tokenizer.decode(ids)
        kept.append(ids[torch.isin(ids, control)].tolist())
    assert kept == kept[:1] * len(kept)


def test_a_typed_image_token_needs_no_image(llava):
    assert llava.generate("Describe <image> and </s>.", max_new_tokens=4).stats.num_generated_tokens


@pytest.fixture(params=[True, False], ids=["pad token", "no pad token"])
def pads(request, processor):
    """Whether the tokenizer has a pad token."""
    token = processor.tokenizer.pad_token
    if not request.param:
        processor.tokenizer.pad_token = None
    yield request.param
    processor.tokenizer.pad_token = token


def test_the_users_processor_stays_as_it_was(processor, pads):
    """Its tokenizer is replaced in a copy, and given a pad token for the time of a call."""
    special = _specials(processor)[-1]
    before = {owner: dict(vars(owner)) for owner in (processor.plain, processor.tokenizer)}
    for prompts in (["What?"], [f"What is {special}?"], ["What?", f"A longer one: what is {special}?"]):
        _encode(processor, *prompts)
        for owner, values in before.items():
            assert vars(owner).keys() == values.keys()
            assert all(vars(owner)[name] is value for name, value in values.items())
        assert (processor.tokenizer.pad_token is not None) is pads
