"""Typed API endpoints of the demo.

Each endpoint yields partial results, so that clients can stream and cancel; the last result is complete.
"""

# No postponed annotations: gradio reads the endpoints' types from them.
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import gradio as gr

from mmspec.demos.catalog import FEWEST, MOST
from mmspec.demos.chat_request import (
    DEFAULT_PROMPTS,
    MAX_FRAMES,
    MAX_NEW_TOKENS,
    MAX_PROMPT_CHARS,
    MAX_VIDEO_SECONDS,
    ChatRequest,
    Kind,
    Upload,
)
from mmspec.demos.racing import Race, StreamedAnswer
from mmspec.demos.service import Service, not_uploaded_error
from mmspec.drafters.registry import AUTO
from mmspec.errors import UserError


class AnswerJSON(TypedDict):
    """Result of a request. ``acceptance`` is the mean acceptance length; statistics are 0 until the answer ends."""

    text: str
    tokens: int
    seconds: float
    tokens_per_second: float
    acceptance: float
    draft_acceptance_rate: float
    finish_reason: str
    model: str
    drafter: str


class RaceJSON(TypedDict):
    """A race: each lane is the run of median time among ``runs`` runs. The speedups are those of the fastest lane;
    ``first_difference`` is -1 if all tokens are equal."""

    lanes: list[AnswerJSON]
    runs: int
    baseline: str
    fastest: str
    decode_speedup: float
    end_to_end_speedup: float
    equal: bool
    first_difference: int


_PARAMETERS = {
    "image": "image file; with gradio_client: handle_file(PATH)",
    "video": f"video file of at most {MAX_VIDEO_SECONDS} s; with gradio_client: handle_file(PATH)",
    "prompt": f"question or instruction, at most {MAX_PROMPT_CHARS} characters",
    "model": "name of a model that the server offers; empty: its default",
    "drafter": "a drafter's name, auto (the model's default) or none (plain decoding)",
    "methods": (
        f"{FEWEST} to {MOST} of: none (plain decoding), a drafter, DRAFTER@chain (chains instead of trees); "
        "empty: plain decoding and the default drafter"
    ),
    "max_new_tokens": f"limit on new tokens, 1 to {MAX_NEW_TOKENS}",
    "temperature": "0 (greedy) to 5",
    "seed": "seed of sampling",
    "frames": f"frames sampled from the video, 1 to {MAX_FRAMES}",
}


def add_endpoints(page: gr.Blocks, service: Service) -> None:
    for endpoint in (*_caption_endpoints(service), *_text_endpoints(service)):
        event = gr.api(endpoint, api_name=endpoint.__name__, concurrency_limit=None)
        names = inspect.signature(endpoint).parameters
        for component, name in zip(page.fns[event["id"]].inputs, names, strict=True):
            component._api_info["additional_description"] = _PARAMETERS[name]  # type: ignore[union-attr]


