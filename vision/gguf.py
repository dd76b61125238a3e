"""Vision-language models in two GGUF files, as llama.cpp has them: the language model's, and that of the vision tower
and projector (``mmproj``).

Names of tensors and metadata are those of llama.cpp's ``convert_hf_to_gguf.py --mmproj`` and, for LLaVA, of its older
``convert_image_encoder_to_gguf.py``. What files do not state is as published configurations of the family have it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import is_torchvision_available

from mmspec.errors import UserError, explained
from mmspec.targets import gguf_model
from mmspec.targets.gguf import GGUFFile, GGUFTensor
from mmspec.targets.sources import LazySource

_QWEN_LANGUAGE = {"qwen2vl": "qwen2"}
"""Architectures of language models whose weights and fields are those of another one, but for the positions of
images."""


class VisionSource(LazySource):
    """A language model's file, and a projector's.

    Raises:
        UserError: a file cannot be read, is of an unknown family, or does not fit the other one.
    """

    def __init__(self, path: str | Path, mmproj: str | Path) -> None:
        self._language, projector = _as_text(GGUFFile(path)), GGUFFile(mmproj)
        self._projector = _Projector(projector, self._language)
        super().__init__(
            str(gguf_model.index(self._language)),
            f"{path} with {mmproj}",
            self._weights,
            gguf_model.dtype_of(self._language),
        )

    @cached_property
    def _text(self) -> Any:
        return gguf_model.config(self._language)

    def config(self, **options: Any) -> Any:
        with self._projector.explained():
            made = self._projector.config(self._text)
        made.name_or_path = self.folder
        return made

    def generation_config(self, config: Any) -> GenerationConfig:
        return gguf_model.generation_config(self._language, self._text)

    def processor(self, cls: Any, **options: Any) -> Any:
        folder = gguf_model.write_index(self._language)
        with self._projector.explained():
            return cls(self._projector.processor(partial(gguf_model.read_tokenizer, folder)))

    def _weights(self, model: PreTrainedModel) -> dict[str, Any]:
        with torch.device("meta"):
            text = AutoModelForCausalLM.from_config(self._text)
        prefix = f"model.{self._projector.family.language}."
        language = gguf_model.weights(self._language, text)
        return {re.sub(r"^model\.", prefix, name): weight for name, weight in language.items()} | (
            self._projector.weights(model)
        )


def _as_text(file: GGUFFile) -> GGUFFile:
    """A language model's file, as that of a text model that transformers reads."""
    architecture = file.architecture()
    if (name := _QWEN_LANGUAGE.get(architecture)) is None:
        return file
    same = copy(file)
    same.metadata = {re.sub(rf"^{architecture}\.", f"{name}.", key): value for key, value in file.metadata.items()} | {
        "general.architecture": name
    }
    return same


@dataclass(frozen=True)
class _Family:
    """Models with one type of projector.

    Attributes:
        model_type: of transformers' configuration.
        layers: names of a layer's modules in the file to those in the model, relative to the layer.
        layer: prefix of a layer in the model, with its number.
        modules: the other names.
        output: tensor and axis with the language model's width.
        vision: fields of the tower's configuration besides those that all towers have.
        config: fields of the model's configuration.
        processor: from a projector and a tokenizer's reader.
        image: tokens that may stand for an image in a chat template; the first of them that the vocabulary has does.
        template: of chats with texts, where the language model's file has none.
        placed: the token of an image and what stands around it, where a template is one for texts.
        language: name of the language model in the model.
        activation: what llama.cpp calls ``gelu``.
        changes: of tensors, by the end of the name in the model; by default the only one is taken as it is.
        unused: weights of the model that no output depends on, and that are not in the file.
    """

    model_type: str
    layers: Mapping[str, str]
    layer: str
    modules: Mapping[str, str]
    output: tuple[str, int]
    vision: Callable[[_Projector], dict[str, Any]]
    config: Callable[[_Projector, Any], dict[str, Any]]
    processor: Callable[[_Projector, Any], Any]
    image: tuple[str, ...]
    template: str
    placed: str = "{}"
    language: str = "language_model"
    activation: str = "gelu"
    changes: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


