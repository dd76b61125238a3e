"""Requests of visitors, with the demo's limits, and conversations, which are stored in the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

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
        path: path on the server.
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
        if self.temperature > 5:
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


Origin = Literal["first", "accepted", "bonus", "plain"]


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        text: text added by the token; empty until a later token completes the character.
        origin: "first" (from the prefill), "accepted" (draft token), "bonus" (the target's token after them) or "plain"
            (decoded without draft tokens).
        step: the verify pass that emitted it, counted from 1; 0 is the prefill.
    """

    text: str
    origin: Origin
    step: int


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        tokens: tokens of the answer; tokens of one pass and origin are joined.
        stopped: whether the visitor stopped the answer.
    """

    prompt: str
    tokens: list[Token]
    stopped: bool = False

    @staticmethod
    def of(prompt: str, tokens: Iterable[Token], stopped: bool) -> Turn:
        """Build a turn from an answer's tokens."""
        groups = groupby(tokens, key=lambda token: (token.origin, token.step))
        joined = [Token("".join(token.text for token in group), *key) for key, group in groups]
        return Turn(prompt, joined, stopped)

    @property
    def answer(self) -> str:
        return "".join(token.text for token in self.tokens).strip()


@dataclass(frozen=True)
class ChatState:
    """State of a visitor's conversation. Stored in the page, so it survives a restart of the server.

    Attributes:
        turns: oldest first.
        seed: sampling seed of all turns; 0 until the first.
        running: id of the running request; empty if none runs.
        opened: whether the tab has been used, or has shown its opening race.
    """

    turns: list[Turn] = field(default_factory=list)
    seed: int = 0
    running: str = ""
    opened: bool = False

    def restarted(self) -> ChatState:
        """A new conversation that keeps the id of a running request."""
        return ChatState(running=self.running, opened=True)

    def with_turn(self, turn: Turn) -> ChatState:
        return replace(self, turns=[*self.turns, turn])

    @property
    def history(self) -> list[tuple[str, str]]:
        return [(turn.prompt, turn.answer) for turn in self.turns]


def parse_conversation(value: Any) -> ChatState:
    """Parse the conversation sent by a page; malformed values give an empty conversation."""
    try:
        turns = [_parse_turn(turn) for turn in value["turns"][-MAX_TURNS:]]
        return ChatState(turns, int(value["seed"]), str(value["running"]), bool(value["opened"]))
    except (KeyError, TypeError, ValueError):
        return ChatState()


def _parse_turn(turn: Any) -> Turn:
    tokens = [Token(str(token["text"]), token["origin"], int(token["step"])) for token in turn["tokens"]]
    if len(tokens) > MAX_NEW_TOKENS or not {token.origin for token in tokens} <= set(get_args(Origin)):
        raise ValueError("malformed tokens")
    return Turn(str(turn["prompt"]), tokens, bool(turn["stopped"]))
