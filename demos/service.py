"""Answer requests of the page and of the typed API endpoints.

Each endpoint yields partial results, so that clients can stream and cancel; the last result is complete.
"""

# No postponed annotations: gradio reads the results' types from them.
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, TypeVar

import gradio as gr

from mmspec.demos.catalog import FEWEST, MOST, Catalog, check_methods, drafter_of
from mmspec.demos.chat_request import DEFAULT_PROMPTS, MAX_VIDEO_SECONDS, ChatRequest, Kind
from mmspec.demos.models import ModelCache
from mmspec.demos.racing import Race, StreamedAnswer, race, resolved, stream_answer, warmed_up
from mmspec.demos.storage import PREVIEW_SPACE, UploadFolder, write_preview
from mmspec.errors import UserError
from mmspec.validation import check

T = TypeVar("T")
_log = logging.getLogger("mmspec.demo")
_OPENING_RACES = 2  # maximum runs of an opening race


class Service:
    """Answers requests: several at once, races alone."""

    def __init__(self, models: ModelCache, catalog: Catalog, uploads: UploadFolder) -> None:
        self.models = models
        self.catalog = catalog
        self.uploads = uploads
        self._openings: dict[Kind, Race] = {}

    def answer(self, chat: ChatRequest) -> Iterator[Race]:
        """Stream an answer by ``chat.drafter``, a race of one lane. All errors are raised as ``UserError``."""
        empty = [StreamedAnswer(chat.model, chat.drafter)]
        return self.models.turns.run(_user_errors(self._answer(chat)), lambda ahead: Race(empty, ahead=ahead))

    def race(self, chat: ChatRequest, methods: Sequence[str] | None = None) -> Iterator[Race]:
        """Stream a race of methods, by default the model's first two, while no other request runs; see ``answer``."""
        return self._alone(self._race(chat, methods))

    def _alone(self, races: Iterator[Race]) -> Iterator[Race]:
        return self.models.turns.run(_user_errors(races), lambda ahead: Race([], ahead=ahead), alone=True)

    def opening(self, chat: ChatRequest) -> Iterator[Race]:
        """The opening race of a tab: runs for the first visitor, and is cached for later visitors. A race without a
        speedup, for example on a busy machine, is repeated once."""
        if chat.kind in self._openings:
            yield self._openings[chat.kind]
        else:
            yield from self._alone(self._opening(chat))

    def _opening(self, chat: ChatRequest) -> Iterator[Race]:
        for number in range(_OPENING_RACES):
            if chat.kind in self._openings:  # cached for an earlier visitor
                break
            for result in self._race(chat, None):
                yield result
            if result.pays or number == _OPENING_RACES - 1:
                self._openings[chat.kind] = result
        yield self._openings[chat.kind]

    def warm_up(self, chat: ChatRequest) -> None:
        """Load the models of a race and run each method once, so that the race starts without delay."""
        chat, request = self._prepare(chat)
        warmed_up(self.models.get(chat.model), self._methods(chat), request)

    def preview(self, upload: str, kind: Kind) -> str | None:
        """Write the preview of an upload; returns its path, or None if it does not fit into the space of uploads."""
        self._check_uploaded(upload, kind)
        if not self.uploads.reserve(PREVIEW_SPACE):
            return None
        try:
            return write_preview(upload, kind)
        finally:
            self.uploads.release(PREVIEW_SPACE)

    def _answer(self, chat: ChatRequest) -> Iterator[Race]:
        chat, request = self._prepare(chat)
        pipe = self.models.get(chat.model).pipeline(chat.drafter)
        for answer in stream_answer(pipe, resolved(chat.drafter, pipe), request):
            yield Race([answer])

    def _race(self, chat: ChatRequest, methods: Sequence[str] | None) -> Iterator[Race]:
        methods = self._methods(chat) if methods is None else methods
        check_methods(methods)
        for method in methods:
            self.with_defaults(replace(chat, drafter=drafter_of(method)))
        chat, request = self._prepare(chat)
        yield from race(self.models.get(chat.model), methods, request)

    def _methods(self, chat: ChatRequest) -> list[str]:
        return self.catalog.methods(self.with_defaults(chat).model)[:FEWEST]

    def with_defaults(self, chat: ChatRequest) -> ChatRequest:
        """Fill in a request's default model and drafter, which must be in the catalog."""
        chat = replace(chat, model=chat.model or self.catalog.default_model(chat.kind), drafter=chat.drafter or "auto")
        self.catalog.check(chat.model, chat.drafter)
        return chat

    def _prepare(self, chat: ChatRequest) -> tuple[ChatRequest, dict[str, Any]]:
        """The request with its defaults, and the pipeline's keywords."""
        chat = self.with_defaults(chat)
        for upload in chat.uploads:
            self._check_uploaded(upload, chat.kind)
            with suppress(OSError):
                os.utime(upload)  # used now
        return chat, chat.pipeline_request()

    def _check_uploaded(self, upload: str, kind: Kind) -> None:
        if not self.uploads.contains(upload):
            raise UserError(f"the {kind} must be uploaded: expected gradio_client's handle_file(PATH)")


