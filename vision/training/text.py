"""Tokenizer, processor and conversation encoding of the embedded vision-language model.

Prompt format, a LLaVA-style chat; a video is one `<image>` line per frame:

    <s>USER: <image>\\nDescribe the image. ASSISTANT: A red star is in the centre.</s>USER: What size is it? ASSISTANT:
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mmspec.training.embedded import SPECIAL, chat_template
from mmspec.training.embedded import train_tokenizer as train_any
from mmspec.vision.scenes.conversations import DrawnConversation
from mmspec.vision.scenes.vocabulary import SIDE, SLOT

IMAGE_TOKENS = (SIDE // SLOT) ** 2
"""Visual tokens of one image or frame."""

IMAGE = "<image>"
CHAT_TEMPLATE = chat_template(
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% endif %}"
    "{% if part['type'] == 'video' %}"
    "{% for frame in range(part.get('num_frames', 8)) %}<image>\n{% endfor %}"
    "{% endif %}"
    "{% endfor %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer that encodes signs character by character.

    A capital letter or digit before another one, or before a quotation mark, is a token of its own.

    Args:
        texts: training corpus of the merges.
        vocabulary: number of tokens, special ones included.
    """
    return train_any(texts, vocabulary, r'[A-Z0-9](?=[A-Z0-9"])', (IMAGE,))


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Returns the processor of the embedded model, whose tower has a class token before its patches."""
    return square_processor(
        tokenizer, SIDE, SLOT, 0.5, 0.5, chat_template=CHAT_TEMPLATE, image_token=IMAGE, num_additional_image_tokens=1
    )


def square_processor(
    tokenizer: PreTrainedTokenizerFast, side: int, patch: int, mean: float, std: float, **options: Any
) -> LlavaProcessor:
    """Returns a processor that resizes images to a square regardless of their aspect ratio.

    Args:
        tokenizer: of the model.
        side: of the square, in pixels.
        patch: pixels along a side of a visual token.
        mean, std: of the pixels, from 0 to 1, for all channels.
        **options: of `LlavaProcessor`.
    """
    size = {"height": side, "width": side}
    images = CLIPImageProcessorPil(
        size=size, crop_size=size, do_center_crop=False, image_mean=[mean] * 3, image_std=[std] * 3
    )
    strategy = "default" if options["num_additional_image_tokens"] else "full"
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy=strategy,
        **options,
    )


def token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Returns the ids of the special tokens by their names in the configuration."""
    names = dict(zip(("pad", "bos", "eos", "image"), (*SPECIAL, IMAGE), strict=True))
    return {name: tokenizer.get_vocab()[token] for name, token in names.items()}


def corpus(examples: Iterable[DrawnConversation]) -> Iterable[str]:
    for example in examples:
        for user, answer in example.turns:
            yield f"{user} {answer}"


@dataclass(frozen=True)
class ChatFormat:
    """Format of a model's conversations; it equals what the model's chat template gives.

    Attributes:
        image: placeholder of a visual token.
        image_tokens: visual tokens of an image.
        start: of the conversation.
        user: a turn's beginning, with fields `images` and `text`.
        answer: the rest of a turn, with a field `text`.
        between: two turns.
    """

    image: str = IMAGE
    image_tokens: int = IMAGE_TOKENS
    start: str = "<s>"
    user: str = "USER: {images}{text} ASSISTANT:"
    answer: str = " {text}</s>"
    between: str = ""


def encode(
    example: DrawnConversation, tokenizer: PreTrainedTokenizerFast, chat: ChatFormat | None = None
) -> tuple[list[int], list[bool]]:
    """Returns the token ids of a conversation, images expanded, and for each whether it belongs to an answer."""
    chat = chat or ChatFormat()
    pieces: list[str] = []
    wanted: list[bool] = []
    images = (chat.image * chat.image_tokens + "\n") * len(example.scenes)
    for index, (user, answer) in enumerate(example.turns):
        before, shown = (chat.between, "") if index else (chat.start, images)
        pieces += [before + chat.user.format(images=shown, text=user), chat.answer.format(text=answer)]
        wanted += [False, True]
    ids: list[int] = []
    answers: list[bool] = []
    for piece, label in zip(_encode_all(pieces, tokenizer), wanted, strict=True):
        ids += piece
        answers += [label] * len(piece)
    return ids, answers


def _encode_all(pieces: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    backend = tokenizer.backend_tokenizer
    return [encoding.ids for encoding in backend.encode_batch(list(pieces), add_special_tokens=False)]
