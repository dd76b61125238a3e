"""Cases of ``mmspec check``: requests that a faulty speculative decoder would answer differently; runs all cases."""

from __future__ import annotations

import base64
import io
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from time import monotonic
from typing import Any

import torch
from transformers import LogitsProcessorList

from mmspec.checking.sides import Answer, LocalSide, Question, SkippedError
from mmspec.checking.statistics import ALPHA, COLD, POWER, against_logprobs, against_probabilities, two_samples
from mmspec.checking.trial import NowAndThen, Trial
from mmspec.compare import next_token_scores
from mmspec.core.drafter import Drafter
from mmspec.errors import UserError, first_line
from mmspec.pipeline import Pipeline
from mmspec.progress import Show
from mmspec.sampling.defaults import LIBRARYS


@dataclass(frozen=True)
class Case:
    """A test case; ``run`` sends requests and records results, or raises ``SkippedError``."""

    name: str
    proves: str
    run: Callable[[Trial], None]


CASES: dict[str, Case] = {}


def case(name: str, proves: str) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    def register(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
        CASES[name] = Case(name, proves, run)
        return run

    return register


_NOTICE = (
    "The library opens at nine and closes at six. Books are lent for four weeks. Maps are lent for four weeks. "
    "Films are lent for one week. The library opens at nine on weekdays and closes at six on weekdays."
)
_COPY = f"Repeat this text word for word:\n{_NOTICE}"
_STORY = "Tell a short story about a fox who meets a crow in winter."
_CODE = "Write a Python function that returns the n-th Fibonacci number, with a docstring and an example."
_LIST = "List twelve fruits as a numbered list, one on each line."
_RAIN = "Explain in a few sentences how rain forms."
_COUNT = "Count from 1 to 30, separated by commas."
_SQL = "Write an SQL query that counts the orders of each customer in the table orders."
_POEM = "Write four lines about the sea."
_EIGHT = (_STORY, _CODE, _LIST, _COPY, _RAIN, _COUNT, _SQL, _POEM)
_TOSSES = "Go on with these tosses of a coin at random: heads, tails, heads, heads, tails, tails, heads, tails, tails,"
_IMAGE = "Describe the image in detail."
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
_TOOL = (
    '[{"type": "function", "function": {"name": "get_weather", "description": "The weather of a city today.", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]'
)
_LONGEST_CONTEXT = 4096  # maximum context length in tokens that a prompt is generated to fill
_SAMPLED, _TOP_K = 4, 3  # tokens per answer and candidates per token, for enumeration of all sequences
_DRAWS, _FEWEST_DRAWS, _AT_ONCE, _DRAW_SECONDS = 2048, 256, 32, 40.0
_SERVER_DRAWS, _SERVER_AT_ONCE = 320, 8
_NEUTRAL: dict[str, Any] = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # not a model's, as in GGUF files
_CANDIDATES, _LONGEST_DRAW = 20, 300.0  # candidates per token of longer answers; maximum seconds of sampling


def _same(trial: Trial, asked: Sequence[Question]) -> None:
    trial.same(*asked)


for _name, _proves, _lengths in (
    ("prose", "Continuous text has the same tokens as plain decoding.", {_STORY: 48, _RAIN: 48}),
    ("code", "Code, which is highly predictable, has the same tokens as plain decoding.", {_CODE: 64, _SQL: 48}),
    ("list", "A list with a repeated line pattern has the same tokens as plain decoding.", {_LIST: 48, _COUNT: 64}),
    ("copy", "Long accepted drafts, of text copied from the prompt, leave a correct state.", {_COPY: 96}),
):
    _asked = [Question.user(text, max_tokens=most) for text, most in _lengths.items()]
    case(_name, _proves)(partial(_same, asked=_asked))


@case("rehearsed", "Drafts with a correct beginning are rejected from the first wrong token on, at every depth.")
def _rehearsed(trial: Trial) -> None:
    for text in (_STORY, _LIST, _COPY):
        question = Question.user(text, max_tokens=64)
        trial.compare(question, [trial.rehearsed(question)])


@case("now-and-then", "With alternating drafted and plain steps, accepted drafts leave the state of plain decoding.")
def _now_and_then(trial: Trial) -> None:
    trial.same(Question.user(_COPY), Question.user(_LIST), side=trial.variant(NowAndThen))


@case("tree-sizes", "Trees of all sizes, chains, and sizes chosen for speed give the same tokens.")
def _tree_sizes(trial: Trial) -> None:
    def chain(drafter: Drafter) -> Drafter:
        drafter.draft_chains(7)
        return drafter

    sides = [trial.variant(size=size) for size in (1, 3, 32, None)]
    try:
        sides.append(trial.variant(chain, size=7))
    except ValueError as error:
        trial.note(str(error))
    for side in sides:
        trial.same(Question.user(_COPY), Question.user(_CODE), side=side)


@case("prefix", "A prompt with a cached prefix, or a repeated prompt, gets the same answer as without the cache.")
def _prefix(trial: Trial) -> None:
    side = trial.caching()
    first, longer = Question.user(_COPY), Question.user(f"{_COPY} The library is closed in August.")
    for group in ([first], [first], [longer], [first], [longer, first, Question.user(f"{_COPY} It has a garden.")]):
        trial.same(*group, side=side, together=True)
    ((last,),) = trial.ask(first, side=side)
    if not last.cached:
        trial.note("no prefix was kept")


@case("sessions", "Concurrent turns of several conversations with cached prefixes do not mix.")
def _sessions(trial: Trial) -> None:
    side = trial.caching()
    questions = [Question.user(text, max_tokens=32) for text in (_COPY, _LIST, _STORY)]
    for following in ("Go on.", "Repeat your last answer word for word.", "Say it once more."):
        answers = trial.same(*questions, side=side, together=True)
        turn = Question.user(following, max_tokens=32)
        questions = [question.then(one.text, turn) for question, one in zip(questions, answers, strict=True)]


@case("abort", "An aborted stream affects neither a concurrent request nor a repetition of its request.")
def _abort(trial: Trial) -> None:
    side = trial.caching()
    aborted = Question.user(_COPY, min_tokens=96, max_tokens=112)  # long enough to be still running when aborted
    other = Question.user(_LIST, max_tokens=64)
    expected = trial.expect(other)[0]
    for pieces in (1, 3):
        streams = [iter(side.stream(question)) for question in (aborted, other)]
        parts = [part for _, part in zip(range(pieces), zip(*streams, strict=False), strict=False)]
        streams[0].close()  # type: ignore[attr-defined]
        rest = [*(second for _, second in parts), *streams[1]]
        tokens = tuple(token for part in rest for token in part.tokens or ())
        text, reason = "".join(part.text for part in rest), "".join(part.finish_reason for part in rest)
        trial.compare(other, [replace(expected, text=text, finish_reason=reason, tokens=tokens or None)])
        trial.same(aborted, side=side)


@case("batch", "Eight concurrent requests get the same answers as alone.")
def _batch(trial: Trial) -> None:
    lengths = (48, 64, 32, 48, 24, 64, 40, 16)
    trial.same(
        *(Question.user(text, max_tokens=length) for text, length in zip(_EIGHT, lengths, strict=True)), together=True
    )


@case("choices", "Choices of one request are independent: with a seed, each equals the answer to its own seed.")
def _choices(trial: Trial) -> None:
    greedy = Question.user(_LIST, max_tokens=24, n=2)
    trial.compare(greedy, trial.ask(greedy)[0])
    question = Question.user(_STORY, max_tokens=16, n=4, temperature=1.0, seed=11, top_logprobs=0)
    (found,) = trial.ask(question)
    logprob = sum(step[1] for step in found[0].steps) if found[0].steps else -1e3
    same = len({one.text for one in found}) == 1 and (len(found) - 1) * logprob < log(ALPHA)
    trial.require(not same, question, f"all choices are the same, which has the probability e^{3 * logprob:.0f}")
    trial.record.power = {"choices all the same": float((question.n - 1) * logprob < log(ALPHA))}
    question = replace(question, top_logprobs=None)
    if not trial.is_local:
        return
    pairs = [(one, trial.expect(replace(question, n=1, seed=11 + i))[0]) for i, one in enumerate(found)]
    others = [Question.user(text, max_tokens=16, temperature=1.0, seed=5) for text in _EIGHT]
    pairs += [(one, trial.expect(asked)[0]) for (one,), asked in zip(trial.ask(*others), others, strict=True)]
    unequal = sum(one.tokens != own.tokens for one, own in pairs)
    trial.record.tokens += sum(own.length for one, own in pairs if one.tokens == own.tokens)
    # Rounding decides draws at the boundary of two tokens: in float32, about one answer in a thousand.
    allowed = 1 if trial.bound < 1e-3 else len(pairs) // 2
    text = f"{unequal} of {len(pairs)} answers with a seed differ, at most {allowed} by rounding"
    trial.require(unequal <= allowed, question, text)
    if 0 < unequal <= allowed:
        trial.note(text)


@case("logprobs", "Log probabilities, also of accepted drafts, equal plain decoding's.")
def _logprobs(trial: Trial) -> None:
    for text in (_COPY, _STORY):
        trial.same(Question.user(text, max_tokens=32, top_logprobs=5), rehearse=True)


@case("min-tokens", "Answers have their minimum length, even if drafts end earlier, and end at a stop string.")
def _min_tokens(trial: Trial) -> None:
    for text in ("Say yes.", "What is 2 + 2? Answer with one number.", _COPY, _RAIN, _POEM):
        plain = Question.user(text, max_tokens=96)
        answer = trial.expect(plain)[0]
        if answer.finish_reason == "stop":
            break
    else:
        raise SkippedError("no answer ended within 96 tokens")
    least = answer.length + 6
    question = replace(plain, min_tokens=least, max_tokens=least + 10)
    (own,) = trial.same(question, rehearse=True)
    trial.require(own.length >= least or not trial.is_local, question, f"plain decoding ends after {own.length} tokens")
    if own.length < least:
        raise SkippedError("the other server ignores min_tokens")
    if len(stops := _stops(own.text)) > 0:
        trial.same(replace(question, stop=stops[0]), rehearse=True)


@case("stop-string", "An answer ends before a stop string within an accepted draft.")
def _stop_string(trial: Trial) -> None:
    for text in (_COPY, _CODE, _COUNT):
        plain = Question.user(text, max_tokens=64)
        whole = trial.expect(plain)[0].text
        for stop in _stops(whole):
            question = replace(plain, stop=stop)
            (own,) = trial.same(question, rehearse=True)
            if own.text.strip() != whole[: whole.find(stop)].strip():
                trial.note(f"the reference does not stop before {stop!r}")


def _stops(text: str) -> list[str]:
    """Substrings from the middle of an answer that do not occur earlier in it, for use as stop strings."""
    places = (len(text) * share // 8 for share in (2, 4, 5, 6))
    found = (text[place : place + 4] for place in places)
    return list(dict.fromkeys(stop for stop in found if len(stop) == 4 and stop.strip() and "\ufffd" not in stop))


@case("markers", "Reasoning and tool-call markers within a draft take effect.")
def _markers(trial: Trial) -> None:
    if trial.is_local and not any(marker in trial.pipe.processor.chat_template_text() for marker in _MARKERS):
        raise SkippedError("the chat template has no markers of reasoning or of tool calls")
    weather = Question.user("What is the weather in Paris today? Call the function.", tools=_TOOL, max_tokens=96)
    trial.same(weather, Question.user("Is 91 a prime number? Think step by step.", max_tokens=96), rehearse=True)


@case("context-limit", "An answer ends at the context limit, also within an accepted draft.")
def _context_limit(trial: Trial) -> None:
    question = Question.user(_COPY, max_tokens=None)
    if trial.is_local:
        whole, prompt = trial.expect(replace(question, max_tokens=48))[0].length, trial.tested.count(question)
        for room in (room for room in (1, 2, 3, 5, 8) if room < whole):
            limited = trial.limited(prompt + room)
            limited.same(question, rehearse=True)
            for found in (limited.ask(question)[0][0], limited.rehearsed(question), limited.expect(question)[0]):
                text = f"prompt and answer have {prompt + found.length} tokens, the context {prompt + room}"
                trial.require(found.length == room, question, text)
    limits = [side.limit for side in (trial.tested, trial.references[0]) if side.limit is not None]
    if limits and min(limits) <= _LONGEST_CONTEXT:
        trial.same(_filling(trial, min(limits), 20), rehearse=True)
    elif not trial.is_local:
        raise SkippedError(f"the context is not known, or longer than {_LONGEST_CONTEXT} tokens")


def _filling(trial: Trial, limit: int, room: int) -> Question:
    """A question that leaves about ``room`` tokens of the context."""
    line = "nine ten one two three four five six seven eight "
    few, more = (trial.tested.count(Question.user(f"{_COUNT}\n{line * count}")) for count in (1, 11))
    count = max(int(10 * (limit - room - few) / (more - few)) + 1, 1)
    return Question.user(f"{_COUNT}\n{line * count}", max_tokens=None)


@case("image-large", "A large image gets the same answer as in plain decoding.")
def _image_large(trial: Trial) -> None:
    trial.same(Question.user(_IMAGE, _images(trial)[0]), rehearse=True)


@case("images-two", "Two images are not swapped, also in a batch with other requests.")
def _images_two(trial: Trial) -> None:
    first, second = _images(trial)[:2]
    questions = [Question.user(_IMAGE, first, second), Question.user(_IMAGE, second), Question.user(_LIST)]
    trial.same(*questions, together=True)
    trial.same(questions[0], rehearse=True)


@case("image-turns", "An image in the second turn is seen, also after equal text about another image.")
def _image_turns(trial: Trial) -> None:
    side, (first, second) = trial.caching(), _images(trial)[:2]
    for image in (first, second, first):
        question = Question.user("Look at the next image.", max_tokens=8)
        answer = trial.same(question, side=side)[0]
        following = Question.user(_IMAGE, image, max_tokens=32)
        turn = question.then(answer.text, following)
        answer = trial.same(turn, side=side)[0]
        trial.same(turn.then(answer.text, Question.user("What else is in it?", max_tokens=24)), side=side)


def _images(trial: Trial) -> list[str]:
    """At least two images: the user's images, then drawings. The first is large unless it is the user's."""
    if trial.is_local and not trial.pipe.processor.reads_media:
        raise SkippedError("the model reads text only")
    return [*trial.images, _drawing(1, 1344, 896), _drawing(2, 448, 336)]


def _drawing(seed: int, width: int, height: int) -> str:
    """Draw coloured shapes; returns the data URI of a PNG file."""
    from PIL import Image, ImageDraw

    rng, image = random.Random(seed), Image.new("RGB", (width, height), "white")
    draw, size = ImageDraw.Draw(image), height // 3
    for place in rng.sample(range(9), 4):
        x, y = width * (place % 3) // 3, height * (place // 3) // 3
        shape = rng.choice((draw.ellipse, draw.rectangle))
        shape(
            (x + size // 8, y + size // 8, x + size * 7 // 8, y + size * 7 // 8), rng.choice(("red", "blue", "green"))
        )
    file = io.BytesIO()
    image.save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@case("adapters", "Switching LoRA adapters leaves no effect of the previous adapter.")
def _adapters(trial: Trial) -> None:
    sides = (trial.tested, trial.references[0])
    names = [name for name in sides[0].adapters if name in sides[1].adapters][:3]
    if not names:
        raise SkippedError("there are no adapters")
    side, unused = trial.caching(), set(names)
    for number, text in enumerate(_EIGHT):
        if number < 2 or unused:
            questions = {name: Question.user(text, max_tokens=32, adapter=name) for name in (None, *names)}
            asked = [*questions.values()] * (2 if number < 2 else 1)
            answers = [trial.same(question, side=side, rehearse=True)[0] for question in asked]
            unused -= {name for name, one in zip(questions, answers, strict=False) if one.text != answers[0].text}
    if unused:
        raise SkippedError(
            f"cannot tell whether {', '.join(sorted(unused))} is used: it changes none of {number + 1} answers"
        )


@case("temperature", "Tokens are sampled at the requested temperature, according to their log probabilities.")
def _temperature(trial: Trial) -> None:
    side = trial.variant(source=LIBRARYS) if trial.is_local else trial.tested
    fields = {"temperature": 1.0, "top_k": _CANDIDATES, "top_logprobs": _CANDIDATES, **_NEUTRAL}
    questions = [Question.user(text, **fields) for text in (_TOSSES, *_EIGHT)] * (4 if trial.is_local else 1)

    def sample(ask: Callable[..., list[list[Answer]]]) -> tuple[float, float, list[tuple[float, list[float]]]]:
        """P-value, power, and log probabilities of sampled tokens and of all candidates, most probable first."""
        drawn: list[tuple[float, list[float]]] = []
        power, start = 0.0, monotonic()
        while power < POWER and monotonic() - start < _LONGEST_DRAW:
            found = ask(*(replace(one, seed=len(drawn) + place) for place, one in enumerate(questions)))
            steps = [step for choices in found for one in choices[:1] for step in one.steps]
            if min((len(top) for _, _, top in steps), default=0) < _CANDIDATES:
                raise SkippedError(f"needs {_CANDIDATES} log probabilities in the place of each token")
            drawn += [(p, sorted((one for _, one in top), reverse=True)[:_CANDIDATES]) for _, p, top in steps]
            p, power = against_logprobs(drawn)
        return p, power, drawn

    p, power, drawn = sample(partial(trial.ask, side=side))
    plain = trial.references[0]
    if p < ALPHA and not trial.is_local and sample(plain.ask)[0] < 0.01:  # because of default penalties, for example
        raise SkippedError(f"{plain.name} does not sample from the log probabilities that it reports")
    _report(trial, questions[0], p, {f"temperature {COLD} for 1": power}, len(drawn))
    answers = trial.ask(questions[0], side=side)[0][:1] + trial.expect(questions[0])[:1]
    tops = [sorted((p for _, p in one.steps[0][2]), reverse=True)[:_CANDIDATES] for one in answers if one.steps]
    if len(tops) == 2:  # log probabilities may include the temperature
        error = max(abs(one - own) for one, own in zip(*tops, strict=False))
        trial.require(error <= max(trial.bound, 1e-3), questions[0], f"first log probabilities differ by {error:.3g}")


@case("sampling", "Sampled answers follow the model's distribution.")
def _sampling(trial: Trial) -> None:
    question = Question.user(_TOSSES, max_tokens=_SAMPLED, temperature=1.0, top_k=_TOP_K, top_p=1.0)
    if trial.is_local:
        return _enumerate(trial, question)
    asked, rounds = [replace(question, **_NEUTRAL)] * _SERVER_AT_ONCE, range(_SERVER_DRAWS // _SERVER_AT_ONCE)
    asks: tuple[Callable[..., list[list[Answer]]], ...] = (trial.ask, trial.references[0].ask)
    samples = [[choices[0].text for _ in rounds for choices in ask(*asked)] for ask in asks]
    p, distance = two_samples(samples[0], samples[1])
    _report(trial, question, p, {f"total variation {distance:.2f}": POWER}, len(samples[0]) * _SAMPLED)


def _enumerate(trial: Trial, question: Question) -> None:
    """Compare samples with the probabilities of all sequences, computed from plain decoding's scores. Half of the
    answers use the user's drafter, half use the most probable answer as draft."""
    outcomes = Outcomes(trial.pipe, question, trial.bound)
    best = max((one for one in outcomes.probs if OTHER not in one), key=lambda one: outcomes.probs[one])
    sides = [trial.tested, trial.known([best] * _AT_ONCE)]
    counts: Counter[tuple[int, ...]] = Counter()
    start = monotonic()
    for number in range(_DRAWS // _AT_ONCE):
        seeds = range(1000 + number * _AT_ONCE, 1000 + (number + 1) * _AT_ONCE)
        found = trial.ask(*(replace(question, seed=seed) for seed in seeds), side=sides[number % 2])
        counts.update(outcomes.of(one.tokens or ()) for (one,) in found)
        if sum(counts.values()) >= _FEWEST_DRAWS and monotonic() - start > _DRAW_SECONDS:
            break
    p, distance = against_probabilities(counts, outcomes.probs)
    _report(trial, question, p, {f"total variation {distance:.2f}": POWER}, sum(counts.values()) * _SAMPLED)


OTHER = -1  # last token of an outcome: the least probable candidate, or a token that rounding may swap with it


class Outcomes:
    """All possible answers to a question with few tokens and candidates, with their probabilities. ``bound``: if the
    least probable candidate's logit exceeds the next token's logit by at most this, rounding decides which of the two
    is a candidate, and answers that continue with either are merged into one outcome."""

    def __init__(self, pipe: Pipeline, question: Question, bound: float) -> None:
        params, prompt = pipe.defaults.complete(question.params()), pipe.encode([LocalSide(pipe).request(question)])
        processors = pipe.defaults.processors(params, prompt.input_ids)
        self._candidates: dict[tuple[int, ...], dict[int, float]] = {}
        self.probs: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(question.max_tokens or 0):
            longer: dict[tuple[int, ...], float] = {}
            for tokens, probability in self.probs.items():
                if tokens[-1:] == (OTHER,) or (tokens and tokens[-1] in pipe.target.eos_token_ids):
                    longer[tokens] = probability
                    continue
                logits = next_token_scores(pipe.target, prompt, tokens, LogitsProcessorList())
                history = torch.tensor(
                    [prompt.input_ids[0].tolist() + list(tokens)], dtype=torch.long, device=logits.device
                )
                scores = processors(history, logits[None].clone())[0].double().softmax(-1)  # type: ignore[arg-type]
                kept = scores > 0
                found = {token: float(scores[token]) for token in kept.nonzero().flatten().tolist()}
                if logits[kept].min() - logits.masked_fill(kept, -torch.inf).max() <= bound:
                    found[OTHER] = found.pop(min(found, key=lambda token: float(logits[token])))
                self._candidates[tokens] = found
                longer |= {(*tokens, token): probability * share for token, share in found.items()}
            self.probs = longer

    def of(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        """The outcome of an answer; the answer itself if its probability is zero."""
        for place, token in enumerate(answer):
            found = self._candidates[answer[:place]]
            if token not in found:
                return (*answer[:place], OTHER) if OTHER in found else answer
        return answer


def _report(trial: Trial, question: Question, p: float, power: dict[str, float], tokens: int) -> None:
    trial.record.sampling, trial.record.power = {"p": p, "alpha": ALPHA, "tokens": tokens}, power
    trial.record.tokens += tokens
    trial.note(f"p = {p:.3g} of {tokens} sampled tokens")
    trial.require(p >= ALPHA, question, f"p = {p:.3g} < {ALPHA:g} that answers follow the distribution")


OUTCOMES = ("equal", "tie", "different", "skipped", "failed")
FAILING = ("different", "failed")  # outcomes that fail a check


def chosen(names: str | None) -> list[str]:
    """Parse a comma-separated list of case names; None selects all cases. Raises ``UserError``: a case is unknown."""
    asked = list(CASES) if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in asked if name not in CASES]:
        raise UserError(f"cases must be of {', '.join(CASES)}: got {unknown[0]}")
    return [name for name in CASES if name in asked]


def run_case(trial: Trial, name: str) -> dict[str, Any]:
    """Run a case; the outcome is of ``OUTCOMES``: "tie" if all differences are within rounding, "skipped" or "failed"
    with the reason."""
    start, reason = monotonic(), ""
    trial.begin()
    try:
        CASES[name].run(trial)
        outcome = None
    except SkippedError as error:
        outcome, reason = "skipped", str(error)
    except Exception as error:
        outcome, reason = "failed", f"{type(error).__name__}: {first_line(error)}"
    record = trial.end()
    found = record.outcome(trial.bound)
    return {
        "name": name,
        "outcome": found if outcome is None or found == "different" else outcome,
        "reason": reason,
        "seconds": round(monotonic() - start, 3),
        **{field: value for field, value in vars(record).items() if value or field != "sampling"},
        "notes": list(record.notes),
    }


def run_cases(
    names: Sequence[str], trial: Trial, done: Mapping[str, dict[str, Any]], show: Show
) -> Iterator[list[dict[str, Any]]]:
    """Run all cases not in ``done``; after each case, yields all results so far, including earlier runs."""
    found = dict(done)
    for number, name in enumerate(names):
        show(number, len(names), part=name)
        if name not in found:
            found[name] = run_case(trial, name)
            yield [found[one] for one in CASES if one in found]
    show(len(names), len(names))
    yield [found[one] for one in CASES if one in found]


def summary(cases: Sequence[Mapping[str, Any]]) -> str:
    counts = {outcome: sum(one["outcome"] == outcome for one in cases) for outcome in OUTCOMES}
    shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    tokens, own = sum(one["tokens"] for one in cases), [one["accepted"] for one in cases if one["accepted"] is not None]
    drafts = f"{sum(own)} accepted drafts" if own else "an unknown number of accepted drafts"
    line = f"{shown}: {tokens} tokens compared, {drafts}"
    if own and not sum(own):
        line += "; the drafter's drafts were never accepted, which proves little about them"
    return line
