"""Streamed answers with the time of every pass, races of several methods, and their recording as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from time import perf_counter as clock
from typing import Any

from mmspec.compare import Difference, first_difference
from mmspec.demos.catalog import drafter_of, label
from mmspec.demos.chat_request import ChatRequest, Token
from mmspec.demos.models import LoadedModel
from mmspec.drafters.registry import AUTO, PLAIN, registered_name
from mmspec.engine.stats import Stats, TreeRecord, token_origins
from mmspec.engine.stopping import FinishReason
from mmspec.errors import UserError
from mmspec.pipeline import Piece, Pipeline

RUNS = 3  # runs of each method in a race, which shows the run of median time
AS_FAST = 1.05  # ratio of times within which two methods are as fast as each other
_WARM_UP = 8  # tokens
_PAUSES = 0.05, 0.5  # seconds between updates, in the first run and later runs: updates slow the methods down
_DIGITS = 4  # decimals of recorded probabilities


@dataclass
class StreamedAnswer:
    """An answer by a method of decoding (``drafter``, see ``resolved``) that grows while it is generated. Statistics
    are set when it is complete.

    Attributes:
        seconds: time of image preprocessing and engine steps so far, without time spent in the consumer.
        pass_ends: ``seconds`` at the end of the prefill and of every pass so far.
    """

    model: str
    drafter: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    steps: list[TreeRecord] = field(default_factory=list)
    seconds: float = 0.0
    limit: int = 1
    pass_ends: list[float] = field(default_factory=list)
    stats: Stats | None = None
    finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        return self.stats is not None

    @property
    def passes(self) -> int:
        """Number of passes after the prefill so far."""
        return max(len(self.pass_ends) - 1, 0)

    @property
    def speed(self) -> float:
        """Tokens per second: of decoding for complete answers, else of the answer so far."""
        if self.stats is not None:
            return self.stats.tokens_per_second
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Mean acceptance length of a complete answer; of an answer so far, with the prefill as a pass."""
        return self.stats.mean_acceptance_length if self.stats else len(self.token_ids) / (self.passes + 1)

    def append(self, piece: Piece) -> None:
        """Append a piece of the pipeline's stream."""
        self.text += piece.text
        self.steps, self.stats, self.finish_reason = piece.trees, piece.stats, piece.finish_reason
        origins = token_origins(self.steps)
        for token_id, (_, text) in zip(piece.token_ids, piece.parts, strict=False):
            number = len(self.tokens)
            self.token_ids.append(token_id)
            self.tokens.append(Token(text, *(("plain", number) if self.drafter == PLAIN else origins[number])))
        # Passes of one piece share its time equally.
        start = self.pass_ends[-1] if self.pass_ends else 0.0
        new = 1 + self.tokens[-1].step - len(self.pass_ends) if self.tokens else 0
        self.pass_ends += [start + (self.seconds - start) * number / new for number in range(1, new + 1)]


def resolved(method: str, pipe: Pipeline) -> str:
    """Replace ``auto`` in a method by the registered name of the pipeline's drafter."""
    return method.replace(AUTO, registered_name(pipe.drafter) or PLAIN) if drafter_of(method) == AUTO else method


def stream_answer(pipe: Pipeline, method: str, request: Mapping[str, Any]) -> Iterator[StreamedAnswer]:
    """Answer a request, keywords of ``Pipeline.generate``; yields the same ``StreamedAnswer`` after every piece."""
    answer = StreamedAnswer(pipe.name, method, limit=request["max_new_tokens"])
    start, preprocessing = clock(), None
    for piece in pipe.stream(**request, trace=pipe.drafter is not None):
        if preprocessing is None:
            preprocessing = clock() - start - piece.seconds
        answer.seconds = preprocessing + piece.seconds
        answer.append(piece)
        yield answer


def recording(lanes: Sequence[StreamedAnswer], chat: ChatRequest, example: str | None) -> dict[str, Any]:
    """Complete or stopped answers to one request as JSON values: ``settings`` of a link to the page, with the name of
    an uploaded example; ``lanes`` with the text, ``ends`` of prefill and passes in seconds, ``emitted`` tokens of each,
    ``shares`` of drafting and verification in a pass, and verified ``trees`` of each method."""
    left_out = {"uploads", "history", "drafter", *(["frames"] if chat.kind != "video" else [])}
    settings = {name: value for name, value in asdict(chat).items() if name not in left_out}
    settings |= {"methods": [lane.drafter for lane in lanes], **({"example": example} if example else {})}
    return {"settings": settings, "lanes": [_lane(lane) for lane in lanes]}


