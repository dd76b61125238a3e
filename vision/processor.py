"""Vision-language models as targets, and their processors: chat messages, images and videos to token ids and pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText, AutoProcessor

from mmspec.core.target import Prompt
from mmspec.errors import UserError
from mmspec.targets.processor import Processor, is_token_ids, render
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.validation import check
from mmspec.vision.decoding import MediaDecoder
from mmspec.vision.images import load_image
from mmspec.vision.video import FPS, Backend, Frames, Video, load_video

_LLAVA_TEMPLATE = "USER: {media}\n{text} ASSISTANT:"
_ROUNDED = 1e-3  # rounding of times in containers, in seconds (Matroska: milliseconds)


class VisionProcessor(Processor):
    """Chat template, images, videos and tokenizer of a LLaVA-type or Qwen-VL model.

    Pixel values come from the model's own processor. If it does not support videos (LLaVA-1.5, LLaVA-NeXT), a video is
    encoded as frames, one image each.
    """

    auto_class = AutoProcessor
    options = (*Processor.options, "frames", "fps", "video_backend")
    reads_media = True

    def encode(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        chat_template: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer_start: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        frames: int | None = None,
        fps: float | None = None,
        video_backend: Backend = "pyav",
        parse_special: bool = True,
        **unknown: Any,
    ) -> Prompt:
        """Encode requests as a left-padded batch, on the CPU.

        Args:
            requests: ``{"prompt": text, chat messages or token ids, "images": one or several, "videos": one or
                several}`` each; in chat messages, ``{"type": "image"}`` and ``{"type": "video"}`` items refer to them
                in order, or contain a source, like OpenAI's ``image_url`` and ``video_url``.
            chat_template: False uses text prompts without media unchanged.
            tools, answer_start, chat_template_kwargs, parse_special: see ``Processor.encode``.
            frames: frames per video; None means 8, or a number according to ``fps``.
            fps: sample at this rate instead, with at most ``frames`` frames.
            video_backend: ``"pyav"`` or ``"decord"``.

        Raises:
            UserError: an unreadable file, an empty prompt, a number of images that does not match, or an unknown
                option.
        """
        if unknown:
            raise UserError(f"unknown option for a vision model: got {', '.join(unknown)}")
        check("frames", Frames, frames)  # even if there is no video
        check("fps", FPS, fps)
        of_ids = {is_token_ids(request["prompt"]) for request in requests}
        if of_ids == {True, False}:
            raise UserError("prompts of token ids cannot be encoded together with others")
        if True in of_ids:
            return super().encode(requests)
        if not chat_template:
            if any(not isinstance(one["prompt"], str) or one.get("images") or one.get("videos") for one in requests):
                raise UserError("chat messages, images and videos need a chat template: got chat_template=False")
            return super().encode(requests, chat_template=False, parse_special=parse_special)
        options: dict[str, Any] = {"frames": frames, "fps": fps, "backend": video_backend}
        texts: list[str] = []
        images: list[list[Any]] = []
        videos: list[Video] = []
        for request in requests:
            pictures = [load_image(source) for source in _listed(request.get("images"))]
            clips = [_load_video(source, **options) for source in _listed(request.get("videos"))]
            messages = request["prompt"]
            if not messages:
                raise UserError("the prompt must not be empty")
            if isinstance(messages, str):
                media = [{"type": "image"} for _ in pictures] + [{"type": "video"} for _ in clips]
                messages = [{"role": "user", "content": [*media, {"type": "text", "text": messages}]}]
            placed, shown, played = self.place_media(messages, pictures, clips, **options)
            texts.append(self._render(placed, tools, chat_template_kwargs) + answer_start)
            images.append(shown)
            videos += played
        return self._process(texts, images, videos)

    def media_decoder(self, **limits: Any) -> MediaDecoder:
        """A pool of worker processes that decode untrusted images and videos; ``limits`` as for ``MediaDecoder``."""
        return MediaDecoder(**limits)

    def place_media(
        self,
        messages: Sequence[Mapping[str, Any]],
        pictures: Sequence[Any] = (),
        clips: Sequence[Video] = (),
        **video: Any,
    ) -> tuple[list[dict[str, Any]], list[Any], list[Video]]:
        """Separate chat messages from their images and videos: messages with placeholders, images in order, and videos,
        whose frames are among the images if the processor does not support videos.

        Args:
            messages: image and video items contain a source, which is loaded with the options ``video``, or refer to
                the next of the loaded ``pictures`` and ``clips``.

        Raises:
            UserError: a file cannot be read, or the numbers of items and media differ.
        """
        queues: dict[str, list[Any]] = {"image": list(pictures), "video": list(clips)}
        read = {"image": load_image, "video": partial(_load_video, **video)}
        loaded: dict[str, list[Any]] = {"image": [], "video": []}
        placed, takes_videos = [], getattr(self.plain, "video_processor", None) is not None
        for message in messages:
            content, items = message["content"], []
            for item in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                kind = item["type"].removesuffix("_url")
                if kind not in queues:
                    items.append(item)
                    continue
                media = [_take(item, kind, queues[kind], read[kind])]
                if kind == "video" and not takes_videos:
                    kind, media = "image", media[0].frames
                loaded[kind] += media
                items += [{"type": kind} for _ in media]
            placed.append({**message, "content": items})
        if any(queues.values()):
            raise UserError(
                f"every image and video needs a place in the messages: {len(queues['image'])} images and "
                f"{len(queues['video'])} videos have none"
            )
        return placed, loaded["image"], loaded["video"]

    def adds_special_tokens(self, rendered: str) -> bool:
        """False if the template already writes the first special token, as in ``apply_chat_template``."""
        start = self.tokenizer.bos_token
        return start is None or not rendered.startswith(start)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if getattr(self.plain, "chat_template", None):
            return render(self.plain, self._user_text, messages, tools, variables)
        if tools or variables:
            name = "tools" if tools else "chat_template_kwargs"
            raise UserError(f"{name} need a chat template: the model's processor has none")
        if len(messages) > 1:
            raise UserError("several messages need a chat template: the model's processor has none")
        items = self._user_text.mark(messages)[0]["content"]
        if type(self.plain).__name__.startswith(("Llava", "VideoLlava")):  # initially published without their template
            media = "".join(self._placeholder(item["type"]) for item in items if item["type"] != "text")
            text = " ".join(item["text"] for item in items if item["type"] == "text")
            return _LLAVA_TEMPLATE.format(media=media, text=text)
        # A base model: its processor completes the prompt, e.g. with PaliGemma's "<bos>" and line break.
        return "".join(item["text"] if item["type"] == "text" else self._placeholder(item["type"]) for item in items)

    def _placeholder(self, kind: str) -> str:
        """Placeholder of an image or a video in the text for the model's processor."""
        token = getattr(self.plain, f"{kind}_token", None)
        if token is None:
            raise UserError(f"{kind}s need a chat template or {kind}_token: the model's processor has neither")
        return str(token)

    def _process(self, texts: list[str], images: list[list[Any]], videos: list[Video]) -> Prompt:
        flat = [image for row in images for image in row]
        arguments: dict[str, Any] = {"text": texts, "images": flat or None}
        if videos:
            arguments["videos"] = [np.stack([np.asarray(frame) for frame in clip.frames]) for clip in videos]
            arguments["videos_kwargs"] = {
                "do_sample_frames": False,
                "video_metadata": [_metadata(clip) for clip in videos],
            }
        if not self.adds_special_tokens(texts[0]):
            arguments["add_special_tokens"] = False
        processor = self.plain
        if any(map(self._user_text.is_marked, texts)):
            processor = copy(processor)
            processor.tokenizer = self._user_text
        with _pad_token(self.tokenizer):
            encoded = dict(processor(**arguments, padding=True, padding_side="left", return_tensors="pt"))
        ids, mask = encoded.pop("input_ids"), encoded.pop("attention_mask")
        encoded.pop("labels", None)  # PaliGemma's training labels
        inputs = {name: value for name, value in encoded.items() if isinstance(value, Tensor)}
        return Prompt(ids, None if bool(mask.all()) else mask, inputs)


