"""The named endpoints: the demo as a small web API, typed.

Each yields what there is so far, so that a client can stream it and cancel it; the last result is the whole one.
"""

# No postponed annotations: the server reads the types of the endpoints from them.
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import gradio as gr

from demos.questions import PROMPTS, Kind, Question, Upload
from demos.runs import Race, Run
from demos.service import Service, not_uploaded
from mmspec.errors import UserError


class Answer(TypedDict):
    """An answer. ``acceptance`` is the mean number of tokens per verify pass; figures are 0 until it has ended."""

    text: str
    tokens: int
    seconds: float
    tokens_per_second: float
    acceptance: float
    draft_acceptance_rate: float
    finish_reason: str
    model: str
    drafter: str


class Comparison(TypedDict):
    """Two answers to one request. ``first_difference`` is a position, -1 where the tokens are equal."""

    speculative: Answer
    plain: Answer
    decode_speedup: float
    end_to_end_speedup: float
    equal: bool
    first_difference: int


def add(service: Service, together: dict[str, Any]) -> None:
    """Add the endpoints to the page that is being built.

    Args:
        together: the queue that they share with the page.
    """

    # Each yields results of the annotated type, which is the type of one result that the server wants to be told.
    def caption_image(  # type: ignore[misc]
        image: gr.FileData,
        prompt: str = PROMPTS["image"],
        model: str = "",
        drafter: str = "auto",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Answer:
        """Describe an image, or answer a question about it."""
        yield from _answers(service, locals() | {"kind": "image", "upload": image})

    def caption_video(  # type: ignore[misc]
        video: gr.FileData,
        prompt: str = PROMPTS["video"],
        model: str = "",
        drafter: str = "auto",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        frames: int = 8,
    ) -> Answer:
        """Describe a video, or answer a question about it."""
        yield from _answers(service, locals() | {"kind": "video", "upload": video})

    def generate(  # type: ignore[misc]
        prompt: str,
        model: str = "",
        drafter: str = "auto",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Answer:
        """Answer a text."""
        yield from _answers(service, locals() | {"kind": "text"})

    def compare(  # type: ignore[misc]
        prompt: str,
        image: gr.FileData | None = None,
        model: str = "",
        drafter: str = "auto",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Comparison:
        """Answer a text, or a question about an image, speculatively and plainly."""
        yield from _races(service, locals() | {"kind": "image" if image else "text", "upload": image})

    shared = {name: value for name, value in together.items() if name != "api_visibility"}
    for endpoint in (caption_image, caption_video, generate, compare):
        gr.api(endpoint, api_name=endpoint.__name__, **shared)


def _answers(service: Service, given: dict[str, Any]) -> Iterator[Answer]:
    for run in _told(lambda: service.answer(_question(given))):
        yield answer(run)


def _races(service: Service, given: dict[str, Any]) -> Iterator[Comparison]:
    for race in _told(lambda: service.race(_question(given))):
        yield comparison(race)


def _told(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    try:
        yield from start()
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from None


def _question(given: dict[str, Any]) -> Question:
    asked = {name: given[name] for name in Question.__dataclass_fields__ if name in given and name != "upload"}
    for name, kind in (("prompt", str), ("model", str), ("drafter", str), ("max_new_tokens", int), ("seed", int)):
        if not isinstance(asked[name], kind) or isinstance(asked[name], bool):
            raise UserError(f"{name} must be of type {kind.__name__}: got {asked[name]!r}")
    for name in ("temperature", "frames"):
        if not isinstance(asked.get(name, 0), int | float):
            raise UserError(f"{name} must be a number: got {asked[name]!r}")
    return Question(**asked, upload=_uploaded(given.get("upload"), given["kind"]))


def _uploaded(file: Any, kind: Kind) -> Upload | None:
    """The upload that a client's file stands for."""
    if file is None:
        return None
    path = file.get("path") if isinstance(file, dict) else None
    if not isinstance(path, str):
        raise not_uploaded(kind)
    return Upload(path, str(file.get("orig_name") or Path(path).name))


def answer(run: Run) -> Answer:
    """A run as the result of an endpoint."""
    stats = run.stats
    return {
        "text": run.text.strip(),
        "tokens": len(run.token_ids),
        "seconds": run.seconds,
        "tokens_per_second": stats.tokens_per_second if stats else 0.0,
        "acceptance": stats.mean_acceptance_length if stats else 0.0,
        "draft_acceptance_rate": stats.draft_acceptance_rate if stats else 0.0,
        "finish_reason": run.finish_reason or "",
        "model": run.model,
        "drafter": run.drafter,
    }


def comparison(race: Race) -> Comparison:
    """A race as the result of an endpoint."""
    return {
        "speculative": answer(race.speculative),
        "plain": answer(race.plain),
        "decode_speedup": race.decode_ratio or 0.0,
        "end_to_end_speedup": race.end_to_end_ratio or 0.0,
        "equal": bool(race.equal),
        "first_difference": race.difference.position if race.difference else -1,
    }
