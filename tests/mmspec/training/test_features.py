"""Encoded conversations equal the inputs of inference; features equal plain forward passes, alone and in batches."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import fields, replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models
from transformers import LlavaNextProcessor, PreTrainedTokenizerFast, Qwen2VLProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import mmspec
from mmspec.core.target import output_of
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.sampling.params import SamplingParams
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training.answering import AnswerGenerator, PendingConversation
from mmspec.training.data import Conversation, read, text_of, to_record
from mmspec.training.features import Encoder, Extractor, FeatureCache, Features, Recorder, recorded_features
from mmspec.vision.embedded import samples
from mmspec.vision.processor import VisionProcessor, VisionTarget
from tests.model_folders import save_text_model
from tests.tiny import byte_model, byte_tokenizer, shared_model

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?!\n/"
SPECIAL = {"<image>": 96, "<video>": 97, "<|vision_start|>": 98, "<|vision_end|>": 99}
ITEMS = (
    "{% macro items(message, image, video) %}{% for item in message['content'] %}{% if item['type'] == 'image' %}"
    "{{ image }}{% elif item['type'] == 'video' %}{{ video }}{% else %}{{ item['text'] }}{% endif %}{% endfor %}"
    "{% endmacro %}"
)
# As Qwen-VL's: a line break behind the end of an answer.
QWEN = ITEMS + (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ items(message, '<|vision_start|><image><|vision_end|>',"
    " '<|vision_start|><video><|vision_end|>') }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n"
    "{% endif %}"
)
# As LLaVA-1.5's: no end of an answer is written.
VICUNA = ITEMS + (
    "{% for message in messages %}{{ message['role'].upper() }}: {{ items(message, '<image>\n', '<video>\n') }} "
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TEXT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}\n"
    + ("{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
)


def letters(merges=()) -> PreTrainedTokenizerFast:
    """One token per character, ids 3 and up, in the vocabulary of the tiny models."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{letter: i for i, letter in enumerate(LETTERS, start=3)}}
    for merge in merges:
        vocab["".join(merge)] = len(vocab)
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), 96)}
    vocab |= SPECIAL
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", *SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>", "video_token": "<video>"},
    )


class WithClips(Qwen2VLProcessor):
    """Qwen's own video processor needs torchvision; this one takes every other frame."""

    timestamps = False

    def check_argument_for_proper_class(self, argument_name, argument):
        return None

    def validate_inputs(self, *args, **keywords):
        return None

    def __call__(self, images=None, text=None, videos=None, videos_kwargs=None, **keywords):
        seen = {"pixel_values_videos": [], "video_grid_thw": []}
        text = list(text)
        for clip in videos or []:
            pixels = [self.image_processor(Image.fromarray(frame), return_tensors="pt") for frame in clip[::2]]
            seen["pixel_values_videos"] += [frame["pixel_values"] for frame in pixels]
            _, high, wide = pixels[0]["image_grid_thw"][0].tolist()
            seen["video_grid_thw"].append(torch.tensor([[len(pixels), high, wide]]))
            row = next(i for i, line in enumerate(text) if "<video>" in line)
            stamp = "at 1 " if self.timestamps else ""
            text[row] = text[row].replace("<video>", stamp + "<V>" * (len(pixels) * high * wide // 4), 1)
        encoded = super().__call__(images=images, text=[line.replace("<V>", "<video>") for line in text], **keywords)
        kinds = encoded["mm_token_type_ids"]
        kinds[encoded["input_ids"] == self.video_token_id] = 2
        return {**encoded, **{name: torch.cat(parts) for name, parts in seen.items() if parts}}


def vision_pipeline(name: str, processor: object) -> Pipeline:
    return Pipeline(VisionTarget(shared_model(name)), VisionProcessor(processor))


@cache
def qwen(name: str = "qwen2_vl") -> Pipeline:
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=600)
    processor = WithClips(images, letters(), chat_template=QWEN)
    processor.video_processor = object()
    return vision_pipeline(name, processor)


@cache
def llava_next(merges=()) -> Pipeline:
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 32], [32, 16]]
    )
    processor = LlavaNextProcessor(
        images,
        letters(merges),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=VICUNA,
    )
    return vision_pipeline("llava_next", processor)


@cache
def tiny_llava() -> Pipeline:
    return mmspec.load("tiny-llava", drafter=None, device="cpu")


