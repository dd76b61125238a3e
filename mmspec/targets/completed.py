"""Vision-language models that are shipped without their language model, completed in the user's cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from mmspec import plugins
from mmspec.errors import UserError
from mmspec.files import cache_folder, make_folder
from mmspec.targets import gguf

LACKS = "language_model.json"
"""File of a folder that lacks the language model: {"name": that of the registered model}."""

WEIGHTS = "model.safetensors"
_FORMAT = 1  # of the completed folder


def resolved(folder: str | Path) -> str:
    """The folder to load for a model's folder: the completed one of a folder that lacks its language model.

    It holds weights and tokenizer of the language model, and all files of the incomplete folder, drafters included.
    It is keyed by the files' names, sizes and times, and appears whole.

    Raises:
        UserError: the language model is not installed, or the cache cannot be written.
    """
    folder = Path(folder)
    if not (folder / LACKS).is_file():
        return str(folder)
    name = json.loads((folder / LACKS).read_text())["name"]
    language = Path(gguf.resolved(plugins.find("models", name)()))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in [*files, _weights(language)]]
    identity = hashlib.sha256(f"{_FORMAT} {states}".encode()).hexdigest()[:16]
    complete = cache_folder() / "completed" / identity / folder.name
    if not complete.is_dir():
        make_folder(complete, partial(_write, folder, language))
    return str(complete)


def _write(folder: Path, language: Path, complete: Path) -> None:
    for source in (language, folder):  # in this order: the configuration and chat template are the folder's
        # Rows of a GGUF file, of formats that int4 and int8 hold exactly, have names of the language model alone.
        others = shutil.ignore_patterns(WEIGHTS, LACKS, gguf.STORED)
        shutil.copytree(source, complete, ignore=others, dirs_exist_ok=True)
    for drafter in folder.glob(f"*/{WEIGHTS}"):
        shutil.copyfile(drafter, complete / drafter.relative_to(folder))
    weights = load_file(_weights(language))
    weights = {f"model.language_model.{name.removeprefix('model.')}": x for name, x in weights.items()}
    save_file(weights | load_file(_weights(folder)), complete / WEIGHTS, {"format": "pt"})


def _weights(folder: Path) -> Path:
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"cannot complete the model: expected {WEIGHTS} in {folder}, received none")
    return folder / WEIGHTS
