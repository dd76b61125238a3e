"""Prompts with images and videos reach models as their own processors encode them; typed special tokens are text."""

import base64
import io
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as t
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers.video_utils import VideoMetadata, read_video_pyav

pytest.importorskip("av")

import av

import mmspec
from mmspec import Pipeline
from mmspec.errors import UserError
from mmspec.vision.gguf import images_alone
from mmspec.vision.processor import VisionProcessor, VisionTarget
from mmspec.vision.video import Video, load_video
from tests.mmspec.targets.test_detokenizer import chatml
from tests.model_folders import save_llava
from tests.tiny import byte_tokenizer

PICTURE = Image.new("RGB", (28, 28), "red")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}USER: {% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
LEVELS = [10, 40, 70, 100, 130, 160, 190, 220]
TOKENS = ["<image>", "<video>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
FILMS = [("mp4", 25), ("mp4", Fraction(30000, 1001)), ("mkv", Fraction(24000, 1001)), ("mkv", 60), ("avi", 30)]
IMAGE = np.arange(3 * 56 * 56, dtype=np.uint8).reshape(56, 56, 3)


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


def clip():
    frames = [Image.new("RGB", (64, 48), (level, level, level)) for level in LEVELS]
    return Video(frames, [0.25 + 0.5 * k for k in range(len(frames))], 0.5 * len(frames), "clip")


class Recorder:
    """Stands for a processor with a video processor; runs without torchvision, too."""

    video_processor = object()
    image_token, video_token = "<image>", "<video>"

    def __init__(self):
        self.tokenizer = tokenizer()
        self.tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})

    def __call__(self, **arguments):
        self.arguments = arguments
        return self.tokenizer(arguments["text"], padding=True, return_tensors="pt")


def recorded(*videos):
    """What the model's processor is given of videos."""
    processor = Recorder()
    VisionProcessor(processor).encode([{"prompt": "What?", "videos": list(videos)}])
    return processor.arguments


def test_times_of_frames_in_memory():
    (metadata,) = recorded(clip())["videos_kwargs"]["video_metadata"]
    metadata = VideoMetadata(**metadata)
    assert metadata.timestamps == clip().times
    assert (metadata.duration, metadata.sampled_fps) == (4.0, 2.0)