@cache
def text_only() -> Pipeline:
    tokenizer = copy.deepcopy(byte_tokenizer())  # others use it without a template
    tokenizer.chat_template = TEXT
    return Pipeline(TransformersTarget(byte_model()), Processor(tokenizer))


TARGETS = {"tiny-llava": tiny_llava, "qwen2_vl": qwen, "llava_next": llava_next}
# Its processor writes times between the frames of a video.
HYBRID = {"qwen3_5": partial(qwen, "qwen3_5")}


@cache
def picture(number: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8))


def image(number=0, width=30, height=20):
    return {"type": "image", "image": picture(number, width, height)}


def video():
    return {"type": "video", "path": str(samples() / "clip.mp4")}


def said(text):
    return {"type": "text", "text": text}


def talk(*turns, name="c", answers=None):
    """A conversation of alternating questions (content or text) and answers."""
    messages = []
    for number, turn in enumerate(turns):
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": [said(turn)] if role == "user" and isinstance(turn, str) else turn})
    return Conversation(name, tuple(messages), answers or (None,) * (len(turns) // 2))


CONVERSATIONS = {
    "one turn": talk([image(), said("Describe the image.")], "A red ring."),
    "three turns": talk([image(1), said("What is it?")], "A blue star.", "Sure?", "Yes.", "And its size?", "Small."),
    "several images": talk([image(1), image(2, 17, 40), said("Compare them.")], "One, two.", "Why?", "No idea."),
    "later images": talk("Hello.", "Hi.", [image(3), said("And this?")], "Ah.", [said("Or"), image(4, 40, 9)], "Oh."),
    "words": talk("Mix red and blue.", "That is purple.", "Thanks.", "Bye."),
    "video": talk([video(), said("Describe the video.")], "A ring moves.", "Where to?", "Up."),
    "video and image": talk([image(), video(), said("Which?")], "Both."),
}


def generated(pipe, text):
    """Generated tokens of an answer: those of its text."""
    space = " " if "ASSISTANT:" in pipe.hf_processor.chat_template else ""
    ids = pipe.processor.tokenizer(space + text, add_special_tokens=False)["input_ids"]
    return [*ids, pipe.processor.tokenizer.eos_token_id]


def inference_path(pipe, conversation, index):
    """Token ids of `encode` for the messages before one."""
    messages = []
    for message in conversation.messages[:index]:
        content = message["content"] if message["role"] == "user" else [said(message["content"])]
        messages.append({**message, "content": [dict(item) for item in content]})
    return pipe.encode([{"prompt": messages}])


@pytest.mark.parametrize("topic", CONVERSATIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_sequences_equal_the_inference_path(name, topic):
    pipe, conversation = TARGETS[name](), CONVERSATIONS[topic]
    answers = [generated(pipe, m["content"]) for m in conversation.messages if m["role"] == "assistant"]
    encoded, recorded = (
        Encoder(pipe)(one) for one in (conversation, replace(conversation, answers=tuple(map(tuple, answers))))
    )
    tokens = encoded.tokens.tolist()
    assert (recorded.tokens.tolist(), recorded.turn.tolist()) == (tokens, encoded.turn.tolist())
    eos_between = name != "llava_next"
    for number, answer in enumerate(answers):
        start = tokens_before = inference_path(pipe, conversation, 2 * number + 1).input_ids[0].tolist()
        last = number == len(answers) - 1
        expected = answer if eos_between or last else answer[:-1]
        assert tokens[: len(start)] == tokens_before
        assert tokens[len(start) : len(start) + len(expected)] == expected
        places = (encoded.turn == number).nonzero()[:, 0].tolist()
        assert places == list(range(len(start), len(start) + len(expected)))
    assert len(tokens) == len(start) + len(answer)
    media = len(conversation.media)
    assert bool(encoded.visual.any()) == bool(media)


def test_recorded_tokens_are_kept(monkeypatch):
    """Recorded tokens that differ from the tokenizer's are kept; all other tokens are unchanged."""
    pipe = tiny_llava()
    plain = CONVERSATIONS["three turns"]
    split = [*(pipe.processor.tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in "Blue"), 2]
    encoder = Encoder(pipe)
    want = encoder(plain)
    got = encoder(replace(plain, answers=(None, tuple(split), None)))
    assert got.tokens[got.turn == 1].tolist() == split
    monkeypatch.setattr(type(pipe.target), "eos_token_ids", [2, 50])  # of which the template writes one
    other = Encoder(pipe)(replace(plain, answers=(None, (*split[:-1], 50), None)))
    assert (other.tokens.tolist(), other.turn.tolist()) == (got.tokens.tolist(), got.turn.tolist())
    for turn in (-1, 0, 2):
        assert got.tokens[got.turn == turn].tolist() == want.tokens[want.turn == turn].tolist()


def test_a_truncated_answer_has_no_end_token():
    pipe = tiny_llava()
    plain = CONVERSATIONS["three turns"]
    cut = [tuple(generated(pipe, m["content"])[:-1]) for m in plain.messages if m["role"] == "assistant"]
    want, got = (Encoder(pipe)(c) for c in (plain, replace(plain, answers=tuple(cut))))
    # The template still writes the end before the next question, where the target did not say it.
    assert got.tokens.tolist() == want.tokens.tolist()[:-1]
    eos = got.tokens == 2
    assert int(eos.sum()) == 2
    assert bool((got.turn[eos] == -1).all())
    assert got.tokens[got.turn == 2].tolist() == list(cut[2])


def test_tokens_across_a_boundary_are_split():
    pipe = llava_next(((":", " "),))
    encoded = Encoder(pipe)(CONVERSATIONS["words"])
    text = pipe.processor.tokenizer.decode(encoded.tokens)
    assert text == "USER: Mix red and blue. ASSISTANT: That is purple. USER: Thanks. ASSISTANT: Bye.</s>"
    assert pipe.processor.tokenizer.decode(encoded.tokens[encoded.turn == 0]) == " That is purple."
    colon = pipe.processor.tokenizer.convert_tokens_to_ids(":")
    assert encoded.tokens[(encoded.turn == 0).nonzero()[0] - 1].tolist() == [colon]


def test_text_targets():
    pipe, conversation = text_only(), CONVERSATIONS["words"]
    encoded = Encoder(pipe)(conversation)
    messages = [{"role": m["role"], "content": text_of(m["content"])} for m in conversation.messages]
    for number in (0, 1):
        start = pipe.encode([{"prompt": messages[: 2 * number + 1]}]).input_ids[0].tolist()
        assert encoded.tokens[: len(start)].tolist() == start
        answer = encoded.tokens[encoded.turn == number]
        assert pipe.processor.tokenizer.decode(answer) == messages[2 * number + 1]["content"] + "</s>"
    features = Extractor(pipe)([conversation])
    hidden = pipe.model(encoded.tokens[None], output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(features.hidden, hidden.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(features.embeds, pipe.target.embed(encoded.tokens[None]).detach())
    with pytest.raises(UserError, match="reads text only"):
        Extractor(pipe)([CONVERSATIONS["one turn"]])


def test_processors_that_add_other_tokens_are_refused():
    pipe = qwen.__wrapped__()
    pipe.hf_processor.timestamps = True
    assert Encoder(pipe)(CONVERSATIONS["one turn"]) is not None
    with pytest.raises(UserError, match="Qwen2VLForConditionalGeneration: expected a processor that only repeats"):
        Encoder(pipe)(CONVERSATIONS["video"])


def test_templates_that_rewrite_messages_are_refused():
    pipe = qwen.__wrapped__()
    pipe.hf_processor.chat_template = "{{ messages|length }}" + QWEN
    with pytest.raises(UserError, match="must render a message the same"):
        Encoder(pipe)(CONVERSATIONS["words"])
    pipe.hf_processor.chat_template = None
    with pytest.raises(UserError, match="need a chat template"):
        Encoder(pipe)


def plain_pass(pipe, conversation, tokens):
    """Hidden states of one conversation by a forward pass of the plain model."""
    prompt = inference_path(pipe, conversation, len(conversation.messages) - 1)
    inputs = dict(prompt.inputs)
    if "mm_token_type_ids" in inputs:
        behind = len(tokens) - prompt.input_ids.shape[1]
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, behind))
    with torch.no_grad():
        out = pipe.model(input_ids=tokens[None], output_hidden_states=True, **inputs)
    return out.hidden_states[-1][0]


@pytest.mark.parametrize("name", [*TARGETS, *HYBRID])
def test_features_equal_plain_passes_in_any_batch(name):
    pipe = (TARGETS | HYBRID)[name]()
    conversations = [one for topic, one in CONVERSATIONS.items() if name in TARGETS or "video" not in topic]
    extractor = Extractor(pipe, layers=(0,))
    together, alone = extractor(conversations), [extractor([one]) for one in conversations]
    assert sorted(together.keep.sum(1).tolist())[0] < together.keep.shape[1]
    for row, (conversation, own) in enumerate(zip(conversations, alone, strict=True)):
        encoded = extractor.encoder(conversation)
        length = len(encoded.tokens)
        assert together.tokens[row, :length].tolist() == encoded.tokens.tolist() == own.tokens[0].tolist()
        assert together.answer[row, :length].tolist() == (encoded.turn >= 0).tolist()
        assert together.visual[row, :length].tolist() == encoded.visual.tolist()
        hidden = plain_pass(pipe, conversation, encoded.tokens)
        for features, index in ((together, row), (own, 0)):
            torch.testing.assert_close(features.hidden[index, :length], hidden, atol=2e-4, rtol=2e-4)
        for states in (own.embeds[0], own.layers[0], together.layers[row, :length]):  # the first layer's input
            torch.testing.assert_close(together.embeds[row, :length], states, atol=1e-5, rtol=1e-5)
        unread = together.keep, together.answer, together.visual, together.hidden, together.tokens, together.layers
        for padding in unread:
            assert not padding[row, length:].any()


def test_embeddings_are_the_projected_image_features():
    pipe, conversation = tiny_llava(), CONVERSATIONS["several images"]
    features = Extractor(pipe)([conversation])
    inputs = inference_path(pipe, conversation, 1).inputs
    with torch.no_grad():
        shown = torch.cat(list(pipe.model.get_image_features(**inputs).pooler_output))
    torch.testing.assert_close(features.embeds[features.visual], shown, atol=1e-5, rtol=1e-5)
    text = ~features.visual
    torch.testing.assert_close(features.embeds[text], pipe.target.embed(features.tokens[text]).detach())


def test_features_can_be_used_in_autograd():
    features = Extractor(tiny_llava(), layers=(0,))([CONVERSATIONS["one turn"]])
    weight = torch.ones(features.hidden.shape[-1], requires_grad=True)
    for field in fields(Features):
        value = getattr(features, field.name)
        assert not value.is_inference()
        assert not value.requires_grad
    (features.hidden * features.embeds * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_conversations_with_names_of_special_tokens_are_skipped(role):
    """The pipeline encodes them as text, the chat template's own as tokens."""
    content = {"user": "What is it?", "assistant": "A circle."}
    content[role] = "The token </s> ends a text."
    messages = tuple({"role": name, "content": [{"type": "text", "text": text}]} for name, text in content.items())
    extractor = Extractor(tiny_llava())
    assert extractor.rows([Conversation("1", messages, (None,))]) == [None]
    assert extractor.skipped == {"special tokens in the text": 1}


def test_long_conversations_lose_turns_then_text_but_no_image_tokens(monkeypatch):
    pipe, conversation = tiny_llava(), CONVERSATIONS["later images"]
    full = Encoder(pipe)(conversation)
    ends = [int((full.turn == turn).nonzero()[-1]) + 1 for turn in range(3)]
    assert len(Encoder(pipe, ends[2])(conversation).tokens) == ends[2]
    for limit in (ends[2] - 1, ends[1] + 20, ends[1]):
        shorter = Encoder(pipe, limit)(conversation)
        assert shorter.tokens.tolist() == full.tokens[: ends[1]].tolist()
        assert len(shorter.inputs["pixel_values"]) == 1
    with monkeypatch.context() as patch:  # the target's own limit holds with others, too
        patch.setattr(pipe.target, "context_limit", ends[1])
        for limit in (None, ends[2]):
            assert len(Encoder(pipe, limit)(conversation).tokens) == ends[1]
    one = CONVERSATIONS["one turn"]
    whole = Encoder(pipe)(one)
    start = int((whole.turn == 0).nonzero()[0])
    assert Encoder(pipe, start + 2)(one).tokens.tolist() == whole.tokens[: start + 2].tolist()
    extractor = Extractor(pipe, start + 1)
    assert [row is None for row in extractor.rows([one, CONVERSATIONS["words"]])] == [True, False]
    assert extractor.skipped == {"too long": 1}
    nothing = extractor([one])
    assert nothing.hidden.shape == (1, 2, 192)
    assert not nothing.keep.any()
    assert not nothing.answer.any()


def on_disk(folder):
    talks = []
    for number in range(7):
        path = folder / f"{number % 2}.png"
        picture(number % 2, 30, 20).save(path)
        question = [{"type": "image", "path": str(path)}, said(f"Number {number}?")] if number % 3 else f"{number}?"
        talks.append(talk(question, "Yes. " * (number + 1), name=str(number)))
    return talks


@pytest.mark.parametrize("layers", [(), (0, output_of(1), 1)])
def test_cache_returns_the_same_features(layers, tmp_path):
    pipe, talks = tiny_llava(), on_disk(tmp_path)
    cache = FeatureCache(tmp_path / "cache", Extractor(pipe, layers=layers), talks, size=3)
    steps = []
    cache.fill(batch=2, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(2, 7), (3, 7), (5, 7), (6, 7), (7, 7)]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()].count(".safetensors") == 3
    for picked in ([talks[5], talks[0], talks[3]], [talks[6]], [replace(talks[0], id="another")]):
        want, got = Extractor(pipe, layers=layers)(picked), cache(picked)
        assert (got.layers is None) == (not layers)
        for field in fields(Features):
            ours, theirs = getattr(got, field.name), getattr(want, field.name)
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    for changes in ({"answers": ((7, 8, 2),)}, {"messages": CONVERSATIONS["words"].messages}):
        with pytest.raises(UserError, match="expected features of conversation 0, found none"):
            cache([replace(talks[0], **changes)])


@pytest.mark.parametrize("layers", [(), (output_of(1), 0)])
def test_cache_of_more_layers_serves_fewer(layers, tmp_path):
    """Missing features are computed with all layers of the folder, whoever computes them."""
    pipe, talks, every = tiny_llava(), on_disk(tmp_path), (0, output_of(1), 1)
    whole = FeatureCache(tmp_path / "cache", Extractor(pipe, layers=every), talks[:4])
    whole.fill()
    extractor = Extractor(pipe, layers=layers)
    part = FeatureCache(tmp_path / "cache", extractor, talks)
    part.fill()
    assert extractor.layers == layers
    want, got = extractor(talks), part(talks)
    assert (got.layers is None) == (not layers)
    for name in ("hidden", "embeds", *(["layers"] if layers else [])):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(whole(talks).layers, Extractor(pipe, layers=every)(talks).layers, atol=2e-5, rtol=2e-5)
    with pytest.raises(UserError, match="another settings"):
        FeatureCache(tmp_path / "cache", Extractor(pipe, layers=(0, output_of(0))), talks)


def test_a_killed_cache_is_resumed(tmp_path):
    pipe, talks = tiny_llava(), on_disk(tmp_path)
    cache, other = (FeatureCache(tmp_path / "cache", Extractor(pipe), talks, size=2) for _ in range(2))

    class KilledError(Exception):
        pass

    def kill(done, total):
        if done == 5:
            raise KilledError

    with pytest.raises(KilledError):
        cache.fill(batch=1, progress=kill)
    missing = [one for one in talks if one not in cache]
    assert len(missing) == 3
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    cache.fill(rank=1, processes=2)
    assert [one in cache for one in missing] == [one not in talks[::2] for one in missing]
    cache.fill()
    assert all(one in cache for one in talks)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert torch.equal(other(talks).hidden, cache(talks).hidden)  # which another process has written since
    want, got = Extractor(pipe)(talks), cache(talks)
    torch.testing.assert_close(got.hidden, want.hidden, atol=2e-5, rtol=2e-5)


def test_cache_of_other_inputs_is_refused(tmp_path):
    pipe, talks = tiny_llava(), on_disk(tmp_path)[:2]
    folder = tmp_path / "cache"
    cache = FeatureCache(folder, Extractor(pipe), talks)
    cache.fill()
    for extractor, message in (
        (Extractor(llava_next()), "another verifier"),
        (Extractor(pipe, 99), "another settings"),
        (Extractor(pipe, layers=(0,)), "another settings"),
    ):
        with pytest.raises(UserError, match=message):
            FeatureCache(folder, extractor, talks)
    (path,) = folder.glob("*.safetensors")
    os.truncate(path, path.stat().st_size - 9)  # while the file is open
    for damaged in (lambda: cache(talks), lambda: FeatureCache(folder, Extractor(pipe), talks)):
        with pytest.raises(UserError, match="expected a whole file of features"):
            damaged()
    (folder / "index.json").write_text("{")
    with pytest.raises(UserError, match="index of a feature cache"):
        FeatureCache(folder, Extractor(pipe), talks)


def test_cache_in_half_precision_with_a_conversation_too_long(tmp_path):
    pipe, talks = tiny_llava(), on_disk(tmp_path)
    limit = min(len(Encoder(pipe)(one).tokens) for one in talks if one.media) - 6
    cache = FeatureCache(tmp_path / "cache", Extractor(pipe, limit, (0,)), talks)
    cache.dtype = torch.bfloat16
    cache.fill()
    kept = [one for one in talks if Extractor(pipe, limit).rows([one])[0] is not None]
    assert cache.skipped == {"too long": len(talks) - len(kept)}
    assert all(one in cache for one in talks)
    assert 0 < len(kept) < len(talks)
    got = cache(talks)
    assert got.hidden.dtype == got.layers.dtype == torch.float32
    torch.testing.assert_close(got.hidden, Extractor(pipe, limit)(kept).hidden, atol=2e-2, rtol=1e-2)
    assert json.loads((tmp_path / "cache" / "index.json").read_text())["verifier"]["hidden_size"] == 192


# ---------------------------------------------------------------------- recorded while answers are generated


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = save_text_model(tmp_path_factory.mktemp("text"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    return mmspec.load(str(folder), None, "cpu")


@pytest.fixture(scope="module")
def recorded(loaded, tmp_path_factory):
    """Answers in batches of three, of which some join and leave; and the folder of their features."""
    pipe = Pipeline(loaded.target, loaded.processor, Recorder(), max_num_seqs=3)
    jobs = [PendingConversation(f"{k}", [[said("ab " * (k + 1))]], [0]) for k in range(11)]
    params = SamplingParams(temperature=4.0, max_new_tokens=150)
    found, folder = [], tmp_path_factory.mktemp("features")
    for some in (jobs[:6], jobs[6:]):
        answered = [one for done in AnswerGenerator(pipe, 0, params).run(some) for one in done]
        assert len(pipe.drafter.finished) == len(answered) == len(some)
        pipe.drafter.save(folder, answered, pipe)
        assert not pipe.drafter.finished
        found += answered
    return found, folder


def test_recorded_features_are_those_of_a_pass_over_the_conversation(loaded, recorded, tmp_path):
    answered, folder = recorded
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(to_record(one, tmp_path)) for one in answered))
    found = read(file).conversations
    assert len({len(one.answers[0]) for one in found}) > 2  # they end at different times
    features, extract = recorded_features([tmp_path, folder], loaded.target), Extractor(loaded)
    for batch in (found[:1], found[3:9], found):
        ours, theirs = features(batch), extract(batch)
        assert torch.equal(ours.answer, theirs.answer)
        assert torch.equal(ours.keep, theirs.keep)
        assert torch.equal(ours.tokens, theirs.tokens)
        known = theirs.keep & torch.cat([theirs.keep[:, 1:], theirs.keep[:, :1] & False], dim=1)
        torch.testing.assert_close(ours.hidden[known], theirs.hidden[known], atol=1e-4, rtol=1e-4)
        assert torch.equal(ours.embeds, theirs.embeds)
    lengths = sorted(len(tokens) for tokens, _ in features.sequences())
    assert lengths == sorted(int(row.sum()) - 1 for row in theirs.keep)
    assert replace(found[0], id="other") in features
    assert replace(found[0], answers=((5, 6, 7),)) not in features


def test_recorded_features_of_another_model_and_none_are_refused(loaded, recorded, tmp_path):
    with pytest.raises(UserError, match=r"expected features of make-data --record in .*, received none"):
        recorded_features([tmp_path], loaded.target)
    _, folder = recorded
    with pytest.raises(UserError, match=rf"of size 192, the model's, received size {loaded.target.config.hidden_size}"):
        recorded_features([folder], tiny_llava().target)