# Endpoints are generators, but gradio expects the type of one result as their return annotation.
def _caption_endpoints(service: Service) -> tuple[Callable[..., Any], ...]:
    def caption_image(  # type: ignore[misc]
        image: gr.FileData,
        prompt: str = DEFAULT_PROMPTS["image"],
        model: str = "",
        drafter: str = "auto",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> AnswerJSON:
        """Describe an image, or answer a question about it."""
        yield from _answers(service, locals() | {"kind": "image", "upload": image})

    def caption_video(  # type: ignore[misc]
        video: gr.FileData,
        prompt: str = DEFAULT_PROMPTS["video"],
        model: str = "",
        drafter: str = "auto",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        frames: int = 8,
    ) -> AnswerJSON:
        """Describe a video, or answer a question about it."""
        yield from _answers(service, locals() | {"kind": "video", "upload": video})

    return caption_image, caption_video


def _text_endpoints(service: Service) -> tuple[Callable[..., Any], ...]:
    def generate(  # type: ignore[misc]
        prompt: str,
        model: str = "",
        drafter: str = "auto",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> AnswerJSON:
        """Answer a text prompt."""
        yield from _answers(service, locals() | {"kind": "text"})

    def compare(  # type: ignore[misc]
        prompt: str,
        image: gr.FileData | None = None,
        video: gr.FileData | None = None,
        model: str = "",
        methods: list[str] | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        frames: int = 8,
    ) -> RaceJSON:
        """Race two to four methods of decoding on a text prompt, or on a question about an image or a video."""
        yield from _comparisons(service, locals())

    return generate, compare


def _answers(service: Service, arguments: dict[str, Any]) -> Iterator[AnswerJSON]:
    for answer in _gradio_errors(lambda: service.answer(_parse_request(arguments))):
        yield answer_result(answer)


def _comparisons(service: Service, arguments: dict[str, Any]) -> Iterator[RaceJSON]:
    def start() -> Iterator[Race]:
        kinds: list[Kind] = [kind for kind in ("image", "video") if arguments[kind] is not None]
        if len(kinds) > 1:
            raise UserError("a race is about one upload: expected image or video, got both")
        methods = arguments["methods"] or None
        if methods is not None and not (isinstance(methods, list) and all(isinstance(name, str) for name in methods)):
            raise UserError(f"methods must be a list of names: got {methods!r}")
        kind: Kind = kinds[0] if kinds else "text"
        upload = arguments[kind] if kinds else None
        chat = _parse_request({**arguments, "kind": kind, "upload": upload, "drafter": AUTO})
        return service.race(chat, methods)

    for race in _gradio_errors(start):
        yield race_result(race)


def _gradio_errors(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Raise ``UserError`` as ``gr.Error``."""
    try:
        yield from start()
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from None


def _parse_request(arguments: dict[str, Any]) -> ChatRequest:
    """Check the types of an endpoint's arguments."""
    fields = {
        name: arguments[name] for name in ChatRequest.__dataclass_fields__ if name in arguments and name != "uploads"
    }
    for name, kind in (("prompt", str), ("model", str), ("drafter", str), ("max_new_tokens", int), ("seed", int)):
        if not isinstance(fields[name], kind) or isinstance(fields[name], bool):
            raise UserError(f"{name} must be of type {kind.__name__}: got {fields[name]!r}")
    for name in ("temperature", "frames"):
        if not isinstance(fields.get(name, 0), int | float):
            raise UserError(f"{name} must be a number: got {fields[name]!r}")
    return ChatRequest(**fields, uploads=_parse_upload(arguments.get("upload"), arguments["kind"]))


def _parse_upload(file: Any, kind: Kind) -> Sequence[Upload]:
    if file is None:
        return ()
    path = file.get("path") if isinstance(file, dict) else None
    if not isinstance(path, str):
        raise not_uploaded_error(kind)
    return (Upload(path, str(file.get("orig_name") or Path(path).name)),)


def answer_result(answer: StreamedAnswer) -> AnswerJSON:
    stats = answer.stats
    return {
        "text": answer.text.strip(),
        "tokens": len(answer.token_ids),
        "seconds": answer.seconds,
        "tokens_per_second": stats.tokens_per_second if stats else 0.0,
        "acceptance": stats.mean_acceptance_length if stats else 0.0,
        "draft_acceptance_rate": stats.draft_acceptance_rate if stats else 0.0,
        "finish_reason": answer.finish_reason or "",
        "model": answer.model,
        "drafter": answer.drafter,
    }


def race_result(race: Race) -> RaceJSON:
    fastest = race.fastest if race.finished else None
    return {
        "lanes": [answer_result(lane) for lane in race.lanes],
        "runs": race.runs,
        "baseline": race.baseline.drafter if fastest else "",
        "fastest": fastest.drafter if fastest else "",
        "decode_speedup": (race.decode_speedup(fastest) or 0.0) if fastest else 0.0,
        "end_to_end_speedup": race.speedup(fastest) if fastest else 0.0,
        "equal": bool(race.equal),
        "first_difference": race.difference.position if race.difference else -1,
    }