def _lane(lane: StreamedAnswer) -> dict[str, Any]:
    emitted = [0] * len(lane.pass_ends)
    for token in lane.tokens:
        emitted[token.step] += 1
    stats = lane.stats or Stats(draft_seconds=1.0, verify_seconds=1.0)  # equal shares for stopped answers
    total = stats.draft_seconds + stats.verify_seconds + stats.commit_seconds
    return {
        "method": lane.drafter,
        "label": label(lane.drafter),
        "text": lane.text.strip(),
        "seconds": round(lane.seconds, 6),
        "ends": [round(end, 6) for end in lane.pass_ends],
        "emitted": emitted,
        "shares": [round(part / total, 2) if total else 0.5 for part in (stats.draft_seconds, stats.verify_seconds)],
        "trees": [{name: _rounded(value) for name, value in asdict(step).items()} for step in lane.steps],
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, _DIGITS) if isinstance(value, float) else value


@dataclass
class Race:
    """Answers of one or several methods to one request. The comparison is set when the first run is complete.

    Attributes:
        lanes: an answer per method, of the first run, later of the run with median time among ``runs``; no answers or
            empty answers in the queue.
        equal, difference: whether the tokens of all lanes are equal, and their first difference.
        ahead: number of requests ahead in the queue; None while running.
    """

    lanes: list[StreamedAnswer]
    equal: bool | None = None
    difference: Difference | None = None
    ahead: int | None = None
    runs: int = 0

    @property
    def finished(self) -> bool:
        return self.equal is not None

    @property
    def baseline(self) -> StreamedAnswer:
        """Baseline lane: plain decoding if it takes part, else the slowest lane."""
        return max(self.lanes, key=lambda lane: (lane.drafter == PLAIN, lane.seconds))

    @property
    def fastest(self) -> StreamedAnswer:
        return min((lane for lane in self.lanes if lane is not self.baseline), key=lambda lane: lane.seconds)

    def speedup(self, lane: StreamedAnswer) -> float:
        """Seconds of the baseline over seconds of a lane, image preprocessing and prefill included."""
        return self.baseline.seconds / lane.seconds

    @property
    def pays(self) -> bool:
        """Whether the fastest lane is faster than the baseline beyond noise (``AS_FAST``)."""
        return self.speedup(self.fastest) > AS_FAST

    def decode_speedup(self, lane: StreamedAnswer) -> float | None:
        """Speedup of the decode phase; None for answers of one token."""
        assert lane.stats is not None
        assert self.baseline.stats is not None
        slow, fast = self.baseline.stats.tokens_per_second, lane.stats.tokens_per_second
        return fast / slow if slow and fast else None


def race(loaded: LoadedModel, methods: Sequence[str], request: Mapping[str, Any]) -> Iterator[Race]:
    """Answer a request with several methods ``RUNS`` times; the lanes become each method's median run.

    Runs are interleaved: each method answers alone, once per run, so that methods do not slow each other down and load
    on the machine affects all. The caller must prevent other decoding. All methods are warmed up first, and the first
    run is streamed. Raises ``UserError``: two methods are the same drafter, or one cannot be made for this model.
    """
    pipes = warmed_up(loaded, methods, request)
    result = Race([StreamedAnswer(loaded.name, name) for name in pipes])
    runs: list[list[StreamedAnswer]] = []
    while len(runs) < RUNS:
        lanes: list[StreamedAnswer] = []
        for number, (name, pipe) in enumerate(pipes.items()):
            shown = -inf
            for answer in stream_answer(pipe, name, request):
                if not runs:
                    result.lanes[number] = answer
                if clock() >= shown + _PAUSES[bool(runs)]:
                    yield result
                    shown = clock()
            lanes.append(answer)
        runs.append(lanes)
        if len(runs) % 2:  # only an odd number of runs has a median run
            by_time = (sorted(answers, key=lambda answer: answer.seconds) for answers in zip(*runs, strict=True))
            result.lanes = [answers[len(answers) // 2] for answers in by_time]
            result.runs = len(runs)
        if result.equal is not False:
            first, *others = [lane.token_ids for run in runs for lane in run]
            unequal = next((tokens for tokens in others if tokens != first), None)
            result.equal = unequal is None
            if unequal is not None:
                result.difference = first_difference(loaded.open(PLAIN), request, request, unequal, first)
        yield result


def warmed_up(loaded: LoadedModel, methods: Sequence[str], request: Mapping[str, Any]) -> dict[str, Pipeline]:
    """Warmed-up pipelines by resolved method, which must be distinct."""
    pipes: dict[str, Pipeline] = {}
    for method in methods:
        pipe = loaded.pipeline(method)
        name = resolved(method, pipe)
        if name in pipes:
            raise UserError(f"a race compares different methods: got {name} twice, as {method!r} is {name}")
        pipes[name] = pipe
    for pipe in pipes.values():
        pipe.generate(**{**request, "max_new_tokens": min(_WARM_UP, request["max_new_tokens"])})
    return pipes