def write_film(path, stamps, rate):
    """A film with B-frames, and one frame per presentation time, given in ticks of 1 / ``rate`` seconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4" if path.suffix == ".avi" else "libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number, stamp in enumerate(stamps):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 + 4 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = stamp, 1 / Fraction(rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(("suffix", "rate"), FILMS)
def test_a_file_reaches_the_processor_as_transformers_loads_it(tmp_path, suffix, rate):
    path = write_film(tmp_path / f"a.{suffix}", range(50), rate)
    film = load_video(path, frames=8)
    frames, metadata = read_video_pyav(str(path), lambda metadata: [round(time * film.fps) for time in film.times])
    if suffix == "mkv":
        metadata.update({"total_num_frames": 50, "duration": 50 / rate})  # which transformers' reader takes for empty
    arguments = recorded(film)
    assert np.array_equal(arguments["videos"][0], frames)
    assert arguments["videos_kwargs"]["do_sample_frames"] is False
    (ours,) = arguments["videos_kwargs"]["video_metadata"]
    assert ours.pop("duration") == pytest.approx(float(metadata.duration), abs=2e-3)
    assert ours == {name: metadata[name] for name in ours}


def test_times_at_a_variable_frame_rate(tmp_path):
    stamps = [*range(0, 2000, 100), *range(22_000, 23_000, 100)]
    film = load_video(write_film(tmp_path / "a.mp4", stamps, 1000), frames=30)
    (metadata,) = recorded(film)["videos_kwargs"]["video_metadata"]
    metadata = VideoMetadata(**metadata)
    assert metadata.timestamps == pytest.approx(film.times, abs=5e-4)
    assert set(metadata.timestamps) <= {stamp / 1000 for stamp in stamps}
    assert metadata.sampled_fps == pytest.approx(30 / film.duration, rel=1e-3)


@pytest.fixture(scope="module")
def loaded_llava(tmp_path_factory):
    return mmspec.load(str(save_llava(tmp_path_factory.mktemp("llava"))), None)


@pytest.fixture(params=["llava", "qwen"])
def processor(request, loaded_llava):
    if request.param == "llava":
        return loaded_llava.processor
    tokenizer = chatml()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    plain = images_alone(t.Qwen2VLProcessor)(
        t.Qwen2VLImageProcessorPil(), tokenizer, chat_template=tokenizer.chat_template
    )
    for kind in ("image", "video"):
        setattr(plain, f"{kind}_token", f"<|{kind}_pad|>")
        setattr(plain, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>"))
    return VisionProcessor(plain)


def specials(processor):
    return [t.content for t in processor.tokenizer.added_tokens_decoder.values() if t.special]


def encode(processor, *prompts):
    requests = [{"prompt": p, "images": [IMAGE]} if isinstance(p, str) else p for p in prompts]
    return processor.encode(requests)


def test_typed_special_tokens_are_encoded_as_text(processor):
    plain = encode(processor, "What is Q this?")
    control = torch.tensor([processor.tokenizer.convert_tokens_to_ids(name) for name in specials(processor)])
    for special in specials(processor):
        prompt = encode(processor, f"What is {special} this?")
        assert f"What is {special} this?" in processor.tokenizer.decode(prompt.input_ids[0])
        kept = [ids[torch.isin(ids, control)] for ids in (plain.input_ids[0], prompt.input_ids[0])]
        assert torch.equal(*kept)
        for name, value in plain.inputs.items():
            if name != "mm_token_type_ids":
                assert torch.equal(value, prompt.inputs[name])


def test_typed_tokens_do_not_affect_other_rows(processor):
    special = specials(processor)[-1]
    alone = encode(processor, "What is this?").input_ids[0]
    both = encode(processor, "What is this?", f"A longer one: what is {special}{special}?")
    assert torch.equal(both.input_ids[0, -len(alone) :], alone)
    assert both.attention_mask is not None
    assert int(both.attention_mask[0].sum()) == len(alone)


def test_items_that_spell_a_special_token_together(processor):
    """The templates join them without a separator."""
    names = specials(processor)
    control = torch.tensor(processor.tokenizer.convert_tokens_to_ids(names))
    kept = []
    for texts in (("a", "b"), *((special[:2], f"{special[2:]}b") for special in names)):
        content = [{"type": "image"}, *({"type": "text", "text": text} for text in texts)]
        ids = encode(processor, {"prompt": [{"role": "user", "content": content}], "images": [IMAGE]}).input_ids[0]
        assert "".join(texts) in processor.tokenizer.decode(ids)
        kept.append(ids[torch.isin(ids, control)].tolist())
    assert kept == kept[:1] * len(kept)


def test_a_typed_image_token_needs_no_image(loaded_llava):
    assert loaded_llava.generate("Describe <image> and </s>.", max_new_tokens=4).stats.num_generated_tokens


def test_raw_prompts_have_special_tokens_but_no_images(processor):
    media = [processor.plain.image_token, getattr(processor.plain, "video_token", None)]
    for special in specials(processor):
        prompt, number = f"What is {special} this?", processor.tokenizer.convert_tokens_to_ids(special)
        text = processor.encode([{"prompt": prompt}], chat_template=False, parse_special=False).input_ids[0].tolist()
        assert processor.tokenizer(prompt, split_special_tokens=True)["input_ids"] == text
        if special in media:
            with pytest.raises(UserError, match=f"images and videos need chat messages: got their token {number}"):
                processor.encode([{"prompt": prompt}], chat_template=False)
            continue
        assert number in processor.encode([{"prompt": prompt}], chat_template=False).input_ids[0].tolist()
    with pytest.raises(UserError, match="images and videos need a chat template: got chat_template=False"):
        processor.encode([{"prompt": "a", "images": [IMAGE]}], chat_template=False)


@pytest.fixture(params=[True, False], ids=["pad token", "no pad token"])
def pads(request, processor):
    token = processor.tokenizer.pad_token
    if not request.param:
        processor.tokenizer.pad_token = None
    yield request.param
    processor.tokenizer.pad_token = token


def test_the_users_processor_stays_as_it_was(processor, pads):
    """Its tokenizer is replaced in a copy, and given a pad token for the time of a call."""
    special = specials(processor)[-1]
    before = {owner: dict(vars(owner)) for owner in (processor.plain, processor.tokenizer)}
    for prompts in (["What?"], [f"What is {special}?"], ["What?", f"A longer one: what is {special}?"]):
        encode(processor, *prompts)
        for owner, values in before.items():
            assert vars(owner).keys() == values.keys()
            assert all(vars(owner)[name] is value for name, value in values.items())
        assert (processor.tokenizer.pad_token is not None) is pads
