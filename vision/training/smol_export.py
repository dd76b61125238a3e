"""Format and export of smol-llava: what is trained, without the weights that packages carry."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlavaProcessor, PreTrainedTokenizerFast

from mmspec import files
from mmspec.targets.completed import LABELS, PARTS, WEIGHTS
from mmspec.training.export import replacing
from mmspec.vision.efficientnet import MEAN, STD, STRIDE
from mmspec.vision.pictures.compose import SIDE
from mmspec.vision.training.picture_batches import VISUAL_TOKENS
from mmspec.vision.training.smol_network import SmolLlava
from mmspec.vision.training.text import ChatFormat, square_processor

IMAGE = "<empty_output>"
"""Placeholder of a visual token: a special token of SmolLM2 that texts do not contain."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "\n{% endif %}"
    "{% if part['type'] == 'video' %}{% for frame in range(part.get('num_frames', 8)) %}" + IMAGE + "\n{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_format(image_tokens: int = VISUAL_TOKENS) -> ChatFormat:
    """Returns SmolLM2's format of conversations, without a system message."""
    return ChatFormat(
        image=IMAGE,
        image_tokens=image_tokens,
        start="",
        user="<|im_start|>user\n{images}{text}<|im_end|>\n<|im_start|>assistant\n",
        answer="{text}<|im_end|>",
        between="\n",
    )


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Returns the model's processor."""
    return square_processor(
        tokenizer,
        SIDE,
        STRIDE,
        MEAN,
        STD,
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=0,
    )


def export_connector(network: SmolLlava, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes connector, norms, configuration and processor; tower and language model stay in their packages.

    Args:
        network: the trained model.
        tokenizer: of the language model; not written.
        folder: created if missing; other files in it are kept.
    """
    with replacing(folder) as part:
        make_processor(tokenizer).save_pretrained(part)
        for file in part.glob("tokenizer*"):
            file.unlink()
        config = network.config
        config.architectures, config.dtype = [type(network.model).__name__], torch.float32
        config.text_config.name_or_path = ""  # a folder of this machine
        config.save_pretrained(part)
        gains = "model.language_model."
        weights = {name: x if name.startswith(gains) else x.bfloat16() for name, x in network.folded().items()}
        weights[LABELS] = network.labels.int()
        save_file({name: x.contiguous() for name, x in weights.items()}, part / WEIGHTS, {"format": "pt"})
        files.write_text(part / PARTS, json.dumps({"language_model": "smollm2", "vision_tower": "efficientnet-lite0"}))
