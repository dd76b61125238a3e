"""Small vision-language models of every family that files of llama.cpp may hold, and a writer of such files.

The writer names tensors by the package gguf's own table, and changes them as llama.cpp's converters do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as t
from torch import Tensor

from mmspec.vision.gguf import images_alone
from tests.gguf_mixtures import tensors_of
from tests.model_folders import tokenizer
from tests.model_folders import write_gguf as _write

_TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>"]
_TOKENS += ["<end_of_utterance>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
_TOKENS += [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
_TOKENS += ["<start_of_image>", "<end_of_image>", "<image_soft_token>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
_TOKENS += [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
_TOKENS += ["<|image_start|>", "<|image_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image|>", "<|video|>"]
_TOKENS += [f"<|{end}_of_{kind}|>" for end in ("begin", "end") for kind in ("image", "video")]
_TOKENS += ["<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"]
_TOKENS += ["</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"]
_VOCAB = 352

_COLOURS: dict[str, Any] = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}

_HALF = {"llava": ("patch_embedding", "linear_"), "gemma3": ("mm_input_projection",)}
_HALF["llava_next"] = _HALF["llava"]
"""Weights that converters write in float16 always."""


WITH_TORCHVISION = ("lfm2_vl", "mistral3", "pixtral")
"""Families whose images transformers reads with torchvision alone."""

FAMILIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("projector_configs.json").read_text())
"""Of each family, its configuration with sizes cut, and metadata of the files of the language model and the projector.
Token ids are places in ``_TOKENS``."""


def config(family: str) -> Any:
    return getattr(t, FAMILIES[family]["kind"])(**FAMILIES[family]["config"])


@cache
def model(family: str) -> Any:
    """A random model whose weights are all of a size that matters; those that files hold in float16 are such."""
    torch.manual_seed(0)
    made = t.AutoModelForImageTextToText.from_config(config(family)).float().eval()
    random = torch.Generator().manual_seed(1)
    for name, weight in made.named_parameters():
        if weight.ndim == 1:
            weight.data = torch.rand(weight.shape, generator=random) / 2 - 0.25
            if re.search(r"norm|ln_|lambda", name) and name.endswith(("weight", "_1", "_2")):
                weight.data += 0.0 if family == "gemma3" and re.search("language|soft", name) else 1.0
        else:
            weight.data.normal_(std=0.2, generator=random)
        if any(part in name for part in _HALF.get(family, ())) and weight.ndim > 1:
            weight.data = weight.data.half().float()
    made.get_output_embeddings().weight.data.normal_(std=0.5, generator=random)
    return made


def processor(family: str) -> Any:
    """The processor that belongs to it."""
    words = tokenizer(_VOCAB, _TOKENS)
    size: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, **_COLOURS}
    square: dict[str, Any] = {"size": {"height": 32, "width": 32}, **_COLOURS}
    if family in ("llava", "llava_next"):
        next_images = t.LlavaNextImageProcessorPil(
            image_grid_pinpoints=FAMILIES["llava_next"]["config"]["image_grid_pinpoints"], **size
        )
        kind, images = (t.LlavaProcessor, t.CLIPImageProcessorPil(**size))
        kind, images = (kind, images) if family == "llava" else (t.LlavaNextProcessor, next_images)
        options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return kind(images, words, patch_size=8, **options)
    if family in ("idefics3", "smolvlm"):
        edges = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
        return t.Idefics3Processor(t.Idefics3ImageProcessorPil(**edges, **_COLOURS), words, image_seq_len=4)
    if family.startswith("qwen"):
        words._set_model_specific_special_tokens({f"{name}_token": f"<|{name}_pad|>" for name in ("image", "video")})
        if family == "qwen3_vl":
            size = {"shortest_edge": 64 * 32**2, "longest_edge": 16384 * 32**2}
            return images_alone(t.Qwen3VLProcessor)(
                t.Qwen2VLImageProcessorPil(patch_size=8, size=size, **_COLOURS), words
            )
        kind = t.Qwen2VLProcessor if family == "qwen2_vl" else t.Qwen2_5_VLProcessor
        return images_alone(kind)(t.Qwen2VLImageProcessorPil(**_COLOURS), words)
    if family == "gemma3":
        names = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
        words._set_model_specific_special_tokens({f"{name}_token": token for name, token in names.items()})
        return t.Gemma3Processor(t.Gemma3ImageProcessorPil(**square), words, image_seq_length=4)
    if family == "minicpmv4_6":
        sides = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
        for part in ("image", "slice", "image_id"):
            sides |= {f"{part}_start": f"<{part}>", f"{part}_end": f"</{part}>"}
        words._set_model_specific_special_tokens({f"{name}_token": token for name, token in sides.items()})
        images = t.MiniCPMV4_6ImageProcessorPil(patch_size=8, scale_resolution=32, **_COLOURS)
        return images_alone(t.MiniCPMV4_6Processor)(images, None, words)
    if family.startswith("glm4v"):
        words._set_model_specific_special_tokens({f"{kind}_token": f"<|{kind}|>" for kind in ("image", "video")})
        return images_alone(t.Glm4vProcessor)(t.Glm4vImageProcessorPil(patch_size=8, **_COLOURS), words)
    if family == "gemma4":
        sides = {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>"}
        sides |= {"audio": "<|audio|>", "boa": "<|audio>", "eoa": "<audio|>"}
        words._set_model_specific_special_tokens({f"{name}_token": token for name, token in sides.items()})
        images = t.Gemma4ImageProcessorPil(patch_size=8, **_COLOURS)
        return images_alone(t.Gemma4Processor)(None, images, words, None)
    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
    words._set_model_specific_special_tokens({f"{name}_token": token for name, token in names.items()})
    images = t.GotOcr2ImageProcessorPil(crop_to_patches=True, min_patches=1, max_patches=12, **square)
    return images_alone(t.InternVLProcessor)(images, words, image_seq_length=4)


def pixels(family: str) -> dict[str, Tensor]:
    """A prompt with an image of 4 by 4 patches, for families whose images need torchvision."""
    random = torch.Generator().manual_seed(2)
    count = 16 if family == "pixtral" else 4
    ids = torch.tensor([[1, 300, *[_TOKENS.index("<image>" if family == "lfm2_vl" else "[IMG]")] * count, 301, 302]])
    if family == "lfm2_vl":
        values = torch.randn(1, 16, 192, generator=random)
        sizes = {"spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long)}
        return {"input_ids": ids, "pixel_values": values, **sizes}
    values = torch.randn(1, 3, 32, 32, generator=random)
    return {"input_ids": ids, "pixel_values": values, "image_sizes": torch.tensor([[32, 32]])}


def save(
    family: str, folder: Path, template: str | None = None, metadata: Mapping[str, Any] = {}, quantise: str = ""
) -> tuple[Path, Path]:
    """The two files of a model.

    Args:
        template: of chats, in the language model's file.
        metadata: other values of either file; None leaves one out.
        quantise: format of the matrices of the language model's layers.
    """
    made, files = model(family), FAMILIES[family]
    language, projector = folder / f"{family}.gguf", folder / f"mmproj-{family}.gguf"
    fields = {**files["language"], **vocabulary(), **metadata, "tokenizer.chat_template": template}
    _write(language, fields, _language_tensors(files["language"]["general.architecture"], made, quantise))
    _write(projector, {**files["projector"], **metadata}, dict(_projector_tensors(family, made)))
    return language, projector


@cache
def vocabulary() -> dict[str, Any]:
    words = tokenizer(_VOCAB, _TOKENS)
    merges = json.loads(words.backend_tokenizer.to_str())["model"]["merges"]
    tokens = words.convert_ids_to_tokens(range(_VOCAB))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in _TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }


def _language_tensors(architecture: str, made: Any, quantise: str) -> dict[str, Any]:
    import gguf as package

    text = made.config.get_text_config()
    table = package.get_tensor_name_map(
        next(kind for kind, name in package.MODEL_ARCH_NAMES.items() if name == architecture), text.num_hidden_layers
    )
    tensors: dict[str, Any] = {}
    weights = {
        re.sub(r"^model\.(language|text)_model\.", "model.", name): one for name, one in made.state_dict().items()
    }
    for name, value in tensors_of("GLM4_MOE", text, weights) if architecture == "glm4moe" else weights.items():
        if "vision" in name or not name.startswith(_LANGUAGE):
            continue
        if name.startswith("lm_head") and made.all_tied_weights_keys:
            continue
        heads = {"q_proj.weight": text.num_attention_heads, "k_proj.weight": text.num_key_value_heads}
        for end, count in heads.items():
            if architecture == "llama" and name.endswith(end):
                value = _turned(value, count)
            if architecture == "glm4" and re.search(rf"{end[:-7]}\.(weight|bias)$", name):  # half of a head is turned
                turned, rest = value.unflatten(0, (count, -1)).chunk(2, 1)
                value = torch.cat([turned[:, ::2], turned[:, 1::2], rest], 1).flatten(0, 1)
        if architecture in ("gemma3", "qwen35") and name.endswith("norm.weight"):
            value = value + 1
        value = value.squeeze(1) if name.endswith("conv.conv.weight") else value
        place = table.get_name(name, (".weight", ".bias")) or table.get_name(f"{name}.weight", (".weight",))
        place += "" if place.endswith((".weight", ".bias")) else ".weight"
        kind = getattr(package.GGMLQuantizationType, quantise, None)
        data = value.contiguous().numpy()
        is_matrix = kind is not None and value.ndim == 2
        tensors[place] = (package.quantize(data, kind), kind) if is_matrix else value.contiguous()
    if architecture == "gemma4":
        factors = torch.full((text.per_layer_config[1].head_dim // 2,), 1e30)
        factors[: len(factors) // 4] = 1
        tensors["rope_freqs.weight"] = factors
    return tensors


_LANGUAGE = ("model.embed", "model.layers", "model.norm", "lm_head")


def _turned(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys with pairs that are turned together side by side."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _projector_tensors(family: str, made: Any) -> Iterator[tuple[str, Tensor]]:
    """Of a published checkpoint's names, by the package's table."""
    import gguf as package

    table = package.get_tensor_name_map(package.MODEL_ARCH.MMPROJ, 8)
    published = {"model.visual.": "visual.", "model.multi_modal_projector.": "multi_modal_projector."}
    towers = {"internvl": "model.vision_tower.", "mistral3": "vision_tower.", "pixtral": "vision_tower."}
    published["model.vision_tower."] = towers.get(family, "vision_tower.vision_model.")
    if family == "gemma4":
        published = {"model.vision_tower.encoder.": "vision_model.model."}
    numbers = {"multi_modal_projector.layer_norm": "mlp1.0", "multi_modal_projector.linear_1": "mlp1.1"}
    numbers["multi_modal_projector.linear_2"] = "mlp1.3"
    merger = {"visual.merger.norm": "v.post_ln", "visual.merger.linear_fc1": "mm.0", "visual.merger.linear_fc2": "mm.2"}
    if family == "minicpmv4_6":
        sides = {"layer_norm1": "ln1", "pre_norm": "ds_ln", "linear_1": "ds_ffn_up", "linear_2": "ds_ffn_down"}
        sides |= {f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "out")}
        merger = {f"vision_tower.vision_model.vit_merger.{name}": f"v.vit_merger.{one}" for name, one in sides.items()}
        last_one = {"pre_norm": "input_norm", "linear_1": "up", "linear_2": "down"}
        merger |= {f"model.merger.mlp.0.{name}": f"mm.{one}" for name, one in last_one.items()}
    if family == "gemma4":
        yield "a.blk.0.ln1.weight", torch.ones(4)  # of sounds
    if family == "mistral3":
        yield "v.token_embd.img_break", made.get_input_embeddings().weight[_TOKENS.index("[IMG_BREAK]")].detach()
    tower = made.config.vision_config
    last = getattr(tower, "num_hidden_layers", 0) - 1
    for name, value in made.state_dict().items():
        if re.match(r"model\.(language|text)_model|lm_head", name):
            continue
        for old, new in published.items():
            name = name.replace(old, new) if name.startswith(old) else name
        module, _, end = name.rpartition(".")
        ends = ("weight", "bias", "input_min", "input_max", "output_min", "output_max")
        module, end = (module, f".{end}") if end in ends else (name.removesuffix("_weight"), ".weight")
        end = "" if module.endswith(("class_embedding", "cls_token", "std_bias", "std_scale")) else end
        module, value = module.removesuffix(".linear"), value.view(1) if value.ndim == 0 else value
        if module.endswith(("input_proj", "patch_embedding")) and value.ndim == 2:
            value = value.unflatten(1, (tower.patch_size, tower.patch_size, 3)).permute(0, 3, 1, 2).contiguous()
        if family in ("mistral3", "pixtral") and module.endswith(("q_proj", "k_proj")):
            value = _turned(value, tower.num_attention_heads)
        if deep := re.fullmatch(r"visual\.deepstack_merger_list\.(\d)\.(\w+)", module):
            layer = tower.deepstack_visual_indexes[int(deep[1])]
            yield f"v.deepstack.{layer}.{deep[2].removeprefix('linear_')}{end}", value
            continue
        if module in merger:
            yield merger[module] + end, value
            continue
        value = value.half() if any(part in name for part in _HALF.get(family, ())) and value.ndim > 1 else value
        if family == "internvl":
            module = numbers.get(module, module)
        if family.startswith("llava"):  # by the older converter
            if f"layers.{last}." in module or "post_layernorm" in module:
                continue
            if module.startswith("multi_modal_projector"):
                yield {"1": "mm.0", "2": "mm.2"}[module[-1]] + end, value
                continue
            if name == "model.image_newline":
                yield name, value
                continue
            module = module.replace("fc1", "fc0").replace("fc2", "fc1").replace("fc0", "fc2")
        if "attn.qkv" in module:
            for part, third in zip("qkv", value.chunk(3), strict=True):
                yield table.get_name(module.replace("qkv", part)) + end, third.contiguous()
        elif value.ndim == 5:
            for frame, suffix in enumerate(("", ".1")):
                yield table.get_name(module) + end + suffix, value[:, :, frame].contiguous()
        else:
            yield table.get_name(module) + end, value + 1 if "soft_emb_norm" in module else value