class _Projector:
    """A projector's file.

    Raises:
        UserError: it is none, of an unknown type, or does not fit the language model.
    """

    def __init__(self, file: GGUFFile, language: GGUFFile) -> None:
        self.file, self.language = file, language
        metadata = file.metadata
        names = (metadata.get(f"clip.{prefix}projector_type") for prefix in ("", "vision."))
        old = "mlp" if metadata.get("clip.has_llava_projector") else None
        self.type = next((name for name in names if name), old)
        if file.architecture() != "clip" or self.type not in FAMILIES:
            found = self.type or f"none in a file of {file.architecture()}"
            raise UserError(
                f"cannot read {str(file.path)!r}: expected the mmproj file of a projector of type "
                f"{', '.join(FAMILIES)}, found type {found}"
            )
        self.family = FAMILIES[self.type] if self.pinpoints is None else _LLAVA_NEXT
        with self.explained():
            name, axis = self.family.output
            width, expected = file.tensors[name].shape[axis], language.get("embedding_length")
        if width != expected:
            raise UserError(
                f"{str(file.path)!r} does not fit {str(language.path)!r}: expected a projector to the language "
                f"model's {expected} features, found one to {width}"
            )

    def explained(self) -> Any:
        return explained(
            f"cannot read {str(self.file.path)!r}: expected the metadata and tensors of a {self.type} projector",
            KeyError,
            IndexError,
            TypeError,
            ValueError,
        )

    @property
    def pinpoints(self) -> list[list[int]] | None:
        """Sizes of images that LLaVA 1.6 is trained with; None for other models."""
        flat = self.get("image_grid_pinpoints", None) if self.type == "mlp" else None
        return flat and [flat[place : place + 2] for place in range(0, len(flat), 2)]

    def get(self, key: str, *default: Any) -> Any:
        """The value of ``clip.vision.{key}``."""
        metadata, key = self.file.metadata, f"clip.vision.{key}"
        return metadata.get(key, *default) if default else metadata[key]

    @property
    def side(self) -> int:
        """Patches along one side of an image."""
        return int(self.get("image_size")) // int(self.get("patch_size"))

    def token(self, *names: str) -> int:
        """The first of these tokens that the vocabulary has.

        Raises:
            UserError: it has none of them.
        """
        tokens = self.language.metadata["tokenizer.ggml.tokens"]
        if found := [tokens.index(name) for name in names if name in tokens]:
            return int(found[0])
        raise UserError(
            f"{str(self.language.path)!r} is not the language model of a {self.type} projector: expected the token "
            f"{' or '.join(names)} in its vocabulary, found none"
        )

    def text(self, *names: str) -> str:
        """The same, as text."""
        return str(self.language.metadata["tokenizer.ggml.tokens"][self.token(*names)])

    def config(self, text: Any) -> Any:
        """The model's configuration."""
        metadata, family = self.file.metadata, self.family
        vision = {
            "hidden_size": self.get("embedding_length"),
            "intermediate_size": self._inner(),
            "num_hidden_layers": self.get("block_count"),
            "num_attention_heads": self.get("attention.head_count"),
            "image_size": self.get("image_size"),
            "patch_size": self.get("patch_size"),
            "layer_norm_eps": self.get("attention.layer_norm_epsilon"),
            "hidden_act": "quick_gelu",
        }
        if metadata.get("clip.use_gelu"):
            vision["hidden_act"] = family.activation
        elif metadata.get("clip.use_silu"):
            vision["hidden_act"] = "silu"
        fields = {"text_config": text.to_dict(), "tie_word_embeddings": text.tie_word_embeddings}
        fields["vision_config"] = vision | family.vision(self)
        return CONFIG_MAPPING[family.model_type].from_dict(fields | family.config(self, text))

    def processor(self, read_tokenizer: Callable[..., Any]) -> Any:
        """The model's processor, of transformers; without torchvision it takes no videos.

        Args:
            read_tokenizer: takes options of the tokenizer.
        """
        made = self.family.processor(self, read_tokenizer)
        made.chat_template = made.tokenizer.chat_template = self._template(made.tokenizer.chat_template)
        return made

    def _template(self, given: str | None) -> str:
        """The chat template of the language model's file or the family, which takes images."""
        family, image = self.family, self.text(*self.family.image)
        given = given or family.template
        if re.search("""['"]image['"]""", given):
            return given.replace(family.image[0], image)
        return _WITH_IMAGES.replace("IMAGE", json.dumps(family.placed.format(image))) + given

    def _inner(self) -> int:
        """Features between the two products of a layer; older metadata have 0."""
        return prod(self.file.tensors["v.blk.0.ffn_up.weight"].shape) // int(self.get("embedding_length"))

    def weights(self, model: PreTrainedModel) -> dict[str, Any]:
        """The weights of tower and projector by their names in the model.

        Raises:
            UserError: a tensor is not one of the family's.
        """
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        parts: defaultdict[str, dict[str, GGUFTensor]] = defaultdict(dict)
        for name, tensor in self.file.tensors.items():
            parts[self._name(name)][name] = tensor
        found: dict[str, Any] = {}
        for name, tensors in parts.items():
            change = next((one for end, one in self.family.changes.items() if name.endswith(end)), _only)
            ordered = [tensors[key] for key in sorted(tensors, key=_order)]
            found[name] = _Weight(ordered, change, shapes.get(name))
        for name in self.family.unused:
            found.setdefault(name, torch.zeros(shapes[name]))
        return found

    def _name(self, name: str) -> str:
        """Of a tensor's weight in the model."""
        module, end = re.fullmatch(r"(.*?)(\.weight|\.weight\.1|\.bias|)", name).groups()  # type: ignore[union-attr]
        end = ".weight" if end == ".weight.1" else end
        if layer := re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", module):
            found = self.family.layers.get(self._unswapped(layer[1], layer[2]))
            found = found and self.family.layer.format(layer[1]) + found
        else:
            found = self.family.modules.get(module)
        if found is None:
            raise UserError(
                f"cannot read {str(self.file.path)!r}: expected the tensors of a {self.type} projector, found {name}"
            )
        return found if found.endswith(_WHOLE) else found + end

    def _unswapped(self, layer: str, module: str) -> str:
        """The module that older converters call by another's name: they swapped up and down."""
        if self.file.tensors[f"v.blk.{layer}.ffn_down.weight"].shape[0] != self.get("embedding_length"):
            return {"ffn_down": "ffn_up", "ffn_up": "ffn_down"}.get(module, module)
        return module


