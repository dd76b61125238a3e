"""Vision-language models that are shipped without weights which packages carry, completed in the user's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspec import plugins
from mmspec.errors import UserError
from mmspec.files import cache_folder, make_folder
from mmspec.targets import gguf

PARTS = "parts.json"
"""File of a folder that lacks weights: {"language_model": a registered model, "vision_tower": a registered tower}; the
latter may be missing."""

WEIGHTS = "model.safetensors"

LABELS = "model.vision_tower.labels"
"""Tensor of labels: token ids in the incomplete folder, the language model's embeddings in the completed one."""

_log = logging.getLogger("mmspec.load")
_FORMAT = 2  # of the completed folder


def resolved(folder: str | Path) -> str:
    """The folder to load for a model's folder: the completed one of a folder that lacks weights.

    It holds weights and tokenizer of the language model, weights of the vision tower, and all files of the incomplete
    folder, drafters included. It is keyed by the files' names, sizes and times, and appears whole.

    Raises:
        UserError: a part is not installed, or the cache cannot be written.
    """
    folder = Path(folder)
    if not (folder / PARTS).is_file():
        return str(folder)
    parts = json.loads((folder / PARTS).read_text())
    language = Path(gguf.resolved(plugins.find("models", parts["language_model"])()))
    tower = plugins.find("towers", parts["vision_tower"]) if "vision_tower" in parts else None
    files = [*sorted(path for path in folder.rglob("*") if path.is_file()), _weights(language)]
    files += [tower.file()] if tower else []
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    identity = hashlib.sha256(f"{_FORMAT} {states}".encode()).hexdigest()[:16]
    complete = cache_folder() / "completed" / identity / folder.name
    if not complete.is_dir():
        _log.info("joining the weights of %s in %s", folder.name, complete.parent)
        make_folder(complete, partial(_write, folder, language, tower() if tower else {}))
    return str(complete)


def _write(folder: Path, language: Path, tower: dict[str, Tensor], complete: Path) -> None:
    for source in (language, folder):  # in this order: the configuration and chat template are the folder's
        # Rows of a GGUF file, of formats that int4 and int8 hold exactly, have names of the language model alone.
        others = shutil.ignore_patterns(WEIGHTS, PARTS, gguf.STORED)
        shutil.copytree(source, complete, ignore=others, dirs_exist_ok=True)
    for drafter in folder.glob(f"*/{WEIGHTS}"):
        shutil.copyfile(drafter, complete / drafter.relative_to(folder))
    weights = load_file(_weights(language), backend="pread")
    weights = {f"model.language_model.{name.removeprefix('model.')}": x for name, x in weights.items()}
    weights |= {f"model.vision_tower.{name}": x for name, x in tower.items()}
    own = load_file(_weights(folder), backend="pread")
    if LABELS in own:
        own[LABELS] = weights["model.language_model.embed_tokens.weight"][own[LABELS].long()]
    save_file(weights | own, complete / WEIGHTS, {"format": "pt"})


def _weights(folder: Path) -> Path:
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"cannot complete the model: expected {WEIGHTS} in {folder}, received none")
    return folder / WEIGHTS
