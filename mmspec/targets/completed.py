"""Vision-language models shipped without the weights that installed packages contain.

The other files are assembled in a folder of the user's cache; weights are read from the packages.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmspec import plugins
from mmspec.errors import UserError
from mmspec.files import cache_folder, make_folder
from mmspec.targets import gguf, gguf_model

PARTS = "parts.json"
"""File of an incomplete folder: {"language_model": registered model, "vision_tower": registered tower or missing}."""

WEIGHTS = "model.safetensors"

LABELS = "model.vision_tower.labels"
"""Name of the label tensor: token ids in the incomplete folder, language-model embeddings in the completed model."""

_FORMAT = 3  # of the folder


class Parts:
    """An incomplete folder with its language model's file and its vision tower.

    Raises:
        UserError: a part is not installed, or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, parts = folder, json.loads((folder / PARTS).read_text())
        name = parts["language_model"]
        file = gguf.file_in(plugins.find("models", name)())
        if file is None or not (folder / WEIGHTS).is_file():
            raise UserError(f"cannot complete the model: expected {WEIGHTS} in {folder}, and a GGUF file of {name}")
        self.language = gguf.GGUFFile(file)
        self._tower = plugins.find("towers", parts["vision_tower"]) if "vision_tower" in parts else None

    def index(self) -> Path:
        """Cache folder with all files except weights: files of the language model and of the incomplete folder,
        drafters included.

        The key consists of the files' names, sizes and times. The folder is created atomically.
        """
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        language = gguf_model.write_index(self.language)
        identity = hashlib.sha256(f"{_FORMAT} {states} {language}".encode()).hexdigest()[:16]
        index = cache_folder() / "completed" / identity / self._folder.name
        if not index.is_dir():
            make_folder(index, partial(self._write, language))
        return index

    def _write(self, language: Path, index: Path) -> None:
        for source in (language, self._folder):  # the folder's configuration and chat template take precedence
            shutil.copytree(source, index, ignore=shutil.ignore_patterns(WEIGHTS, PARTS), dirs_exist_ok=True)
        for drafter in self._folder.glob(f"*/{WEIGHTS}"):
            shutil.copyfile(drafter, index / drafter.relative_to(self._folder))

    def weights(self, empty: PreTrainedModel) -> dict[str, Any]:
        """The model's weights by name; see ``gguf_model.weights``."""
        with torch.device("meta"):
            text = AutoModelForCausalLM.from_config(gguf_model.config(self.language))
        language = gguf_model.weights(self.language, text)
        weights: dict[str, Any] = {
            f"model.language_model.{name.removeprefix('model.')}": x for name, x in language.items()
        }
        weights |= {f"model.vision_tower.{name}": x for name, x in (self._tower() if self._tower else {}).items()}
        own: dict[str, Tensor] = load_file(self._folder / WEIGHTS, backend="pread")
        if LABELS in own:
            own[LABELS] = language["model.embed_tokens.weight"][...][own[LABELS].long()]
        return weights | own
