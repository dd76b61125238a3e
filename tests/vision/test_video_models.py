"""Sampled frames reach video models complete and in order, through the model's own processor."""

import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mmspec.vision.processor import VisionProcessor
from mmspec.vision.video import Video
from tests.tiny import byte_tokenizer

LEVELS = [10, 40, 70, 100, 130, 160, 190, 220]
TOKENS = ["<image>", "<video>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="transformers' video processors need torchvision"
)


def clip():
    frames = [Image.new("RGB", (64, 48), (level, level, level)) for level in LEVELS]
    return Video(frames, [0.25 + 0.5 * k for k in range(len(frames))], 0.5 * len(frames), "clip")


def tokenizer():
    words = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend_tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    words.add_special_tokens({"additional_special_tokens": TOKENS})
    return words


def sampling_processor(family):
    """A processor that samples frames itself by default, as published for these models."""
    import transformers as t

    words = tokenizer()
    if family == "qwen3_vl":  # samples by default
        return t.Qwen3VLProcessor(t.Qwen2VLImageProcessor(), words, t.Qwen3VLVideoProcessor())
    if family in ("qwen2_vl", "qwen2_5_vl"):
        videos = t.Qwen2VLVideoProcessor(do_sample_frames=True, fps=2.0, min_frames=4, max_frames=768)
        kind = t.Qwen2VLProcessor if family == "qwen2_vl" else t.Qwen2_5_VLProcessor
        return kind(t.Qwen2VLImageProcessor(), words, videos)
    if family == "llava_next_video":
        videos = t.LlavaNextVideoVideoProcessor(do_sample_frames=True, num_frames=4)
        options = {"patch_size": 14, "vision_feature_select_strategy": "default"}
        return t.LlavaNextVideoProcessor(videos, t.LlavaNextImageProcessor(), words, **options)
    videos = t.LlavaOnevisionVideoProcessor(do_sample_frames=True, num_frames=4)
    options = {"num_image_tokens": 729, "vision_feature_select_strategy": "full"}
    return t.LlavaOnevisionProcessor(t.LlavaOnevisionImageProcessor(), words, videos, **options)


def brightness(pixels, inputs, videos):
    """(frames,): mean of each frame over pixels and channels."""
    if "video_grid_thw" not in inputs:
        return pixels.mean((0, 2, 3, 4))
    steps, high, wide = inputs["video_grid_thw"][0].tolist()
    patches = pixels.reshape(steps, high * wide, 3, videos.temporal_patch_size, -1)
    return patches.mean((1, 2, 4)).flatten()


@needs_torchvision
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next_video", "llava_onevision"])
def test_every_sampled_frame_reaches_the_model(family):
    processor = sampling_processor(family)
    inputs = VisionProcessor(processor).encode([{"prompt": "What?", "videos": [clip()]}]).inputs
    videos = processor.video_processor
    mean, std = torch.tensor(videos.image_mean), torch.tensor(videos.image_std)
    expected = ((torch.tensor(LEVELS)[:, None] / 255 - mean) / std).mean(1)
    torch.testing.assert_close(brightness(inputs["pixel_values_videos"], inputs, videos), expected, atol=1e-2, rtol=0)


def test_processor_does_not_sample_again():
    """Arguments of the processor; runs without torchvision, too."""

    class Recorder:
        tokenizer = tokenizer()
        video_processor = object()
        image_token, video_token = "<image>", "<video>"

        def __call__(self, **arguments):
            self.arguments = arguments
            return self.tokenizer(arguments["text"], padding=True, return_tensors="pt")

    processor = Recorder()
    VisionProcessor(processor).encode([{"prompt": "What?", "videos": [clip()]}])
    assert processor.arguments["videos_kwargs"]["do_sample_frames"] is False
    (frames,) = processor.arguments["videos"]
    assert frames.shape == (8, 48, 64, 3)
    assert np.array_equal(frames.mean((1, 2, 3)), LEVELS)
