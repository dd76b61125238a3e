"""Writes a trained model as the folder that transformers loads."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlavaForConditionalGeneration, LlavaProcessor

MOST_NEW_TOKENS = 256


def export(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """Saves weights in bfloat16 with configuration, tokenizer and processor; replaces each file in one go."""
    temporary = folder.parent / (folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    small: Any = copy.deepcopy(model)
    small.to(torch.bfloat16)
    text: Any = model.config.text_config
    small.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        max_new_tokens=MOST_NEW_TOKENS,
        do_sample=False,
    )
    small.save_pretrained(temporary)
    processor.save_pretrained(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(temporary.iterdir()):
        os.replace(path, folder / path.name)
    temporary.rmdir()
