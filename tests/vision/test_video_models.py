"""Sampled frames reach video models complete and in order, through the model's own processor."""

import importlib.util
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.video_utils import VideoMetadata, read_video_pyav

pytest.importorskip("av")

import av

from mmspec.vision.processor import VisionProcessor
from mmspec.vision.video import Video, load_video
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


class Recorder:
    """Stands for a processor with a video processor; runs without torchvision, too."""

    video_processor = object()
    image_token, video_token = "<image>", "<video>"

    def __init__(self):
        self.tokenizer = tokenizer()

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


def read_by_transformers(path, clip):
    """Transformers' own reading of the frames that a clip contains."""
    rate = clip.fps
    return read_video_pyav(str(path), lambda metadata: [round(time * rate) for time in clip.times])


FILMS = [("mp4", 25), ("mp4", Fraction(30000, 1001)), ("mkv", Fraction(24000, 1001)), ("mkv", 60), ("avi", 30)]


@pytest.mark.parametrize(("suffix", "rate"), FILMS)
def test_a_file_reaches_the_processor_as_transformers_loads_it(tmp_path, suffix, rate):
    path = write_film(tmp_path / f"a.{suffix}", range(50), rate)
    film = load_video(path, frames=8)
    frames, metadata = read_by_transformers(path, film)
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


@needs_torchvision
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(("suffix", "rate"), FILMS[:3])
def test_inputs_of_a_file_equal_transformers(tmp_path, family, suffix, rate):
    path = write_film(tmp_path / f"a.{suffix}", range(50), rate)
    film = load_video(path, frames=8)
    frames, metadata = read_by_transformers(path, film)
    if suffix == "mkv":
        metadata.total_num_frames = 50
    import transformers as t

    kind, videos = {
        "qwen2_5_vl": (t.Qwen2_5_VLProcessor, t.Qwen2VLVideoProcessor(do_sample_frames=True, fps=2.0)),
        "qwen3_vl": (t.Qwen3VLProcessor, t.Qwen3VLVideoProcessor()),
    }[family]
    processor = kind(t.Qwen2VLImageProcessor(), tokenizer(), videos)  # samples frames itself by default
    ours = VisionProcessor(processor).encode([{"prompt": "When?", "videos": [film]}])
    text = VisionProcessor(processor)._render(
        [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "When?"}]}]
    )
    theirs = processor(
        text=[text],
        videos=[frames],
        videos_kwargs={"do_sample_frames": False, "video_metadata": [metadata]},
        return_tensors="pt",
    )
    assert torch.equal(ours.input_ids, theirs["input_ids"])
    assert set(ours.inputs) == {name for name, value in theirs.items() if torch.is_tensor(value)} - {
        "input_ids",
        "attention_mask",
    }
    for name, value in ours.inputs.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=0)
