"""Vision-language models in two GGUF files, as in llama.cpp: language model and projector (``mmproj``).

Tensor and metadata names follow llama.cpp's ``convert_hf_to_gguf.py --mmproj`` and, for LLaVA, the older
``convert_image_encoder_to_gguf.py``. Values missing in files come from published configurations of the family.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import is_torchvision_available

from mmspec.errors import UserError, explained
from mmspec.targets import gguf, gguf_models
from mmspec.targets.gguf_file import GGUFFile, GGUFTensor
from mmspec.targets.sources import LazySource

_TOWER, _PROJECTOR, _VISUAL = "model.vision_tower", "model.multi_modal_projector", "model.visual"
_WHOLE = ("class_embedding", "cls_token", "position_embeddings", "lambda_1", "lambda_2", "projection_weight", "newline")
"""Suffixes of parameter names without a module."""


class VisionSource(LazySource):
    """Model source of a language model file and a projector file.

    Raises:
        UserError: a file cannot be read, has an unknown family, or does not fit the other file.
    """

    def __init__(self, path: str | Path, mmproj: str | Path) -> None:
        language = GGUFFile(path)
        self._family = _family(GGUFFile(mmproj), language)
        super().__init__(str(gguf.index(language)), f"{path} with {mmproj}", self._weights, language)

    @cached_property
    def _text(self) -> Any:
        return gguf.config(self._language)

    def config(self, **options: Any) -> Any:
        with self._family.explained():
            made = self._family.config(self._text)
        made.name_or_path = self.folder
        return made

    def generation_config(self, config: Any) -> GenerationConfig:
        return gguf.generation_config(self._language, self._text)

    def processor(self, cls: Any, **options: Any) -> Any:
        folder = gguf.write_index(self._language)
        with self._family.explained():
            return cls(self._family.with_template(partial(gguf.read_tokenizer, folder)))

    def _weights(self, model: PreTrainedModel) -> dict[str, Any]:
        with torch.device("meta"):
            text = AutoModelForCausalLM.from_config(self._text)
        language, prefix = gguf_models.read_weights(self._language, text), f"model.{self._family.language_model}."
        weights: dict[str, Any] = {re.sub(r"^model\.", prefix, name): weight for name, weight in language.items()}
        with self._family.explained():
            return weights | self._family.weights(model)


def _family(file: GGUFFile, language: GGUFFile) -> _Family:
    """The family of a projector's file.

    Raises:
        UserError: the file is not a projector, has an unknown type, or does not fit the language model.
    """
    metadata = file.metadata
    names = (metadata.get(f"clip.{prefix}projector_type") for prefix in ("", "vision."))
    old = "mlp" if metadata.get("clip.has_llava_projector") else None
    kind = next((name for name in names if name), old)
    if file.architecture() != "clip" or kind not in FAMILIES:
        raise UserError(
            f"cannot read {str(file.path)!r}: expected the mmproj file of a projector of type {', '.join(FAMILIES)}, "
            f"found {f'type {kind}' if kind else f'a file of {file.architecture()} without one'}"
        )
    found = FAMILIES[kind](kind, file, language)
    with found.explained():
        width, expected = found.width(), language.get("embedding_length")
    if width != expected:
        raise UserError(
            f"{str(file.path)!r} does not fit {str(language.path)!r}: expected a projector to the language model's "
            f"{expected} features, found one to {width}"
        )
    return found


class _Weight:
    """Lazy weight from tensors of a file: ``weight[...]`` reads it, dequantised."""

    def __init__(self, tensors: list[GGUFTensor], change: Callable[..., Tensor], shape: tuple[int, ...] | None) -> None:
        self._tensors, self._change, self.shape = tensors, change, shape

    def __getitem__(self, index: Any) -> Tensor:
        value = self._change(*(tensor[...] for tensor in self._tensors))
        if self.shape is not None and value.squeeze().shape == torch.Size(size for size in self.shape if size != 1):
            value = value.reshape(self.shape)
        return value[index]


def _order(name: str) -> tuple[int, str]:
    """Sort key: queries, keys and values in this order; otherwise, names without a number first."""
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
"""Preamble for text-only chat templates: converts messages with images to texts with image tokens."""

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _Family(ABC):
    """Converts the files of models with one type of projector to transformers.

    Attributes:
        model_type: model type of the transformers configuration.
        layer: name of a layer in the model, with a placeholder for its number.
        layers: module names of a layer in the file, mapped to names in the model's layer.
        modules: all other module names, mapped to names in the model.
        output: tensor and axis that have the language model's hidden size.
        image: candidate image tokens for chat templates; the first token in the vocabulary is used.
        template: chat template for texts, if the language model's file has none.
        placed: image token and surrounding text, for text-only templates.
        language_model: name of the language model in the model.
        gelu: activation that llama.cpp calls "gelu".
        scale: patches per side that are merged into one token, if the file does not say.
        changes: tensor conversions by suffix of the name in the model; by default, a single tensor is used unchanged.
        unused: weights that do not affect outputs and are not in the file.
    """

    model_type: str
    layer: ClassVar[str]
    layers: ClassVar[dict[str, str]]
    modules: ClassVar[dict[str, str]]
    output: ClassVar[tuple[str, int]]
    image: ClassVar[tuple[str, ...]] = ("<image>",)
    template: ClassVar[str] = _CHATML
    placed: ClassVar[str] = "{}"
    language_model: ClassVar[str] = "language_model"
    gelu: ClassVar[str] = "gelu"
    scale: ClassVar[int] = 2
    changes: ClassVar[Mapping[str, Callable[..., Tensor]]] = {}
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, kind: str, file: GGUFFile, language: GGUFFile) -> None:
        self._kind, self._file, self._language = kind, file, language
        self._tokens: list[str] = language.metadata.get("tokenizer.ggml.tokens", [])

    def vision(self) -> dict[str, Any]:
        """Additional fields of the vision tower's configuration."""
        return {}

    @abstractmethod
    def fields(self, text: Any) -> dict[str, Any]:
        """Fields of the model's configuration; ``text`` is the language model's configuration."""

    @abstractmethod
    def processor(self, read: Callable[..., Any]) -> Any:
        """transformers' processor; without video support if torchvision is missing. ``read`` returns the tokenizer."""

    def explained(self) -> Any:
        """Context that converts errors of incomplete files to one-line messages."""
        of = f"expected the metadata and tensors of a {self._kind} projector"
        return explained(f"cannot read {str(self._file.path)!r}: {of}", KeyError, IndexError, TypeError, ValueError)

    def config(self, text: Any) -> Any:
        """The model's configuration."""
        metadata = self._file.metadata
        act = "silu" if metadata.get("clip.use_silu") else "quick_gelu"
        vision = {
            "hidden_size": self._get("embedding_length"),
            "intermediate_size": self._inner(),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": self._get("attention.head_count"),
            "image_size": self._get("image_size"),
            "patch_size": self._get("patch_size"),
            "layer_norm_eps": self._get("attention.layer_norm_epsilon"),
            "hidden_act": self.gelu if metadata.get("clip.use_gelu") else act,
        }
        fields = {"text_config": text.to_dict(), "tie_word_embeddings": text.tie_word_embeddings}
        fields["vision_config"] = vision | self.vision()
        return CONFIG_MAPPING[self.model_type].from_dict(fields | self.fields(text))

    def with_template(self, read: Callable[..., Any]) -> Any:
        """The processor with the chat template of the language model's file or of the family."""
        made = self.processor(read)
        given, image = made.tokenizer.chat_template or self.template, self._text(*self.image)
        if re.search("""['"]image['"]""", given):
            template = given.replace(self.image[0], image)
        else:
            template = _WITH_IMAGES.replace("IMAGE", json.dumps(self.placed.format(image))) + given
        made.chat_template = made.tokenizer.chat_template = template
        return made

    def width(self) -> int:
        """Output size of the projector."""
        name, axis = self.output
        return self._file.tensors[name].shape[axis]

    def weights(self, model: PreTrainedModel) -> dict[str, Any]:
        """Weights of vision tower and projector by name in the model.

        Raises:
            UserError: a tensor does not belong to the family.
        """
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        parts: defaultdict[str, dict[str, GGUFTensor]] = defaultdict(dict)
        for name, tensor in self._file.tensors.items():
            parts[self._name(name)][name] = tensor
        found: dict[str, Any] = {name: torch.zeros(shapes[name], dtype=torch.float32) for name in self.unused}
        for name, tensors in parts.items():
            change = next((one for end, one in self.changes.items() if name.endswith(end)), lambda tensor: tensor)
            ordered = [tensors[key] for key in sorted(tensors, key=_order)]
            found[name] = _Weight(ordered, change, shapes.get(name))
        return found

    def _name(self, name: str) -> str:
        """Map a tensor name to a weight name in the model."""
        module, end = re.fullmatch(r"(.*?)(\.weight|\.bias|)(?:\.1)?", name).groups()  # type: ignore[union-attr]
        if layer := re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", module):
            found = self.layers.get(self._unswapped(layer[1], layer[2]))
            found = found and f"{self.layer.format(layer[1])}.{found}"
        else:
            found = self.modules.get(module)
        if found is None:
            raise UserError(
                f"cannot read {str(self._file.path)!r}: expected the tensors of a {self._kind} projector, found {name}"
            )
        return found if found.endswith(_WHOLE) else found + end

    def _unswapped(self, layer: str, module: str) -> str:
        """Undo the swapped names of up and down projections in files of older converters."""
        if self._file.tensors[f"v.blk.{layer}.ffn_down.weight"].shape[0] != self._get("embedding_length"):
            return {"ffn_down": "ffn_up", "ffn_up": "ffn_down"}.get(module, module)
        return module

    def _get(self, key: str, *default: Any) -> Any:
        """The value of ``clip.vision.{key}``."""
        metadata, key = self._file.metadata, f"clip.vision.{key}"
        return metadata.get(key, *default) if default else metadata[key]

    def _inner(self) -> int:
        """Intermediate size of an MLP, from its weight; metadata of Qwen-VL have a different number or 0."""
        return prod(self._file.tensors["v.blk.0.ffn_up.weight"].shape) // int(self._get("embedding_length"))

    def _scale(self) -> int:
        """Number of patches per side that are merged into one token."""
        return int(self._get("projector.scale_factor", self.scale))

    def _length(self) -> int:
        """Number of tokens per image or tile."""
        return (self._get("image_size") // self._get("patch_size") // self._scale()) ** 2

    def _token(self, *names: str) -> int:
        """Id of the first of these tokens that is in the vocabulary.

        Raises:
            UserError: no token is in the vocabulary.
        """
        if found := [name for name in names if name in self._tokens]:
            return self._tokens.index(found[0])
        raise UserError(
            f"{str(self._language.path)!r} is not the language model of a {self._kind} projector: expected the token "
            f"{' or '.join(names)} in its vocabulary, found none"
        )

    def _text(self, *names: str) -> str:
        """Text of the first of these tokens that is in the vocabulary."""
        return self._tokens[self._token(*names)]

    def _square(self) -> dict[str, int]:
        return {"height": self._get("image_size"), "width": self._get("image_size")}

    def _media(self, kind: str, **options: Any) -> Any:
        """A processor of transformers for images or videos, such as ``CLIPImageProcessor``."""
        pil = kind.endswith("ImageProcessor") and not is_torchvision_available()
        colours = {name: self._get(name) for name in ("image_mean", "image_std")}
        return getattr(transformers, f"{kind}{'Pil' if pil else ''}")(**colours, **options)


class _Clip(_Family):
    """Models with a vision tower whose modules are named as in CLIP and SigLIP."""

    layer = f"{_TOWER}.encoder.layers.{{}}"
    layers = {f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"} | {
        "attn_out": "self_attn.out_proj",
        "ln1": "layer_norm1",
        "ln2": "layer_norm2",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }
    modules: ClassVar[dict[str, str]] = {
        "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
        "v.position_embd": f"{_TOWER}.embeddings.position_embedding",
        "v.post_ln": f"{_TOWER}.post_layernorm",
    }
    gelu = "gelu_pytorch_tanh"


class _Llava(_Clip):
    """LLaVA 1.5, and LLaVA 1.6, whose files have pinpoints: sizes of images in tiles.

    Original checkpoints have no image token: a token that does not occur in text is used instead.
    """

    modules = _Clip.modules | {
        "v.class_embd": f"{_TOWER}.embeddings.class_embedding",
        "v.pre_ln": f"{_TOWER}.pre_layrnorm",
        "mm.0": f"{_PROJECTOR}.linear_1",
        "mm.2": f"{_PROJECTOR}.linear_2",
    }
    output = ("mm.2.weight", 0)
    image = ("<image>", "<unk>", "<|reserved_special_token_0|>")
    template = (
        "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() }}: {% endif %}"
        "{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    placed = "{}\n"
    gelu = "gelu"
    unused = (f"{_TOWER}.post_layernorm.weight", f"{_TOWER}.post_layernorm.bias")

    _tiles: dict[str, Any]

    def __init__(self, kind: str, file: GGUFFile, language: GGUFFile) -> None:
        super().__init__(kind, file, language)
        self.model_type, self._tiles = "llava", {}
        if flat := self._get("image_grid_pinpoints", None):
            self.model_type = "llava_next"
            self._tiles = {"image_grid_pinpoints": [flat[at : at + 2] for at in range(0, len(flat), 2)]}

    def _name(self, name: str) -> str:
        newline = self._tiles and name in ("model.image_newline", "v.image_newline")
        return "model.image_newline" if newline else super()._name(name)

    def vision(self) -> dict[str, Any]:
        return {"model_type": "clip_vision_model"}

    def fields(self, text: Any) -> dict[str, Any]:
        layers = self._get("feature_layer", None) or [self._get("block_count")]
        image = {"image_token_index": self._token(*self.image), **self._tiles}
        return {**image, "vision_feature_layer": layers[0] if len(layers) == 1 else layers}

    def processor(self, read: Callable[..., Any]) -> Any:
        image = self._text(*self.image)
        tokenizer = read(extra_special_tokens={"image_token": image})
        if tokenizer.pad_token == image:
            tokenizer.pad_token = None
        sizes = {"size": {"shortest_edge": self._get("image_size")}, "crop_size": self._square()}
        options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        images = self._media("LlavaNextImageProcessor" if self._tiles else "CLIPImageProcessor", **self._tiles, **sizes)
        cls = transformers.LlavaNextProcessor if self._tiles else transformers.LlavaProcessor
        return cls(images, tokenizer, patch_size=self._get("patch_size"), **options)


class _Idefics3(_Clip):
    """Idefics3 and SmolVLM, which share the architecture."""

    model_type = "idefics3"
    layer = "model.vision_model.encoder.layers.{}"
    modules = {name: module.replace(_TOWER, "model.vision_model") for name, module in _Clip.modules.items()} | {
        "mm.model.fc": "model.connector.modality_projection.proj"
    }
    output = ("mm.model.fc.weight", 0)
    template = (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize }}:"
        "{{ '' if message['content'].startswith('<image>') else ' ' }}{{ message['content'] }}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    language_model = "text_model"

    def fields(self, text: Any) -> dict[str, Any]:
        return {"image_token_id": self._token("<image>"), "scale_factor": self._scale()}

    def processor(self, read: Callable[..., Any]) -> Any:
        size = self._get("image_size")
        edges = {"size": self._get("preproc_image_size", 4 * size), "max_image_size": size}
        images = self._media("Idefics3ImageProcessor", **{name: {"longest_edge": edge} for name, edge in edges.items()})
        return transformers.Idefics3Processor(images, read(), image_seq_len=self._length())


class _Gemma3(_Clip):
    model_type = "gemma3"
    modules = _Clip.modules | {
        "mm.input_projection": f"{_PROJECTOR}.mm_input_projection_weight",
        "mm.soft_emb_norm": f"{_PROJECTOR}.mm_soft_emb_norm",
    }
    output = ("mm.input_projection.weight", 1)
    image = ("<start_of_image>",)
    scale = 4
    template = (
        "{{ bos_token }}{% for message in messages %}<start_of_turn>"
        "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    changes: ClassVar[Mapping[str, Callable[..., Tensor]]] = {"mm_soft_emb_norm.weight": lambda weight: weight - 1}
    _names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "boi": ("<start_of_image>",),
        "eoi": ("<end_of_image>",),
        "image": ("<image_soft_token>", "<unused0>"),  # files may omit the first; its embedding is unused
    }

    def vision(self) -> dict[str, Any]:
        return {"model_type": "siglip_vision_model", "vision_use_head": False}

    def fields(self, text: Any) -> dict[str, Any]:
        ids = {f"{name}_token_index": self._token(*tokens) for name, tokens in self._names.items()}
        return {**ids, "mm_tokens_per_image": self._length()}

    def processor(self, read: Callable[..., Any]) -> Any:
        images = self._media("Gemma3ImageProcessor", size=self._square())
        names = {f"{name}_token": self._text(*tokens) for name, tokens in self._names.items()}
        tokenizer = read(extra_special_tokens=names)
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=self._length())


