"""Tokenizer and processor of the embedded model, built from nothing, and how a conversation becomes tokens.

Prompt format, a LLaVA-style chat; a video is its frames in order, one `<image>` line each:

    <s>USER: <image>\\nDescribe the image. ASSISTANT: A red star is in the centre.</s>USER: What size is it? ASSISTANT:
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mmspec.training.tokenizer import SPECIAL
from mmspec.training.tokenizer import train_tokenizer as train_any
from vision.scenes.conversations import Example
from vision.scenes.vocabulary import SIDE, SLOT

IMAGE_TOKENS = (SIDE // SLOT) ** 2
"""Visual tokens of one image or frame."""

IMAGE = "<image>"
ROLES = ("USER:", "ASSISTANT:")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}ASSISTANT: {% else %}USER: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% endif %}"
    "{% if part['type'] == 'video' %}"
    "{% for frame in range(part.get('num_frames', 8)) %}<image>\n{% endfor %}"
    "{% endif %}"
    "{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %} {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""Images come before the text of their message, whatever their order. A system message is treated as a user's.
The tokenizer adds `<s>`."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that encodes any text.

    A capital letter or digit before another one, or before a quotation mark, is a token by itself, so that the text
    of a sign is always read character by character.

    Args:
        texts: What merges are learned from.
        vocabulary: Number of tokens, special ones included.
    """
    return train_any(texts, vocabulary, r'[A-Z0-9](?=[A-Z0-9"])', ROLES, (IMAGE,))


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """The processor that transformers loads beside the model: any image is squeezed to 96 x 96."""
    images = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        do_center_crop=False,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=SLOT,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Ids of the special tokens, by the names that the configuration asks for."""
    names = dict(zip(("pad", "bos", "eos", "image"), (*SPECIAL, IMAGE), strict=True))
    return {name: tokenizer.get_vocab()[token] for name, token in names.items()}


def corpus(examples: Iterable[Example]) -> Iterable[str]:
    """The texts of examples, one per turn."""
    for example in examples:
        for user, answer in example.turns:
            yield f"{user} {answer}"


def encode(example: Example, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation with image placeholders expanded, and which of them the model is to predict."""
    pieces: list[str] = []
    wanted: list[bool] = []
    images = ("<image>" * IMAGE_TOKENS + "\n") * len(example.scenes)
    for index, (user, answer) in enumerate(example.turns):
        pieces += [f"USER: {images if index == 0 else ''}{user} ASSISTANT:", f" {answer}</s>"]
        wanted += [False, True]
    ids = [tokenizer.bos_token_id]
    answers = [False]
    for piece, label in zip(_encode_all(pieces, tokenizer), wanted, strict=True):
        ids += piece
        answers += [label] * len(piece)
    return ids, answers


def _encode_all(pieces: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    backend = tokenizer.backend_tokenizer
    return [encoding.ids for encoding in backend.encode_batch(list(pieces), add_special_tokens=False)]
