"""Requests of visitors, with the demo's limits, and conversations, which are stored in the page."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mmspec import plugins
from mmspec.engine.stats import Origin
from mmspec.errors import UserError
from mmspec.validation import option, options
from mmspec.vision.decoding import MediaDecoder

Kind = Literal["image", "video", "text"]

DEFAULT_PROMPTS: dict[Kind, str] = {"image": "Describe the image.", "video": "Describe the video.", "text": ""}
DEFAULT_MODELS: dict[Kind, tuple[str, ...]] = {
    "image": plugins.CAPTIONERS,
    "video": ("tiny-llava",),
    "text": ("smollm2", "tiny-hybrid"),
}
"""The first installed one is the default."""

Name = Annotated[str, StringConstraints(strip_whitespace=True)]

MAX_PROMPT_CHARS = 4000
MAX_NEW_TOKENS = 512
MAX_IMAGES = 8
MAX_FRAMES = 32
MAX_TURNS = 12
MAX_VIDEO_SECONDS = 300
MAX_UPLOAD_MIB = 32


@options
class ChatRequest:
    """One prompt with its settings, paths of images or of a video, and earlier (prompt, answer) pairs about them."""

    kind: Kind
    prompt: Annotated[str, StringConstraints(strip_whitespace=True, max_length=MAX_PROMPT_CHARS)] = option(
        "", f"question or instruction, at most {MAX_PROMPT_CHARS} characters"
    )
    uploads: list[str] = option(list)
    history: list[tuple[str, str]] = option(list)
    model: Name = option("", "name of a model that the server offers; empty: its default")
    drafter: Name = option("auto", "a drafter's name, auto (the model's default) or none (plain decoding)")
    max_new_tokens: int = option(256, f"limit on new tokens, 1 to {MAX_NEW_TOKENS}", ge=1, le=MAX_NEW_TOKENS)
    temperature: float = option(0.0, "0 (greedy) to 5", ge=0, le=5)
    seed: int = option(0, "seed of sampling", ge=0, lt=2**63)
    frames: int = option(8, f"frames sampled from the video, 1 to {MAX_FRAMES}", ge=1, le=MAX_FRAMES)

    def pipeline_request(self) -> dict[str, Any]:
        """Keywords of ``Pipeline.generate``, with media decoded."""
        if not self.prompt:
            raise UserError("the prompt must not be empty: type a question")
        if len(self.history) >= MAX_TURNS:
            raise UserError(f"a conversation must have at most {MAX_TURNS} questions: start a new one")
        keywords = self._media() | {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "seed")}
        if not self.history:
            return {"prompt": self.prompt, **keywords}
        messages: list[dict[str, Any]] = []
        for user, assistant in self.history:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        messages.append({"role": "user", "content": self.prompt})
        if self.kind != "text":
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
            messages[0]["content"][:0] = [{"type": self.kind} for _ in self.uploads]
        return {"prompt": messages, **keywords}

    def _media(self) -> dict[str, Any]:
        if self.kind == "text":
            return {}
        if not self.uploads:
            raise UserError(f"no {self.kind} was uploaded: upload one or select an example")
        most = MAX_IMAGES if self.kind == "image" else 1
        if len(self.uploads) > most:
            raise UserError(f"a question must have at most {most} {self.kind}s: got {len(self.uploads)}")
        options: dict[str, Any] = {"frames": self.frames, "max_duration": MAX_VIDEO_SECONDS}
        decoded = []
        for path in map(Path, self.uploads):
            if not path.is_file():
                raise UserError(f"{path.name} was removed (uploads are kept for a limited time): upload it again")
            decoded.append(decoder().load(path, self.kind, name=path.name, **options if self.kind == "video" else {}))
        return {f"{self.kind}s": decoded}


@cache
def decoder() -> MediaDecoder:
    return MediaDecoder(seconds=20, memory=2 << 30)


@dataclass(frozen=True)
class Token:
    """A token of an answer, with the text that it adds, empty until a later token completes the character; origin and
    verify pass, from 1, as in ``mmspec.engine.stats.token_origins``."""

    text: str
    origin: Origin
    step: int


@dataclass(frozen=True)
class Turn:
    """A question and its answer. ``tokens``: tokens of the answer; tokens of one pass and origin are joined."""

    prompt: str
    tokens: Annotated[list[Token], Field(max_length=MAX_NEW_TOKENS)]
    stopped: bool = False

    @staticmethod
    def of(prompt: str, tokens: Iterable[Token], stopped: bool) -> Turn:
        groups = groupby(tokens, key=lambda token: (token.origin, token.step))
        return Turn(prompt, [Token("".join(token.text for token in group), *key) for key, group in groups], stopped)

    @property
    def answer(self) -> str:
        return "".join(token.text for token in self.tokens).strip()


@dataclass(frozen=True)
class ChatState:
    """A visitor's conversation, stored in the page, so it survives a restart of the server: the sampling seed of all
    turns, 0 before the first; the id of the running request, or ""; whether the tab has been used or has raced."""

    turns: list[Turn] = field(default_factory=list)
    seed: int = 0
    running: str = ""
    opened: bool = False

    @staticmethod
    def parse(value: Any) -> ChatState:
        """Parse the conversation sent by a page; malformed values give an empty conversation."""
        with suppress(ValidationError):
            state = TypeAdapter(ChatState).validate_python(value)
            return replace(state, turns=state.turns[-MAX_TURNS:])
        return ChatState()

    @property
    def history(self) -> list[tuple[str, str]]:
        return [(turn.prompt, turn.answer) for turn in self.turns]