class _ImagesAlone:
    """Mixin for transformers processors without video processor, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class Qwen2VLImages(_ImagesAlone, transformers.Qwen2VLProcessor):
    pass


class InternVLImages(_ImagesAlone, transformers.InternVLProcessor):
    pass


class _InternVL(_Family):
    model_type = "internvl"
    layer = f"{_TOWER}.encoder.layer.{{}}"
    layers = {f"attn_{name}": f"attention.{name}_proj" for name in "qkv"} | {
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
    modules: ClassVar[dict[str, str]] = {
        "v.class_embd": f"{_TOWER}.embeddings.cls_token",
        "v.patch_embd": f"{_TOWER}.embeddings.patch_embeddings.projection",
        "v.position_embd": f"{_TOWER}.embeddings.position_embeddings",
        "mm.model.mlp.0": f"{_PROJECTOR}.layer_norm",
        "mm.model.mlp.1": f"{_PROJECTOR}.linear_1",
        "mm.model.mlp.3": f"{_PROJECTOR}.linear_2",
    }
    output = ("mm.model.mlp.3.weight", 0)
    image = ("<IMG_CONTEXT>",)
    placed = "{}\n"

    def vision(self) -> dict[str, Any]:
        tensors, size = self._file.tensors, (self._get("embedding_length"), self._get("block_count"))
        return {
            "attention_bias": "v.blk.0.attn_q.bias" in tensors,
            "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
            "norm_type": "rms_norm" if size == (3200, 45) else "layer_norm",  # llama.cpp's criterion for InternViT-6B
        }

    def fields(self, text: Any) -> dict[str, Any]:
        lengths = {"downsample_ratio": 1 / self._scale(), "image_seq_length": self._length()}
        return {"image_token_id": self._token(*self.image), **lengths}

    def processor(self, read: Callable[..., Any]) -> Any:
        names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
        tokenizer = read(extra_special_tokens={f"{name}_token": token for name, token in names.items()})
        tiles = {f"{end}_patches": self._get(f"preproc_{end}_tiles", most) for end, most in (("min", 1), ("max", 12))}
        images = self._media("GotOcr2ImageProcessor", size=self._square(), crop_to_patches=True, **tiles)
        if not is_torchvision_available():
            return InternVLImages(images, tokenizer, image_seq_length=self._length())
        videos = self._media("InternVLVideoProcessor", size=self._square())
        return transformers.InternVLProcessor(images, tokenizer, videos, image_seq_length=self._length())


class _Qwen2VL(_Family):
    model_type = "qwen2_vl"
    layer = f"{_VISUAL}.blocks.{{}}"
    layers = {f"attn_{name}": "attn.qkv" for name in ("q", "k", "v", "qkv")} | {
        "attn_out": "attn.proj",
        "ln1": "norm1",
        "ln2": "norm2",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }
    modules: ClassVar[dict[str, str]] = {
        "v.patch_embd": f"{_VISUAL}.patch_embed.proj",
        "v.post_ln": f"{_VISUAL}.merger.ln_q",
        "mm.0": f"{_VISUAL}.merger.mlp.0",
        "mm.2": f"{_VISUAL}.merger.mlp.2",
    }
    output = ("mm.2.weight", 0)
    image = ("<|image_pad|>",)
    placed = "<|vision_start|>{}<|vision_end|>"
    changes: ClassVar[Mapping[str, Callable[..., Tensor]]] = {
        "attn.qkv.weight": lambda *tensors: torch.cat(tensors),
        "attn.qkv.bias": lambda *tensors: torch.cat(tensors),
        "patch_embed.proj.weight": lambda *frames: torch.stack(frames, 2),  # to a convolution over two frames
    }
    _processor: ClassVar[Any] = transformers.Qwen2VLProcessor

    def vision(self) -> dict[str, Any]:
        width = self._get("embedding_length")
        sizes = {"embed_dim": width, "hidden_size": self.width(), "mlp_ratio": self._inner() // width}
        return {**sizes, **self._depth()}

    def _depth(self) -> dict[str, Any]:
        """Depth and heads, under names supported by all versions of transformers."""
        sizes = {"depth": self._get("block_count"), "num_heads": self._get("attention.head_count")}
        return {**sizes, "spatial_merge_size": self._merge()}

    def fields(self, text: Any) -> dict[str, Any]:
        sections = [size for size in self._language.get("rope.dimension_sections") if size]
        rope = {**text.rope_parameters, "mrope_section": sections}
        ids = {f"vision_{end}_token_id": self._token(f"<|vision_{end}|>") for end in ("start", "end")}
        ids |= {f"{kind}_token_id": self._token(f"<|{kind}_pad|>") for kind in ("image", "video")}
        text = {**text.to_dict(), "model_type": f"{self.model_type}_text", "rope_parameters": rope}
        return {"text_config": text, **ids}

    def processor(self, read: Callable[..., Any]) -> Any:
        size = {"shortest_edge": 4 * 28**2, "longest_edge": 16384 * 28**2}  # pixels
        options = {"patch_size": self._get("patch_size"), "merge_size": self._merge(), "size": size}
        images, tokenizer = self._media("Qwen2VLImageProcessor", **options), read()
        if not is_torchvision_available():
            return Qwen2VLImages(images, tokenizer)
        return self._processor(images, tokenizer, self._media("Qwen2VLVideoProcessor", **options))

    def _merge(self) -> int:
        return int(self._get("spatial_merge_size", 2))


class _Qwen2_5VL(_Qwen2VL):  # noqa: N801
    model_type = "qwen2_5_vl"
    layers = _Qwen2VL.layers | {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    _processor = transformers.Qwen2_5_VLProcessor

    def vision(self) -> dict[str, Any]:
        layers = range(self._get("n_wa_pattern") - 1, self._get("block_count"), self._get("n_wa_pattern"))
        windows = {"fullatt_block_indexes": list(layers), "window_size": 112, "tokens_per_second": 2}
        return {**windows, **self._depth(), "out_hidden_size": self.width()}


FAMILIES: dict[str, type[_Family]] = {
    "mlp": _Llava,
    "idefics3": _Idefics3,
    "qwen2vl_merger": _Qwen2VL,
    "qwen2.5vl_merger": _Qwen2_5VL,
    "gemma3": _Gemma3,
    "internvl": _InternVL,
}
"""Family by projector type, ``clip.projector_type``."""