class _Weight:
    """A weight of the model, of tensors of a file: ``weight[...]`` reads it, dense."""

    def __init__(self, tensors: list[GGUFTensor], change: Callable[..., Tensor], shape: tuple[int, ...] | None) -> None:
        self._tensors, self._change, self.shape = tensors, change, shape

    def __getitem__(self, index: Any) -> Tensor:
        value = self._change(*(tensor[...] for tensor in self._tensors))
        if self.shape is not None and _long(value.shape) == _long(self.shape):
            value = value.reshape(self.shape)
        return value[index]


def _long(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size > 1]


def _only(tensor: Tensor) -> Tensor:
    return tensor


def _joined(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def _of_frames(*tensors: Tensor) -> Tensor:
    """A convolution over two frames, of one per frame."""
    return torch.stack(tensors, 2)


def _order(name: str) -> tuple[int, str]:
    """Queries, keys and values come in this order, then names with a number at their end."""
    return next((place for place, part in enumerate(("attn_q", "attn_k", "attn_v")) if part in name), 3), name


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
"""Before a chat template for texts: messages with images become texts with the image's token."""

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VICUNA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() }}: {% endif %}"
    "{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_UTTERANCES = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{{ '' if message['content'].startswith('<image>') else ' ' }}{{ message['content'] }}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


