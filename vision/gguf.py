"""Vision-language models in two GGUF files, as in llama.cpp: language model and projector (``mmproj``).

Tensor and metadata names follow llama.cpp's ``convert_hf_to_gguf.py --mmproj`` and, for LLaVA, the older
``convert_image_encoder_to_gguf.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import is_torchvision_available

from mmspec.errors import UserError, explained, missing
from mmspec.targets import gguf, gguf_models
from mmspec.targets.gguf_file import GGUFFile
from mmspec.targets.gguf_keys import Keys
from mmspec.targets.sources import LazySource
from mmspec.vision.gguf_families import FAMILIES, HARMLESS


class VisionSource(LazySource):
    """Model source of a language model file and a projector file. Raises ``UserError``: a file cannot be read, has an
    unknown family, or does not fit the other file."""

    def __init__(self, path: str | Path, mmproj: str | Path) -> None:
        language = GGUFFile(path)
        self._projector = Projector(GGUFFile(mmproj), language)
        super().__init__(str(gguf.index(language)), f"{path} with {mmproj}", self._weights, language)

    @cached_property
    def _text(self) -> Any:
        return gguf.config(self._language)

    def config(self, **options: Any) -> Any:
        with self._projector.explained():
            made = self._projector.config(self._text)
        made.name_or_path = self.folder
        return made

    def generation_config(self, config: Any) -> GenerationConfig:
        return gguf.generation_config(self._language, self._text)

    def processor(self, cls: Any, **options: Any) -> Any:
        folder = gguf.write_index(self._language)
        with self._projector.explained():
            return cls(self._projector.processor(partial(gguf.read_tokenizer, folder)))

    def _weights(self, model: PreTrainedModel) -> dict[str, Any]:
        with torch.device("meta"):
            text = AutoModelForCausalLM.from_config(self._text)
        prefix, found = f"model.{self._projector.row.language_model}.", self._projector.weights(model)
        for name, weight in gguf_models.read_weights(self._language, text).items():
            transposed = self._projector.model_type == "qwen3_vl_moe" and ".mlp.experts." in name
            found[re.sub(r"^model\.", prefix, name)] = weight.transposed() if transposed else weight
        return found


class Projector(Keys):
    """A projector's file, read by the ``row`` of its type (``kind``) in ``FAMILIES``. Keys are those below ``clip.``.
    Raises ``UserError``: the file is not a projector, has an unknown type, or does not fit the language model's file
    (``language``)."""

    def __init__(self, file: GGUFFile, language: GGUFFile) -> None:
        super().__init__(file)
        types = (file.metadata.get(f"clip.{prefix}projector_type") for prefix in ("", "vision."))
        old = "mlp" if "has_llava_projector" in self else None
        self.language, self.kind = language, next((name for name in types if name), old)
        if file.architecture() != "clip" or self.kind not in FAMILIES:
            raise UserError(
                f"cannot read {str(file.path)!r}: expected the mmproj file of a projector of type "
                f"{', '.join(FAMILIES)}, found "
                f"{f'type {self.kind}' if self.kind else f'a file of {file.architecture()} without one'}"
            )
        self.row = row = FAMILIES[self.kind]
        self.tensors = file.tensors = {
            name: tensor for name, tensor in file.tensors.items() if not name.startswith(_SOUNDS)
        }
        if row.models and language.architecture() not in row.models:
            raise self._refused(f"a file of {' or '.join(row.models)}, found one of {language.architecture()}")
        self.model_type = row.models.get(language.architecture(), row.model_type)
        with self.explained():
            if (width := self.width()) != (expected := language.get("embedding_length")):
                raise UserError(
                    f"{str(file.path)!r} does not fit {str(language.path)!r}: expected a projector to the language "
                    f"model's {expected} features, found one to {width}"
                )
            layer = row.names
            if self.tensors["v.blk.0.ffn_down.weight"].shape[0] != self("vision.embedding_length"):
                layer = {**layer, "ffn_up": layer["ffn_down"], "ffn_down": layer["ffn_up"]}  # of older converters
            self.row = replace(row, names=layer, outer={**row.outer, **row.listed(self)})

    def explained(self) -> Any:
        """Context that converts errors of incomplete files to one-line messages."""
        of = f"expected the metadata and tensors of a {self.kind} projector"
        return explained(f"cannot read {str(self._file.path)!r}: {of}", KeyError, IndexError, TypeError, ValueError)

    def config(self, text: Any) -> Any:
        """The model's configuration; ``text`` is the language model's. Raises ``UserError``: a key is missing, has a
        wrong value or is unknown."""
        row, silu = self.row, self("use_silu", False)
        act = row.gelu if self("use_gelu", False) else "silu" if silu else "quick_gelu"
        vision = {field: self(key, field=field) for key, field in row.keys.items()}
        fields = {
            "text_config": {**text.to_dict(), **row.text(self, text)},
            "vision_config": {**vision, "intermediate_size": self.inner(), "hidden_act": act, **row.vision(self)},
            "tie_word_embeddings": text.tie_word_embeddings,
            **{field: self.token(*names) for field, names in row.tokens.items()},
            **row.more(self),
        }
        self._media()
        for key, value in self.unread(HARMLESS).items():
            if key.startswith("audio."):
                continue
            raise UserError(
                f"cannot read {str(self._file.path)!r}: expected keys of a {self.kind} projector, "
                f"found clip.{key} = {value!r:.100}, which is not known"
            )
        return CONFIG_MAPPING[fields.pop("model_type", self.model_type)].from_dict(fields)

    def weights(self, model: PreTrainedModel) -> dict[str, Any]:
        """Weights of vision tower and projector by name in the model; errors as for ``read_weights``."""
        empty = model.state_dict()
        unused = {name: torch.zeros(empty[name].shape, dtype=torch.float32) for name in self.row.unused}
        return unused | gguf_models.read_weights(self._file, model, self.row)

    def processor(self, read: Callable[..., Any]) -> Any:
        """transformers' processor, without videos if torchvision is not installed, with the chat template of the
        language model's file or of the family; ``read`` returns the tokenizer. Raises ``UserError``: images need
        torchvision."""
        name, options, parts = self._media()
        names = {key: self.text(*tokens) for key, tokens in self.row.special.items()}
        tokenizer = read(extra_special_tokens=names)
        if tokenizer.pad_token in names.values():
            tokenizer.pad_token = None
        template, image = tokenizer.chat_template or self.row.template, self.text(*self.row.image)
        if re.search("""['"]image['"]""", template):
            template = template.replace(self.row.image[0], image)
        else:
            template = _WITH_IMAGES.replace("IMAGE", json.dumps(self.row.placed.format(image))) + template
        slow = not is_torchvision_available()
        try:
            cls, media = getattr(transformers, name), {}
            for kind, given in parts.items():
                pil = f"{kind}Pil" if slow and hasattr(transformers, f"{kind}Pil") else kind
                if not (slow and "Video" in kind):
                    part = "video_processor" if "Video" in kind else "image_processor"
                    media[part] = getattr(transformers, pil)(**given)
            if lacking := set(cls.get_attributes()) - {*media, "tokenizer"}:
                cls, options = images_alone(cls), {**dict.fromkeys(lacking), **options}
            made = cls(**media, tokenizer=tokenizer, **options)
            made.video_processor = media.get("video_processor")
        except ImportError as error:
            raise missing(f"reading images with {self._file.path}", "torchvision") from error
        made.chat_template = tokenizer.chat_template = template
        return made

    def _media(self) -> tuple[str, dict[str, Any], dict[str, dict[str, Any]]]:
        """As of the row; parts have the means and deviations of colours."""
        name, options, parts = self.row.media(self)
        colours = {name: self(f"vision.{name}") for name in ("image_mean", "image_std")}
        return name, options, {kind: {**colours, **given} for kind, given in parts.items()}

    def width(self) -> int:
        """Output size of the projector."""
        name, axis = self.row.output
        return self.tensors[name].shape[axis]

    def inner(self) -> int:
        """Intermediate size of an MLP, from its weight; metadata of Qwen-VL have a different number or 0."""
        return prod(self.tensors["v.blk.0.ffn_up.weight"].shape) // int(self("vision.embedding_length"))

    def merge(self) -> int:
        """Number of patches per side that are merged into one token, by either of llama.cpp's keys."""
        return int(self("vision.projector.scale_factor", self("vision.spatial_merge_size", self.row.merge)))

    def length(self) -> int:
        """Number of tokens per image or tile."""
        return int(self("vision.image_size") // self("vision.patch_size") // self.merge()) ** 2

    def square(self) -> dict[str, int]:
        return {"height": self("vision.image_size"), "width": self("vision.image_size")}

    def token(self, *names: str) -> int:
        """Id of the first of these tokens that is in the vocabulary. Raises ``UserError``: none is."""
        tokens: list[str] = self.language.metadata.get("tokenizer.ggml.tokens", [])
        if found := [name for name in names if name in tokens]:
            return tokens.index(found[0])
        raise self._refused(f"the token {' or '.join(names)} in its vocabulary, found none")

    def _refused(self, expected: str) -> UserError:
        return UserError(
            f"{str(self.language.path)!r} is not the language model of a {self.kind} projector: expected {expected}"
        )

    def text(self, *names: str) -> str:
        """Text of the first of these tokens that is in the vocabulary."""
        return str(self.language.metadata["tokenizer.ggml.tokens"][self.token(*names)])


_SOUNDS = ("a.", "mm.a.")  # tensors of models that hear


class _ImagesAlone(transformers.ProcessorMixin):
    """Drops processors of other media, which need further packages: torchvision for videos."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        known = (*self.get_attributes(), "chat_template")
        given = [part for part in args if part is not None]
        super().__init__(*given, **{name: value for name, value in kwargs.items() if name in known})
        self.video_processor = self.image_processor  # some classes read its options

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


@cache
def images_alone(cls: Any) -> Any:
    """A class of transformers' processors for images and texts alone."""
    return type(cls.__name__, (cls, _ImagesAlone), {})


_WITH_IMAGES = """\
{%- set given = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- set text = namespace(value='') -%}
{%- if message['content'] is string or not message['content'] -%}{%- set text.value = message['content'] -%}
{%- else -%}
{%- for item in message['content'] -%}
{%- set text.value = text.value + (IMAGE if item['type'] == 'image' else item['text']) -%}
{%- endfor -%}
{%- endif -%}
{%- set given.messages = given.messages + [dict(message, content=text.value)] -%}
{%- endfor -%}
{%- set messages = given.messages -%}
"""
"""Preamble for text-only chat templates: converts messages with images to texts with image tokens."""
