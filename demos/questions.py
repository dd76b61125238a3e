"""What a visitor asks, checked against the demo's limits, and turned into a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mmspec.errors import UserError
from mmspec.sampling import SamplingParams
from vision.decoding import Decoder

Kind = Literal["image", "video", "text"]

PROMPTS: dict[Kind, str] = {"image": "Describe the image.", "video": "Describe the video.", "text": ""}
MODELS: dict[Kind, str] = {"image": "tiny-llava", "video": "tiny-llava", "text": "tiny-hybrid"}

LONGEST_PROMPT = 4000  # characters
MOST_TOKENS = 512
MOST_FRAMES = 32
MOST_TURNS = 12
LONGEST_VIDEO = 300  # seconds
LARGEST_UPLOAD = 32  # MiB


@dataclass(frozen=True)
class Upload:
    """A file that a visitor sent, and what they call it."""

    path: str
    name: str


@dataclass(frozen=True)
class Question:
    """One question, with what was said before it.

    Attributes:
        kind: what ``upload`` is; a text has none.
        earlier: earlier questions and their answers, about the same upload.
        frames: taken from a video.
        seed: of sampling.
    """

    kind: Kind
    prompt: str
    upload: Upload | None = None
    earlier: list[tuple[str, str]] = field(default_factory=list)
    model: str = ""
    drafter: str = "auto"
    temperature: float = 0.0
    max_new_tokens: int = 256
    frames: int = 8
    seed: int = 0

    def request(self) -> dict[str, Any]:
        """``prompt``, ``images`` and ``videos`` as ``Pipeline.generate`` takes them, files read.

        Raises:
            UserError: nothing asked or sent, beyond a limit, or a file that cannot be read.
        """
        prompt = self.prompt.strip()
        if not prompt:
            raise UserError("the prompt must not be empty: type a question")
        if len(prompt) > LONGEST_PROMPT:
            raise UserError(f"the prompt must have at most {LONGEST_PROMPT} characters: got {len(prompt)}")
        if len(self.earlier) >= MOST_TURNS:
            raise UserError(f"a conversation must have at most {MOST_TURNS} questions: start a new one")
        media = self._media()
        if not self.earlier:
            return {"prompt": prompt, **media}
        messages: list[dict[str, Any]] = []
        for question, answer in [*self.earlier, (prompt, None)]:
            said: Any = question
            if self.kind != "text":
                shown = [{"type": self.kind}] if not messages else []
                said = [*shown, {"type": "text", "text": question}]
            messages.append({"role": "user", "content": said})
            if answer is not None:
                told: Any = answer if self.kind == "text" else [{"type": "text", "text": answer}]
                messages.append({"role": "assistant", "content": told})
        return {"prompt": messages, **media}

    def keywords(self) -> dict[str, Any]:
        """How ``Pipeline.generate`` is to decode.

        Raises:
            UserError: an option out of range.
        """
        if not 1 <= self.max_new_tokens <= MOST_TOKENS:
            raise UserError(f"max_new_tokens must lie in 1..{MOST_TOKENS}: got {self.max_new_tokens}")
        if not math.isfinite(self.temperature) or self.temperature > 5:
            raise UserError(f"temperature must lie in 0..5: got {self.temperature}")
        SamplingParams(temperature=self.temperature)
        return {
            "max_new_tokens": int(self.max_new_tokens),
            "temperature": float(self.temperature),
            "seed": int(self.seed),
        }

    def _media(self) -> dict[str, Any]:
        if self.kind == "text":
            return {}
        article = "an image" if self.kind == "image" else "a video"
        if self.upload is None:
            raise UserError(f"there is nothing to look at yet: expected {article}, upload one or take an example")
        if not Path(self.upload.path).is_file():
            raise UserError(
                f"{self.upload.name} is no longer here (uploads are removed after a while): upload it again"
            )
        path, name = self.upload.path, self.upload.name
        if self.kind == "image":
            return {"images": [_decoder().load(path, "image", name=name)]}
        if not 1 <= self.frames <= MOST_FRAMES:
            raise UserError(f"frames must lie in 1..{MOST_FRAMES}: got {self.frames}")
        return {
            "videos": [_decoder().load(path, "video", name=name, frames=int(self.frames), max_duration=LONGEST_VIDEO)]
        }


@cache
def _decoder() -> Decoder:
    """Shared by all visitors."""
    return Decoder(seconds=20, memory=2 << 30)