class _ImagesAlone:
    """A processor of transformers without its video processor, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class Qwen2VLImages(_ImagesAlone, transformers.Qwen2VLProcessor):  # type: ignore[misc]
    pass


class InternVLImages(_ImagesAlone, transformers.InternVLProcessor):  # type: ignore[misc]
    pass


def _images(kind: str, projector: _Projector, **options: Any) -> Any:
    """An image processor of transformers."""
    kind = f"{kind}ImageProcessor" + ("" if is_torchvision_available() else "Pil")
    mean, std = projector.get("image_mean"), projector.get("image_std")
    return getattr(transformers, kind)(image_mean=mean, image_std=std, **options)


def _square(size: int) -> dict[str, int]:
    return {"height": size, "width": size}


def _nothing(projector: _Projector) -> dict[str, Any]:
    return {}


def _clip(projector: _Projector) -> dict[str, Any]:
    return {"model_type": "clip_vision_model"}


def _llava_config(projector: _Projector, text: Any) -> dict[str, Any]:
    layers = projector.get("feature_layer", None) or [projector.get("block_count")]
    fields = {
        "image_token_index": projector.token(*_LLAVA_IMAGE),
        "vision_feature_layer": layers[0] if len(layers) == 1 else layers,
        "image_seq_length": projector.side**2,
    }
    return fields if projector.pinpoints is None else fields | {"image_grid_pinpoints": projector.pinpoints}


def _llava_processor(projector: _Projector, read_tokenizer: Any) -> Any:
    size, image = projector.get("image_size"), projector.text(*_LLAVA_IMAGE)
    tokenizer = read_tokenizer(extra_special_tokens={"image_token": image})
    if tokenizer.pad_token == image:
        tokenizer.pad_token = None
    sizes: dict[str, Any] = {"size": {"shortest_edge": size}, "crop_size": _square(size)}
    options = {
        "patch_size": projector.get("patch_size"),
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    if projector.pinpoints is None:
        return transformers.LlavaProcessor(_images("CLIP", projector, **sizes), tokenizer, **options)
    images = _images("LlavaNext", projector, image_grid_pinpoints=projector.pinpoints, **sizes)
    return transformers.LlavaNextProcessor(images, tokenizer, **options)


def _idefics3_config(projector: _Projector, text: Any) -> dict[str, Any]:
    return {"image_token_id": projector.token("<image>"), "scale_factor": _scale(projector)}


def _idefics3_processor(projector: _Projector, read_tokenizer: Any) -> Any:
    size = projector.get("image_size")
    longest = projector.get("preproc_image_size", 4 * size)
    images = _images("Idefics3", projector, size={"longest_edge": longest}, max_image_size={"longest_edge": size})
    length = (projector.side // _scale(projector)) ** 2
    return transformers.Idefics3Processor(images, read_tokenizer(), image_seq_len=length)


def _gemma3_config(projector: _Projector, text: Any) -> dict[str, Any]:
    return {
        "image_token_index": _soft_token(projector),
        "boi_token_index": projector.token("<start_of_image>"),
        "eoi_token_index": projector.token("<end_of_image>"),
        "mm_tokens_per_image": (projector.side // _scale(projector, 4)) ** 2,
    }


def _soft_token(projector: _Projector) -> int:
    """The token in the place of an image's features; where files leave it out, the one after the vocabulary."""
    tokens = projector.language.metadata["tokenizer.ggml.tokens"]
    return tokens.index(_SOFT) if _SOFT in tokens else len(tokens)


