"""Vision-language models in two files of llama.cpp: the same numbers, inputs and answers as the models they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from mmspec.vision.gguf import VisionSource
from mmspec.vision.processor import VisionProcessor
from tests import projectors

_TEXTS = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 80, 3), dtype=np.uint8))
ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))


def opened(family: str, folder: Path, **changes: Any) -> VisionSource:
    return VisionSource(*projectors.save(family, folder, **changes))


def model_of(source: VisionSource, kind: Any = torch.float32) -> Any:
    made, _ = source.model(AutoModelForImageTextToText, source.config(), kind, True)
    return made.eval()


def inputs(processor: Any) -> dict[str, torch.Tensor]:
    prompt = processor.encode([{"prompt": "What is it?", "images": [PICTURE]}])
    return {"input_ids": prompt.input_ids, **prompt.inputs}


@pytest.mark.parametrize("family", projectors.FAMILIES)
def test_logits_and_inputs_are_those_of_the_model_that_was_converted(family: str, tmp_path: Path) -> None:
    source, original = opened(family, tmp_path), projectors.model(family)
    processor = source.processor(VisionProcessor)
    found = inputs(processor)
    text = processor._render(ASKED)
    options = {} if processor.adds_special_tokens(text) else {"add_special_tokens": False}
    expected = projectors.processor(family)(text=[text], images=[PICTURE], return_tensors="pt", **options)
    assert set(found) == set(expected) - {"attention_mask"}
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    with torch.no_grad():
        ours, theirs = model_of(source)(**found).logits, original(**found).logits
    assert theirs.std() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
