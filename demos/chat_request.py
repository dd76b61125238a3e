"""A visitor's request: validation against the demo's limits, conversion to arguments of ``Pipeline.generate``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mmspec import plugins
from mmspec.errors import UserError
from mmspec.sampling.params import SamplingParams
from mmspec.vision.decoding import MediaDecoder

Kind = Literal["image", "video", "text"]

DEFAULT_PROMPTS: dict[Kind, str] = {"image": "Describe the image.", "video": "Describe the video.", "text": ""}
DEFAULT_MODELS: dict[Kind, tuple[str, ...]] = {
    "image": plugins.CAPTIONERS,
    "video": ("tiny-llava",),
    "text": ("smollm2", "tiny-hybrid"),
}
"""The first one that is installed."""

MAX_PROMPT_CHARS = 4000
MAX_NEW_TOKENS = 512
MAX_IMAGES = 8
MAX_FRAMES = 32
MAX_TURNS = 12
MAX_VIDEO_SECONDS = 300
MAX_UPLOAD_MIB = 32


@dataclass(frozen=True)
class Upload:
    """An uploaded file.

    Attributes:
        path: where the server stored it.
        name: the visitor's file name.
    """

    path: str
    name: str


@dataclass(frozen=True)
class ChatRequest:
    """One prompt with its conversation history and settings.

    Attributes:
        kind: kind of ``uploads``: up to ``MAX_IMAGES`` images, one video, or none.
        history: earlier (prompt, answer) pairs about the same uploads.
        frames: number of frames sampled from a video.
        seed: sampling seed.
    """

    kind: Kind
    prompt: str
    uploads: Sequence[Upload] = ()
    history: list[tuple[str, str]] = field(default_factory=list)
    model: str = ""
    drafter: str = "auto"
    temperature: float = 0.0
    max_new_tokens: int = 256
    frames: int = 8
    seed: int = 0

    def pipeline_request(self) -> dict[str, Any]:
        """``prompt``, ``images`` and ``videos`` for ``Pipeline.generate``, with media decoded.

        Raises:
            UserError: the prompt or the upload is missing, a limit is exceeded, or the file cannot be decoded.
        """
        prompt = self.prompt.strip()
        if not prompt:
            raise UserError("the prompt must not be empty: type a question")
        if len(prompt) > MAX_PROMPT_CHARS:
            raise UserError(f"the prompt must have at most {MAX_PROMPT_CHARS} characters: got {len(prompt)}")
        if len(self.history) >= MAX_TURNS:
            raise UserError(f"a conversation must have at most {MAX_TURNS} questions: start a new one")
        media = self._media()
        if not self.history:
            return {"prompt": prompt, **media}
        messages: list[dict[str, Any]] = []
        for user, assistant in [*self.history, (prompt, None)]:
            attached = [{"type": self.kind} for _ in self.uploads] if not messages else []
            messages.append({"role": "user", "content": self._content(user, attached)})
            if assistant is not None:
                messages.append({"role": "assistant", "content": self._content(assistant)})
        return {"prompt": messages, **media}

    def _content(self, text: str, attached: Sequence[dict[str, Any]] = ()) -> Any:
        """Content of a chat message: plain text, or a list of items if the conversation has media."""
        return text if self.kind == "text" else [*attached, {"type": "text", "text": text}]

    def generate_kwargs(self) -> dict[str, Any]:
        """Decoding keywords of ``Pipeline.generate``.

        Raises:
            UserError: an option is out of range.
        """
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise UserError(f"max_new_tokens must lie in 1..{MAX_NEW_TOKENS}: got {self.max_new_tokens}")
        if not math.isfinite(self.temperature) or self.temperature > 5:
            raise UserError(f"temperature must lie in 0..5: got {self.temperature}")
        SamplingParams.rule("temperature").check("temperature", self.temperature)
        return {
            "max_new_tokens": int(self.max_new_tokens),
            "temperature": float(self.temperature),
            "seed": int(self.seed),
        }

    def _media(self) -> dict[str, Any]:
        if self.kind == "text":
            return {}
        if not self.uploads:
            raise UserError(f"no {self.kind} was uploaded: upload one or select an example")
        most = MAX_IMAGES if self.kind == "image" else 1
        if len(self.uploads) > most:
            raise UserError(f"a question must have at most {most} {self.kind}s: got {len(self.uploads)}")
        for upload in self.uploads:
            if not Path(upload.path).is_file():
                raise UserError(f"{upload.name} was removed (uploads are kept for a limited time): upload it again")
        if self.kind == "image":
            return {"images": [decoder().load(upload.path, "image", name=upload.name) for upload in self.uploads]}
        if not 1 <= self.frames <= MAX_FRAMES:
            raise UserError(f"frames must lie in 1..{MAX_FRAMES}: got {self.frames}")
        video: dict[str, Any] = {"frames": int(self.frames), "max_duration": MAX_VIDEO_SECONDS}
        (upload,) = self.uploads
        return {"videos": [decoder().load(upload.path, "video", name=upload.name, **video)]}


@cache
def decoder() -> MediaDecoder:
    """The worker pool shared by all visitors."""
    return MediaDecoder(seconds=20, memory=2 << 30)