def _user_errors(work: Iterator[T]) -> Iterator[T]:
    """Log unexpected exceptions, and raise a ``UserError`` without details instead."""
    try:
        yield from work
    except UserError:
        raise
    except Exception as error:
        _log.exception("a request failed")
        raise UserError(f"internal error ({type(error).__name__}); details are in the server's log") from error


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


_SETTINGS = {
    name: (type(info.default), info.default)
    for name, info in ChatRequest.__pydantic_fields__.items()  # type: ignore[attr-defined]
    if info.description and name not in ("prompt", "frames")
}
_FRAMES = (int, ChatRequest.__pydantic_fields__["frames"].default)  # type: ignore[attr-defined]
_REQUIRED = inspect.Parameter.empty


def add_endpoints(page: gr.Blocks, service: Service) -> None:
    def add(name: str, text: str, result: type, run: Callable[[Any], Iterator[Any]], **fields: tuple[Any, Any]) -> None:
        """Add an endpoint of these types and defaults. It streams; gradio takes the type of one result as its own."""

        def endpoint(*values: Any) -> Iterator[Any]:
            try:
                yield from run(dict(zip(fields, values, strict=True)))
            except UserError as error:
                raise gr.Error(str(error), print_exception=False) from None

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(one, kind, default=default) for one, (_, default) in fields.items()]
        endpoint.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
        endpoint.__annotations__ = {one: found for one, (found, _) in fields.items()} | {"return": result}
        endpoint.__doc__ = text
        event = gr.api(endpoint, api_name=name, concurrency_limit=None)
        for component, one in zip(page.fns[event["id"]].inputs, fields, strict=True):
            component._api_info["additional_description"] = _PARAMETERS[one]  # type: ignore[union-attr]

    def answer(kind: str, given: dict[str, Any]) -> Iterator[AnswerJSON]:
        return (answer_result(race.lanes[0]) for race in service.answer(_request(kind, given)))

    def compare(given: dict[str, Any]) -> Iterator[RaceJSON]:
        kinds = [kind for kind in ("image", "video") if given[kind] is not None] or ["text"]
        if len(kinds) > 1:
            raise UserError("a race is about one upload: expected image or video, got both")
        chosen = check("methods", list[str], given["methods"]) if given["methods"] else None
        return map(race_result, service.race(_request(kinds[0], given), chosen))

    prompts = {kind: (str, prompt) for kind, prompt in DEFAULT_PROMPTS.items()}
    text = "Describe an image, or answer a question about it."
    image = {"image": (gr.FileData, _REQUIRED), "prompt": prompts["image"], **_SETTINGS}
    add("caption_image", text, AnswerJSON, partial(answer, "image"), **image)
    text = "Describe a video, or answer a question about it."
    video = {"video": (gr.FileData, _REQUIRED), "prompt": prompts["video"], **_SETTINGS, "frames": _FRAMES}
    add("caption_video", text, AnswerJSON, partial(answer, "video"), **video)
    asked: dict[str, Any] = {"prompt": (str, _REQUIRED)}
    add("generate", "Answer a text prompt.", AnswerJSON, partial(answer, "text"), **asked, **_SETTINGS)
    text = "Race two to four methods of decoding on a text prompt, or on a question about an image or a video."
    asked |= {"image": (gr.FileData | None, None), "video": (gr.FileData | None, None), "model": _SETTINGS["model"]}
    asked |= {"methods": (list[str] | None, None)}
    asked |= {name: _SETTINGS[name] for name in ("max_new_tokens", "temperature", "seed")}
    add("compare", text, RaceJSON, compare, **asked, frames=_FRAMES)


def _request(kind: str, arguments: dict[str, Any]) -> ChatRequest:
    fields = {name: arguments[name] for name in ChatRequest.__dataclass_fields__ if name in arguments}
    file = arguments.get(kind)
    uploads = [] if file is None else [str(file.get("path") if isinstance(file, dict) else "")]
    return ChatRequest(**{**fields, "kind": kind, "uploads": uploads})


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
