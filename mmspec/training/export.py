"""Exports a trained model as a folder that transformers loads."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

MAX_NEW_TOKENS = 256


def export(model: PreTrainedModel, processor: Any, folder: Path) -> None:
    """Saves bfloat16 weights, configuration and processor; each file is replaced atomically.

    Args:
        model: of any dtype; left unchanged.
        folder: created if missing; other files in it are kept.
    """
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
    with replacing(folder) as part:
        small.save_pretrained(part)
        processor.save_pretrained(part)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, whose files then replace those of the same names in `folder`, each atomically."""
    part = folder.parent / (folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    folder.mkdir(exist_ok=True)
    for path in sorted(part.iterdir()):
        os.replace(path, folder / path.name)
    part.rmdir()