def _gemma3_processor(projector: _Projector, read_tokenizer: Any) -> Any:
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": _SOFT}
    images = _images("Gemma3", projector, size=_square(projector.get("image_size")))
    length = (projector.side // _scale(projector, 4)) ** 2
    return transformers.Gemma3Processor(images, read_tokenizer(extra_special_tokens=names), image_seq_length=length)


def _internvl_vision(projector: _Projector) -> dict[str, Any]:
    tensors, wide = projector.file.tensors, (projector.get("embedding_length"), projector.get("block_count"))
    return {
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "norm_type": "rms_norm" if wide == (3200, 45) else "layer_norm",  # InternViT of 6 billion parameters
    }


def _internvl_config(projector: _Projector, text: Any) -> dict[str, Any]:
    return {
        "image_token_id": projector.token("<IMG_CONTEXT>"),
        "downsample_ratio": 1 / _scale(projector),
        "image_seq_length": (projector.side // _scale(projector)) ** 2,
    }


def _internvl_processor(projector: _Projector, read_tokenizer: Any) -> Any:
    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
    tokenizer = read_tokenizer(extra_special_tokens={f"{name}_token": token for name, token in names.items()})
    size = _square(projector.get("image_size"))
    tiles = projector.get("preproc_min_tiles", 1), projector.get("preproc_max_tiles", 12)
    images = _images("GotOcr2", projector, size=size, crop_to_patches=True, min_patches=tiles[0], max_patches=tiles[1])
    length = (projector.side // _scale(projector)) ** 2
    if not is_torchvision_available():
        return InternVLImages(images, tokenizer, image_seq_length=length)
    videos = transformers.InternVLVideoProcessor(
        size=size, image_mean=projector.get("image_mean"), image_std=projector.get("image_std")
    )
    return transformers.InternVLProcessor(images, tokenizer, videos, image_seq_length=length)


def _scale(projector: _Projector, default: int = 2) -> int:
    return int(projector.get("projector.scale_factor", default))


def _qwen2_vision(projector: _Projector) -> dict[str, Any]:
    width = projector.get("embedding_length")
    return {
        "depth": projector.get("block_count"),
        "embed_dim": width,
        "hidden_size": projector.language.get("embedding_length"),
        "mlp_ratio": projector._inner() // width,
        "num_heads": projector.get("attention.head_count"),
        "spatial_merge_size": projector.get("spatial_merge_size", 2),
    }


def _qwen2_5_vision(projector: _Projector) -> dict[str, Any]:
    depth, pattern = projector.get("block_count"), projector.get("n_wa_pattern")
    return {
        "depth": depth,
        "out_hidden_size": projector.language.get("embedding_length"),
        "num_heads": projector.get("attention.head_count"),
        "spatial_merge_size": projector.get("spatial_merge_size", 2),
        "fullatt_block_indexes": list(range(pattern - 1, depth, pattern)),
        "window_size": projector.get("window_size", 8 * projector.get("patch_size")),
        "tokens_per_second": 2,
    }


def _qwen_config(model_type: str, projector: _Projector, text: Any) -> dict[str, Any]:
    sections = [size for size in projector.language.get("rope.dimension_sections") if size]
    rope = {**text.rope_parameters, "mrope_section": sections}
    return {
        "text_config": {**text.to_dict(), "model_type": f"{model_type}_text", "rope_parameters": rope},
        **{f"{name}_token_id": projector.token(f"<|{token}|>") for name, token in _QWEN_TOKENS.items()},
    }


def _qwen_processor(projector: _Projector, read_tokenizer: Any) -> Any:
    options = {
        "patch_size": projector.get("patch_size"),
        "merge_size": projector.get("spatial_merge_size", 2),
        "size": {"shortest_edge": 4 * 28**2, "longest_edge": 16384 * 28**2},
    }
    images, tokenizer = _images("Qwen2VL", projector, **options), read_tokenizer()
    if not is_torchvision_available():
        return Qwen2VLImages(images, tokenizer)
    options |= {"image_mean": projector.get("image_mean"), "image_std": projector.get("image_std")}
    return transformers.Qwen2VLProcessor(images, tokenizer, transformers.Qwen2VLVideoProcessor(**options))


_SOFT = "<image_soft_token>"
_LLAVA_IMAGE = ("<image>", "<unk>", "<|reserved_special_token_0|>")  # LLaVA's own checkpoints have none of their own
_QWEN_TOKENS = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}

_CLIP_LAYERS = {f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"} | {
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN_LAYERS = {f"attn_{name}": "attn.qkv" for name in ("q", "k", "v", "qkv")} | {
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
}
_INTERN_LAYERS = {f"attn_{name}": f"attention.{name}_proj" for name in "qkv"} | {
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_out": "attention.projection_layer",
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def _siglip(tower: str) -> dict[str, str]:
    return {
        "v.patch_embd": f"{tower}.embeddings.patch_embedding",
        "v.position_embd": f"{tower}.embeddings.position_embedding",
        "v.post_ln": f"{tower}.post_layernorm",
    }


_TOWER, _PROJECTOR, _VISUAL = "model.vision_tower", "model.multi_modal_projector", "model.visual"
_WHOLE = ("class_embedding", "cls_token", "position_embeddings", "lambda_1", "lambda_2", "projection_weight", "newline")
"""Ends of names of parameters, not modules."""

_LLAVA = _Family(
    model_type="llava",
    layers=_CLIP_LAYERS,
    layer=f"{_TOWER}.encoder.layers.{{}}.",
    modules=_siglip(_TOWER)
    | {
        "v.class_embd": f"{_TOWER}.embeddings.class_embedding",
        "v.pre_ln": f"{_TOWER}.pre_layrnorm",
        "mm.0": f"{_PROJECTOR}.linear_1",
        "mm.2": f"{_PROJECTOR}.linear_2",
    },
    output=("mm.2.weight", 0),
    vision=_clip,
    config=_llava_config,
    processor=_llava_processor,
    image=_LLAVA_IMAGE,
    template=_VICUNA,
    placed="{}\n",
    unused=(f"{_TOWER}.post_layernorm.weight", f"{_TOWER}.post_layernorm.bias"),
)
_LLAVA_NEXT = replace(
    _LLAVA,
    model_type="llava_next",
    modules=_LLAVA.modules | dict.fromkeys(("model.image_newline", "v.image_newline"), "model.image_newline"),
)
_QWEN2_VL = _Family(
    model_type="qwen2_vl",
    layers=_QWEN_LAYERS | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    layer=f"{_VISUAL}.blocks.{{}}.",
    modules={
        "v.patch_embd": f"{_VISUAL}.patch_embed.proj",
        "v.post_ln": f"{_VISUAL}.merger.ln_q",
        "mm.0": f"{_VISUAL}.merger.mlp.0",
        "mm.2": f"{_VISUAL}.merger.mlp.2",
    },
    output=("mm.2.weight", 0),
    vision=_qwen2_vision,
    config=partial(_qwen_config, "qwen2_vl"),
    processor=_qwen_processor,
    image=("<|image_pad|>",),
    template=_CHATML,
    placed="<|vision_start|>{}<|vision_end|>",
    changes={"attn.qkv.weight": _joined, "attn.qkv.bias": _joined, "patch_embed.proj.weight": _of_frames},
)

FAMILIES = {
    "mlp": _LLAVA,
    "idefics3": _Family(
        model_type="idefics3",
        layers=_CLIP_LAYERS,
        layer="model.vision_model.encoder.layers.{}.",
        modules=_siglip("model.vision_model") | {"mm.model.fc": "model.connector.modality_projection.proj"},
        output=("mm.model.fc.weight", 0),
        vision=_nothing,
        config=_idefics3_config,
        processor=_idefics3_processor,
        image=("<image>",),
        template=_UTTERANCES,
        language="text_model",
        activation="gelu_pytorch_tanh",
    ),
    "qwen2vl_merger": _QWEN2_VL,
    "qwen2.5vl_merger": replace(
        _QWEN2_VL,
        model_type="qwen2_5_vl",
        layers=_QWEN_LAYERS | {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        vision=_qwen2_5_vision,
        config=partial(_qwen_config, "qwen2_5_vl"),
    ),
    "gemma3": _Family(
        model_type="gemma3",
        layers=_CLIP_LAYERS,
        layer=f"{_TOWER}.encoder.layers.{{}}.",
        modules=_siglip(_TOWER)
        | {
            "mm.input_projection": f"{_PROJECTOR}.mm_input_projection_weight",
            "mm.soft_emb_norm": f"{_PROJECTOR}.mm_soft_emb_norm",
        },
        output=("mm.input_projection.weight", 1),
        vision=lambda projector: {"model_type": "siglip_vision_model", "vision_use_head": False},
        config=_gemma3_config,
        processor=_gemma3_processor,
        image=("<start_of_image>",),
        template=_TURNS,
        activation="gelu_pytorch_tanh",
        changes={"mm_soft_emb_norm.weight": lambda weight: weight - 1},
    ),
    "internvl": _Family(
        model_type="internvl",
        layers=_INTERN_LAYERS,
        layer=f"{_TOWER}.encoder.layer.{{}}.",
        modules={
            "v.class_embd": f"{_TOWER}.embeddings.cls_token",
            "v.patch_embd": f"{_TOWER}.embeddings.patch_embeddings.projection",
            "v.position_embd": f"{_TOWER}.embeddings.position_embeddings",
            "mm.model.mlp.0": f"{_PROJECTOR}.layer_norm",
            "mm.model.mlp.1": f"{_PROJECTOR}.linear_1",
            "mm.model.mlp.3": f"{_PROJECTOR}.linear_2",
        },
        output=("mm.model.mlp.3.weight", 0),
        vision=_internvl_vision,
        config=_internvl_config,
        processor=_internvl_processor,
        image=("<IMG_CONTEXT>",),
        template=_CHATML,
        placed="{}\n",
    ),
}
"""By the types of projectors in files."""