def _metadata(clip: Video) -> dict[str, Any]:
    """Display times of a clip's frames as transformers' ``VideoMetadata``: time = index / rate.

    At a constant frame rate, indices count frames, as if transformers had loaded the file; otherwise milliseconds.
    """
    rate, indices = clip.fps or 0.0, [round(time * (clip.fps or 0.0)) for time in clip.times]
    if not rate or any(abs(index / rate - time) > _ROUNDED for index, time in zip(indices, clip.times, strict=True)):
        rate, indices = 1000.0, [round(1000 * time) for time in clip.times]
    width, height = clip.frames[0].size
    return {
        "total_num_frames": max(1, round(clip.duration * rate)),
        "fps": rate,
        "duration": clip.duration,
        "frames_indices": indices,
        "width": width,
        "height": height,
    }


@contextmanager
def _pad_token(tokenizer: Any) -> Iterator[None]:
    """Temporarily use the end-of-sequence token as pad token of a tokenizer without one; padding is masked anyway."""
    lent = tokenizer.pad_token_id is None
    if lent:
        tokenizer.pad_token = tokenizer.eos_token
    try:
        yield
    finally:
        if lent:
            tokenizer.pad_token = None


def _listed(sources: Any) -> Iterable[Any]:
    """Sources as a list; wraps a single source."""
    if sources is None:
        return []
    return sources if isinstance(sources, list | tuple) else [sources]


def _load_video(source: Any, **options: Any) -> Video:
    return source if isinstance(source, Video) else load_video(source, **options)


def _take(item: Mapping[str, Any], kind: str, queue: list[Any], read: Any) -> Any:
    """The image or video of a message item: from its source, or the next in the queue."""
    source = next((item[key] for key in (kind, "path", "url", f"{kind}_url") if key in item), None)
    if source is not None:
        return read(source["url"] if isinstance(source, Mapping) else source)
    if not queue:
        raise UserError(f"every {kind} item of the messages needs a {kind}: fewer were given")
    return queue.pop(0)


class VisionTarget(TransformersTarget):
    """Any decoder-only image-text-to-text model of transformers, unmodified."""

    auto_class = AutoModelForImageTextToText
    processor_class = VisionProcessor

    @classmethod
    def supports(cls, config: Any) -> bool:
        return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    def visual(self, prompt: Prompt) -> Tensor:
        config, ids = self.model.config, prompt.input_ids
        marks = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
        return torch.isin(ids, ids.new_tensor([mark for mark in marks if mark is not None]))
