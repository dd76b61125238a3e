"""Writes a trained model as the folder that transformers loads."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

MOST_NEW_TOKENS = 256


def export(model: PreTrainedModel, reader: Any, folder: Path) -> None:
    """Saves weights in bfloat16 with configuration and what reads its inputs; replaces each file in one go.

    Args:
        model: whatever its own type is, that stays.
        reader: its tokenizer or processor.
        folder: made if it is not there; other files in it stay.
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
        max_new_tokens=MOST_NEW_TOKENS,
        do_sample=False,
    )
    small.save_pretrained(temporary)
    reader.save_pretrained(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(temporary.iterdir()):
        os.replace(path, folder / path.name)
    temporary.rmdir()
