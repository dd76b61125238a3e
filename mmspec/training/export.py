"""Exports a trained model as a folder that transformers loads."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

MAX_NEW_TOKENS = 256


def export(model: PreTrainedModel, processor: Any, folder: Path) -> None:
    """Saves bfloat16 weights, configuration and processor; each file is replaced atomically.

    Args:
        model: of any dtype; left unchanged.
        processor: its processor or tokenizer.
        folder: created if missing; other files in it are kept.
    """
    temporary = folder.parent / (folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    small: Any = copy.deepcopy(model)
    small.to(torch.bfloat16)
    text: Any = model.config.get_text_config()
    small.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    small.save_pretrained(temporary)
    processor.save_pretrained(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(temporary.iterdir()):
        os.replace(path, folder / path.name)
    temporary.rmdir()
