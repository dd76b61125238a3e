"""Processors of vision-language models: chat messages, images and videos to token ids and pixel values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
from torch import Tensor
from transformers import AutoProcessor

from mmspec.errors import UserError
from mmspec.targets.processor import Processor
from mmspec.targets.target import Prompt
from vision.images import load_image
from vision.video import FPS, FRAMES, Backend, Video, load_video

_PLAIN_TEMPLATE = "USER: {media}\n{text} ASSISTANT:"


class VisionProcessor(Processor):
    """Chat template, images, videos and tokenizer of a LLaVA-type or Qwen-VL model.

    Pixel values come from the model's own processor. Where it takes no videos (LLaVA-1.5, LLaVA-NeXT), a video is
    encoded as its frames, one image each.
    """

    auto_class = AutoProcessor

    def encode(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        frames: int | None = None,
        fps: float | None = None,
        video_backend: Backend = "pyav",
        **unknown: Any,
    ) -> Prompt:
        """Encode requests as a left-padded batch, on the CPU.

        Args:
            requests: ``{"prompt": text or chat messages, "images": one or several, "videos": one or several}`` each;
                in chat messages, ``{"type": "image"}`` and ``{"type": "video"}`` items take them in order.
            frames: frames per video; None takes 8, or what ``fps`` gives.
            fps: sample at this rate instead, ``frames`` being the most that are taken.
            video_backend: ``"pyav"`` or ``"decord"``.

        Raises:
            UserError: a file that cannot be read, an empty prompt, more or fewer images than the messages name, or an
                unknown option.
        """
        if unknown:
            raise UserError(f"unknown option for a vision model: got {', '.join(unknown)}")
        FRAMES.check("frames", frames)  # also where no video is read
        FPS.check("fps", fps)
        texts, images, videos = [], [], []
        for request in requests:
            pictures = [load_image(source) for source in _listed(request.get("images"))]
            clips = [
                source
                if isinstance(source, Video)
                else load_video(source, frames=frames, fps=fps, backend=video_backend)
                for source in _listed(request.get("videos"))
            ]
            text, shown, played = self._compose(request["prompt"], pictures, clips)
            texts.append(text)
            images.append(shown)
            videos += played
        return self._process(texts, images, videos)

    def open_media(
        self, messages: Sequence[Mapping[str, Any]], **video: Any
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, list[Any]]]:
        """A conversation's images and videos, apart from its messages.

        Args:
            messages: chat messages whose image and video items name their sources.
            **video: how videos are opened; see ``load_video``.

        Returns:
            The messages for ``encode``, the same as the processor's chat template is shown them, and the ``images`` and
            ``videos`` of the request.
        """
        request: dict[str, list[Any]] = {"images": [], "videos": []}
        bare, shown = [], []
        for message in messages:
            content = message["content"]
            items: list[dict[str, Any]] = []
            seen: list[dict[str, Any]] = []
            for item in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                kept = item if item["type"] == "text" else {"type": item["type"]}
                instead = [kept]
                if item["type"] == "image":
                    request["images"].append(item.get("path", item.get("image")))
                elif item["type"] == "video":
                    clip = load_video(item.get("path", item.get("video")), **video)
                    request["videos"].append(clip)
                    instead = [kept] if self._takes_videos else [{"type": "image"} for _ in clip.frames]
                items.append(kept)
                seen += instead
            bare.append({"role": message["role"], "content": items})
            shown.append({"role": message["role"], "content": seen})
        return bare, shown, request

    def _compose(self, prompt: Any, pictures: list[Any], clips: list[Video]) -> tuple[str, list[Any], list[Video]]:
        """The prompt's text with placeholders, the images in its order, and the videos that stay videos."""
        if not prompt:
            raise UserError("the prompt must not be empty")
        if isinstance(prompt, str):
            media = [{"type": "image"} for _ in pictures] + [{"type": "video"} for _ in clips]
            messages: list[dict[str, Any]] = [{"role": "user", "content": [*media, {"type": "text", "text": prompt}]}]
        else:
            messages = [dict(message) for message in prompt]
        messages = [dict(message) for message in self._user_text.mark(messages)]
        left, queue, shown, played = list(pictures), list(clips), [], []
        for message in messages:
            content = message["content"]
            items = [{"type": "text", "text": content}] if isinstance(content, str) else content
            message["content"] = []
            for item in items:
                if item["type"] == "image":
                    shown.append(_take(item, "image", left, load_image))
                    message["content"].append({"type": "image"})
                elif item["type"] == "video":
                    clip = _take(item, "video", queue, load_video)
                    if self._takes_videos:
                        played.append(clip)
                        message["content"].append({"type": "video"})
                    else:
                        shown += clip.frames
                        message["content"] += [{"type": "image"} for _ in clip.frames]
                else:
                    message["content"].append(item)
        if left or queue:
            raise UserError(
                f"every image and video needs a place in the messages: {len(left)} images and {len(queue)} videos "
                "have none"
            )
        return self._render(messages), shown, played

    @property
    def _takes_videos(self) -> bool:
        return getattr(self.plain, "video_processor", None) is not None

    def _render(self, messages: list[dict[str, Any]]) -> str:
        if getattr(self.plain, "chat_template", None):
            return self.plain.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if len(messages) > 1:
            raise UserError("several messages need a chat template: the model's processor has none")
        token = {"image": self.plain.image_token, "video": getattr(self.plain, "video_token", "")}
        media = "".join(token[item["type"]] for item in messages[0]["content"] if item["type"] != "text")
        text = " ".join(item["text"] for item in messages[0]["content"] if item["type"] == "text")
        return _PLAIN_TEMPLATE.format(media=media, text=text)

    def _process(self, texts: list[str], images: list[list[Any]], videos: list[Video]) -> Prompt:
        flat = [image for row in images for image in row]
        arguments: dict[str, Any] = {"text": texts, "images": flat or None}
        if videos:
            arguments["videos"] = [np.stack([np.asarray(frame) for frame in clip.frames]) for clip in videos]
            arguments["videos_kwargs"] = {"do_sample_frames": False}
        processor = self.plain
        if any(map(self._user_text.is_marked, texts)):
            processor = copy(processor)
            processor.tokenizer = self._user_text
        with _pad_token(self.tokenizer):
            encoded = dict(processor(**arguments, padding=True, padding_side="left", return_tensors="pt"))
        ids, mask = encoded.pop("input_ids"), encoded.pop("attention_mask")
        inputs = {name: value for name, value in encoded.items() if isinstance(value, Tensor)}
        return Prompt(ids, None if bool(mask.all()) else mask, inputs)


@contextmanager
def _pad_token(tokenizer: Any) -> Iterator[None]:
    """Lend a tokenizer without a pad token its end-of-sequence token: which one pads is all the same under a mask."""
    lent = tokenizer.pad_token_id is None
    if lent:
        tokenizer.pad_token = tokenizer.eos_token
    try:
        yield
    finally:
        if lent:
            tokenizer.pad_token = None


def _listed(sources: Any) -> Iterable[Any]:
    """Several sources as they are; a single one as a list of one."""
    if sources is None:
        return []
    return sources if isinstance(sources, list | tuple) else [sources]


def _take(item: Mapping[str, Any], kind: str, queue: list[Any], read: Any) -> Any:
    """What a message's image or video item stands for: its own source, or the next of those given beside the prompt."""
    source = next((item[key] for key in (kind, "path", "url") if key in item), None)
    if source is not None:
        return read(source)
    if not queue:
        raise UserError(f"every {kind} item of the messages needs a {kind}: fewer were given")
    return queue.pop(0)
