"""Typed API endpoints of the demo.

Each endpoint yields partial results, so that clients can stream and cancel; the last result is complete.
"""

# No postponed annotations: gradio reads the endpoints' types from them.
import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypedDict

import gradio as gr

from mmspec.demos.catalog import FEWEST, MOST
from mmspec.demos.chat_request import DEFAULT_PROMPTS, MAX_VIDEO_SECONDS, ChatRequest
from mmspec.demos.racing import Race, StreamedAnswer
from mmspec.demos.service import Service
from mmspec.errors import UserError
from mmspec.validation import check


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
    """A race: each lane is the run of median time among ``runs`` runs. The speedups are the fastest lane's;
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
    "methods": (
        f"{FEWEST} to {MOST} of: none (plain decoding), a drafter, DRAFTER@chain (chains instead of trees); "
        "empty: plain decoding and the default drafter"
    ),
    **{name: info.description for name, info in ChatRequest.__pydantic_fields__.items()},  # type: ignore[attr-defined]
}


# Endpoints are generators, but gradio expects the type of one result as their return annotation.
def add_endpoints(page: gr.Blocks, service: Service) -> None:
    def answer(kind: str, arguments: dict[str, Any]) -> Iterator[AnswerJSON]:
        return map(answer_result, service.answer(_request(kind, arguments)))

    def caption_image(
        image: gr.FileData,
        prompt: str = DEFAULT_PROMPTS["image"],
        model: str = "",
        drafter: str = "auto",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> AnswerJSON:
        """Describe an image, or answer a question about it."""
        return answer("image", locals())  # type: ignore[return-value]

    def caption_video(
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
        return answer("video", locals())  # type: ignore[return-value]

    def generate(
        prompt: str,
        model: str = "",
        drafter: str = "auto",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> AnswerJSON:
        """Answer a text prompt."""
        return answer("text", locals())  # type: ignore[return-value]

    def compare(
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
        if image is not None and video is not None:
            raise UserError("a race is about one upload: expected image or video, got both")
        kind = "image" if image is not None else "video" if video is not None else "text"
        chosen = check("methods", list[str], methods) if methods else None
        return map(race_result, service.race(_request(kind, locals()), chosen))  # type: ignore[return-value]

    for endpoint in (caption_image, caption_video, generate, compare):
        event = gr.api(_raises_gradio_errors(endpoint), api_name=endpoint.__name__, concurrency_limit=None)
        names = inspect.signature(endpoint).parameters
        for component, name in zip(page.fns[event["id"]].inputs, names, strict=True):
            component._api_info["additional_description"] = _PARAMETERS[name]  # type: ignore[union-attr]


def _request(kind: str, arguments: dict[str, Any]) -> ChatRequest:
    fields = {name: arguments[name] for name in ChatRequest.__dataclass_fields__ if name in arguments}
    file = arguments.get(kind)
    uploads = [] if file is None else [str(file.get("path") if isinstance(file, dict) else "")]
    return ChatRequest(**{**fields, "kind": kind, "uploads": uploads})


def _raises_gradio_errors(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Stream an endpoint's results, and raise ``UserError`` as ``gr.Error``."""

    @wraps(endpoint)
    def streamed(*arguments: Any) -> Iterator[Any]:
        try:
            yield from endpoint(*arguments)
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from None

    return streamed


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
