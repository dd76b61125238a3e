"""Qwen3.5 whole: vision tower, Gated DeltaNet and attention, after prompts with images and videos."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from transformers import AutoModelForImageTextToText, BatchFeature, GenerationConfig, Qwen2VLImageProcessorPil

import mmspec
from mmspec.cli.commands import train
from mmspec.vision.processor import VisionProcessor
from tests.model_folders import TEMPLATE, tokenizer
from tests.tiny import shared_model
from tests.tiny.cases import Case, compare_case
from tests.tiny.configs import VISION_CONFIGS

_IMAGE = "<image>"


@pytest.mark.parametrize("drafter", ["ngram", "recycle", "msd", "flash"])
@pytest.mark.parametrize(
    ("batch", "images", "setting"),
    [(1, 1, "greedy"), (1, 2, "greedy"), (3, 1, "greedy"), (2, 2, "repetition-penalty"), (2, 1, "sampled")],
)
def test_images_and_a_video(batch: int, images: int, setting: str, drafter: str) -> None:
    """Greedy tokens are those of `generate`, sampled ones those of plain decoding with the same seed."""
    case = Case("qwen3_5", batch, images, 8, seed=3, setting=setting, drafter=drafter)
    reference, difference = compare_case(shared_model("qwen3_5"), case, new_tokens=16)
    assert difference is None
    assert reference.shape[1] > 16


class _ImageProcessor:
    """Tokenizer and images of Qwen3.5: transformers' own processor requires torchvision for its videos."""

    def __init__(self) -> None:
        self.tokenizer, self.image_token, self.chat_template = tokenizer(), _IMAGE, TEMPLATE
        self.images = Qwen2VLImageProcessorPil(
            size={"shortest_edge": 256, "longest_edge": 1024}, patch_size=4, temporal_patch_size=2, merge_size=2
        )

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, chat_template=self.chat_template, **options)

    def __call__(self, text: list[str], images: list[Any] | None = None, **options: Any) -> BatchFeature:
        pixels = self.images(images, return_tensors="pt") if images else {}
        tokens = [int(grid.prod()) // 4 for grid in pixels.get("image_grid_thw", ())]
        for count in tokens:
            index = next(i for i, one in enumerate(text) if _IMAGE in one)
            text = [*text[:index], text[index].replace(_IMAGE, "<|>" * count, 1), *text[index + 1 :]]
        encoded = self.tokenizer([one.replace("<|>", _IMAGE) for one in text], **options)
        visual = (encoded["input_ids"] == self.tokenizer.convert_tokens_to_ids(_IMAGE)).long()
        return BatchFeature({**encoded, **pixels, "mm_token_type_ids": visual})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Qwen3.5 of 0.2M parameters whose next token depends mostly on the last one: easy to learn."""
    config = VISION_CONFIGS["qwen3_5"]()
    processor = _ImageProcessor()
    config.text_config.vocab_size = len(processor.tokenizer)
    config.image_token_id = processor.tokenizer.convert_tokens_to_ids(_IMAGE)
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config)
    for layer in model.model.language_model.layers:
        mixer = layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj
        mixer.weight.data *= 0.1
        layer.mlp.down_proj.weight.data *= 0.1
    model.lm_head.weight.data.normal_(std=0.5)
    model.lm_head.weight.data[40:] = 0
    model.lm_head.weight.data[:4] = 0  # neither special tokens nor the end
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(tmp_path / "model")
    from_pretrained = lambda name, **options: _ImageProcessor()  # noqa: E731
    monkeypatch.setattr(VisionProcessor, "auto_class", SimpleNamespace(from_pretrained=from_pretrained))
    return tmp_path / "model"


def _conversations(pipe: mmspec.Pipeline, folder: Path) -> Path:
    """Conversations about an image each, answered by the target."""
    requests = []
    for number in range(8):
        image = folder / f"{number}.png"
        Image.new("RGB", (16 + 8 * (number % 2), 24), (25 * number, 99, 255 - 25 * number)).save(image)
        requests.append({"prompt": f"Count to {number * 7}.", "images": [image]})
    lines = []
    for number, said in enumerate(pipe.generate_batch(requests, max_new_tokens=12)):
        prompt, (image,) = requests[number].values()
        answer = {"from": "gpt", "value": said.text, "token_ids": said.token_ids}
        record = {"id": str(number), "image": image.name, "conversations": [{"from": "human", "value": prompt}, answer]}
        lines.append(json.dumps(record))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def test_flash_is_trained_and_decodes(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from mmspec.training.trainer import DRAFTER, LOG

    plain = mmspec.load(str(folder), None)
    data = _conversations(plain, tmp_path)
    options = ["--model", str(folder), "--data", str(data), "--out", str(tmp_path / "run"), "--text-share", "0"]
    options += ["--steps", "12", "--rate", "1e-2", "--batch", "4", "--held-out", "1", "--prompts", "1", "--warmup", "4"]
    options += ["--max-new-tokens", "6", "--latents", "3", "--slots", "4", "--top-k", "3", "--total-tokens", "12"]
    result = CliRunner().invoke(train, ["flash", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    first, last = (row for row in rows if row["event"] == "held-out")
    assert last["loss"] < 0.8 * first["loss"]
    requests = [
        {"prompt": "Count to 7.", "images": [tmp_path / "1.png"]},
        {"prompt": "Count.", "images": [tmp_path / "2.png", tmp_path / "3.png"]},
        {"prompt": "Count to 9."},
    ]
    pipe = mmspec.load(str(folder), str(tmp_path / "run" / DRAFTER))
    found = pipe.generate_batch(requests, max_new_tokens=14, nodes=10)
    assert sum(one.stats.num_accepted_draft_tokens for one in found) > 10
    for request, one in zip(requests, found, strict=True):
        prompt = pipe.encode([request])
        inputs = {"input_ids": prompt.input_ids, **prompt.inputs, "do_sample": False, "max_new_tokens": 14}
        assert pipe.model.generate(**inputs)[0, prompt.input_ids.shape[1] :].tolist() == one.token_ids
