"""Prompts of models without a chat template, and of templates that begin with the token that the tokenizer adds."""

import base64
import io
from types import SimpleNamespace

import pytest
import torch
import transformers as t
from PIL import Image
from tokenizers.processors import TemplateProcessing

from mmspec import Pipeline
from mmspec.errors import UserError
from mmspec.vision.processor import VisionProcessor, VisionTarget
from tests.tiny import byte_tokenizer

PICTURE = Image.new("RGB", (28, 28), "red")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}USER: {% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def tokenizer(adds_bos=False):
    backend = type(byte_tokenizer().backend_tokenizer).from_str(byte_tokenizer().backend_tokenizer.to_str())
    if adds_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return t.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
    )


def images():
    processor = t.SiglipImageProcessor(size={"height": 28, "width": 28})
    processor.image_seq_length = 4
    return processor


def llava(template):
    return t.LlavaProcessor(
        images(), tokenizer(adds_bos=True), patch_size=14, vision_feature_select_strategy="full", chat_template=template
    )


def encoded(processor, *requests):
    return VisionProcessor(processor).encode(requests).input_ids.tolist()


def test_items_of_openais_api_are_those_of_transformers():
    file = io.BytesIO()
    PICTURE.save(file, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    def prompt(item):
        content = [{"type": "text", "text": "a"}, item]
        return VisionProcessor(llava(TEMPLATE)).encode([{"prompt": [{"role": "user", "content": content}]}])

    expected = prompt({"type": "image", "image": PICTURE})
    for item in ({"type": "image_url", "image_url": {"url": uri}}, {"type": "image_url", "image_url": uri}):
        found = prompt(item)
        assert found.input_ids.tolist() == expected.input_ids.tolist()
        assert torch.equal(found.inputs["pixel_values"], expected.inputs["pixel_values"])
    with pytest.raises(UserError, match="expected a local file, received a URL"):
        prompt({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}})


@pytest.mark.parametrize("text", ["caption en", "detect a cat ; a dog", "answer en what?\n"])
@pytest.mark.parametrize("count", [1, 2])
def test_paligemma(text, count):
    processor = t.PaliGemmaProcessor(images(), tokenizer())
    theirs = processor(images=[PICTURE] * count, text="<image>" * count + text, return_tensors="pt")
    assert encoded(processor, {"prompt": text, "images": [PICTURE] * count}) == theirs["input_ids"].tolist()


def test_paligemma_reads_typed_tokens_as_text():
    processor = t.PaliGemmaProcessor(images(), tokenizer())
    (ids,) = encoded(processor, {"prompt": "what is <image>?", "images": [PICTURE]})
    assert ids.count(processor.image_token_id) == 4
    assert processor.tokenizer.decode(ids) == "<image>" * 4 + "<s>what is <image>?\n"


def test_images_stay_between_the_texts_of_a_base_model():
    processor = t.AriaProcessor(t.AriaImageProcessorPil(), tokenizer(), size_conversion={490: 2, 980: 4})
    items = [{"type": "text", "text": "one "}, {"type": "image"}, {"type": "text", "text": " two"}]
    (ids,) = encoded(processor, {"prompt": [{"role": "user", "content": items}], "images": [PICTURE]})
    text = processor.tokenizer.decode(ids)
    assert text.startswith("one <image>")
    assert text.endswith("<image> two")


def test_llava_without_its_template():
    (ids,) = encoded(llava(None), {"prompt": "What?", "images": [PICTURE]})
    assert llava(None).tokenizer.decode(ids) == "<s>USER: " + "<image>" * 4 + "\nWhat? ASSISTANT:"


def test_a_processor_without_image_token():
    processor = SimpleNamespace(tokenizer=tokenizer())
    message = r"images need a chat template or image_token: the model's processor has neither"
    with pytest.raises(UserError, match=message):
        encoded(processor, {"prompt": "What?", "images": [PICTURE]})


def test_a_template_that_begins_with_the_first_token():
    """The tokenizer adds it to every text: it must be there once, as in transformers' own path."""
    processor = llava(TEMPLATE)
    content = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What?"}]
    theirs = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    ours = encoded(processor, {"prompt": "What?", "images": [PICTURE]})
    assert ours == theirs["input_ids"].tolist()
    typed, plain = encoded(
        processor, {"prompt": "<s>What?", "images": [PICTURE]}, {"prompt": "What?", "images": [PICTURE]}
    )
    assert typed.count(1) == plain.count(1) == 1
    assert plain[-len(ours[0]) :] == ours[0]


def test_paligemma_generates_as_transformers():
    torch.manual_seed(0)
    tower = {"image_size": 28, "patch_size": 14, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    text = {"vocab_size": 1300, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}
    config = t.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", "num_hidden_layers": 1, **tower},
        text_config={"model_type": "gemma", "num_hidden_layers": 2, "num_key_value_heads": 1, **text},
        projection_dim=32,
        tie_word_embeddings=False,
        image_token_index=259,
    )
    model = t.PaliGemmaForConditionalGeneration(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    processor = t.PaliGemmaProcessor(images(), tokenizer())
    given = processor(images=PICTURE, text="<image>caption en", return_tensors="pt")
    expected = model.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
    assert len(set(expected)) > 3
    pipe = Pipeline(VisionTarget(model), VisionProcessor(processor), None)
    assert pipe.generate("caption en", images=[PICTURE], max_new_tokens=8).token_ids == expected
