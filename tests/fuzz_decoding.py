"""Differential fuzzing of decoding: `python -m tests.fuzz_decoding`.

A case is drawn from a seed and its number. There are two kinds:

- a call of ``mmspec.generate`` on a tiny random model in float32, compared with transformers' ``generate`` or, when
  sampling, with plain decoding from the same seed;
- requests that decode together on an embedded model, whole, as streams or cancelled, in threads of one pipeline,
  with drafts or without, of measured size or of a fixed one, trees or chains, of one drafter or of two, compared with
  the same request alone in plain decoding, and in greedy float32 with transformers' ``generate``, too.

Tokens must be equal. Differences are printed with the command that runs their case alone, and fail the command.
"""

from __future__ import annotations

import json
import random
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import count as numbers
from typing import Any

import click
import torch
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

import mmspec
from mmspec import plugins
from mmspec.core.drafter import Drafter
from mmspec.drafters.registry import make_drafter as make
from mmspec.drafters.union import per_sequence
from mmspec.errors import UserError
from mmspec.vision.embedded import samples
from tests.tiny.cases import (
    DRAFTERS,
    DRAFTERS_WITH_WEIGHTS,
    MODELS,
    SETTINGS,
    Case,
    build_model,
    case_inputs,
    generate,
    make_drafter,
)
from tests.tiny.configs import VISION_CONFIGS

NEW = 16
PADDING = "attention_mask must have padding before tokens only"
"""How a message begins that refuses padding which windows and chunks count: no difference."""
LOOPS = "single layers need a decoder that runs each once"
"""The same for drafters of a target's layers where these run several times."""

QUESTIONS = ("Describe the image.", "What is on the left?", "How many objects are there?")
TEXTS = ("Work out: 37 + 48", "Tell a story about a cat.", "Work out: 5 + 6", "Work out: 37 + 49")
EMBEDDED = {
    "tiny-llava": (None, "auto", "msd", "ngram", "recycle", "auto+ngram", "ngram@chain", "msd@chain"),
    "tiny-hybrid": (None, "auto", "mamba", "ngram", "recycle", "ngram+recycle", "ngram@chain", "suffix"),
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": r"(yes|no), (the|a) [a-z]{2,6}\."},
    {"json_schema": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}},
)


class Drifting(LogitsProcessor):
    """A processor that mmspec does not know: raises other scores at each length."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = torch.arange(scores.shape[-1], device=scores.device)
        return scores + ((place * 7 + input_ids.shape[1] * 3) % 5).to(scores.dtype)


class Sums(StoppingCriteria):
    """Ends a row where its last two tokens add up to a multiple of seven."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] + input_ids[:, -2]) % 7 == 0


@dataclass(frozen=True)
class Hooked:
    """A call of ``mmspec.generate``; ``case`` names model, inputs and drafter.

    ``padding`` is a range of slots of the last row that the mask leaves out; ``processor`` and ``criterion`` add this
    file's to the options of ``generate``.
    """

    case: Case
    nodes: int
    options: dict[str, Any]
    padding: tuple[int, int] | None
    processor: bool
    criterion: bool


@dataclass(frozen=True)
class Request:
    """``keywords`` of ``Pipeline.generate``; ``pieces`` are read of its stream: 0 asks for the whole answer, -1 for the
    whole stream; after others it is cancelled. ``other`` asks for the case's second drafter."""

    prompt: str
    pieces: int
    keywords: dict[str, Any]
    other: bool


@dataclass(frozen=True)
class Together:
    """Requests to one pipeline at once."""

    model: str
    dtype: str
    drafter: str | None
    second: str
    prefix_cache: int
    requests: tuple[Request, ...]


def drawn(seed: int, number: int) -> Hooked | Together:
    """Case ``number`` of a seed."""
    rng = random.Random(f"{seed} {number}")
    return _drawn_call(rng) if rng.random() < 0.7 else _drawn_requests(rng)


def _drawn_call(rng: random.Random) -> Hooked:
    model = rng.choice(MODELS)
    weights = DRAFTERS_WITH_WEIGHTS if model in (*VISION_CONFIGS, "llama", "bamba") else ()
    images, batch = (
        (rng.choice((0, 1, 2)), rng.choice((1, 2, 3))) if model in VISION_CONFIGS else (0, rng.randint(1, 4))
    )
    length = 8 if model in VISION_CONFIGS else rng.choice((5, 9, 14, 23))
    setting = rng.choice(("greedy", "greedy", "sampled", "sampled-filtered"))
    case = Case(model, batch, images, length, rng.randrange(1000), setting, rng.choice((*DRAFTERS, *weights)))
    some: dict[str, Any] = {
        "repetition_penalty": rng.choice((0.8, 1.3)),
        "no_repeat_ngram_size": rng.choice((1, 2, 3)),
        "min_new_tokens": rng.randint(1, NEW),
        "suppress_tokens": rng.sample(range(3, 90), 20),
        "bad_words_ids": [[rng.randrange(3, 90)], [rng.randrange(3, 90), rng.randrange(3, 90)]],
        "sequence_bias": [[[rng.randrange(3, 90)], 4.0]],
    }
    options = {name: value for name, value in some.items() if rng.random() < 0.2}
    options["eos_token_id"] = rng.choice((None, 2, rng.sample(range(3, 90), 6)))
    if options["eos_token_id"] is None:
        options.pop("min_new_tokens", None)
    padding = None
    if model not in VISION_CONFIGS and batch < 4 and rng.random() < 0.2:
        start = rng.randrange(batch, length)
        padding = (start, rng.randint(start + 1, length))
    return Hooked(case, rng.choice((0, 1, 3, 6, 12)), options, padding, rng.random() < 0.15, rng.random() < 0.25)


def _drawn_requests(rng: random.Random) -> Together:
    model = rng.choice(list(EMBEDDED))
    requests = []
    sizes = rng.choice(((None, 0), (None, None, 0), (0, 2, 5, 12), (None, 0, 1, 9, 64)))
    for _ in range(rng.randint(1, 8)):
        keywords: dict[str, Any] = {"max_new_tokens": rng.randint(1, 40), "nodes": rng.choice(sizes)}
        if rng.random() < 0.4:
            keywords |= {"temperature": rng.choice((0.5, 1.0, 1.6)), "seed": rng.randrange(99)}
            keywords |= rng.choice(({}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}))
        keywords |= rng.choice(
            ({}, {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0}, {"stop": ["a", " 4"]}, *GRAMMARS)
        )
        if model == "tiny-llava" and rng.random() < 0.7:
            keywords["images"] = [str(samples() / "scene.png")]
        pieces = rng.choice((0, 0, -1, 1, 3))
        prompt = rng.choice(QUESTIONS if model == "tiny-llava" else TEXTS)
        requests.append(Request(prompt, pieces, keywords, rng.random() < 0.15))
    # Recurrent layers sum in another order along trees: their rounding in bfloat16 differs.
    dtype = rng.choice(("float32", "float32", *(("bfloat16", "int8", "int4") if model == "tiny-llava" else ())))
    drafters = rng.choice(EMBEDDED[model]), rng.choice(EMBEDDED[model][1:])
    return Together(model, dtype, *drafters, rng.choice((0, 1 << 26)), tuple(requests))


def difference(case: Hooked | Together) -> str | None:
    """How the outputs of a case differ; None if they are equal."""
    return _call_differs(case) if isinstance(case, Hooked) else _requests_differ(case)


_model = cache(build_model)


def _call_differs(one: Hooked) -> str | None:
    case, model = one.case, _model(one.case.model)
    inputs = case_inputs(case)
    if one.padding is not None:
        inputs["attention_mask"][-1, slice(*one.padding)] = 0
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **SETTINGS[case.setting], **one.options}
    options["logits_processor"] = [Drifting()] if one.processor else []
    if one.criterion:
        options["stopping_criteria"] = StoppingCriteriaList([Sums()])

    def ours(drafter: Drafter | None) -> torch.Tensor:
        torch.manual_seed(case.seed)
        tokens = mmspec.generate(model, drafter=drafter, nodes=one.nodes, **inputs, **options)
        assert isinstance(tokens, torch.Tensor)
        return tokens

    with torch.no_grad():
        try:
            expected = ours(None) if options["do_sample"] else generate(model, case.batch, **inputs, **options)
            received = ours(make_drafter(model, case, expected[:, inputs["input_ids"].shape[1] :].tolist()))
        except UserError as error:
            expects = (LOOPS, PADDING) if one.padding is not None else LOOPS
            return None if str(error).startswith(expects) else f"refused: {error}"
    if torch.equal(received, expected):
        return None
    return f"plain: {expected.tolist()}; speculative: {received.tolist()}"


@cache
def _pipeline(model: str, drafter: str | None, dtype: str, prefix_cache: int) -> mmspec.Pipeline:
    return mmspec.load(model, drafter, dtype=dtype, prefix_cache=prefix_cache)


@cache
def _second_pipeline(model: str, second: str, *first: Any) -> mmspec.Pipeline:
    """Of another drafter over the target of ``_pipeline``, as the server has them."""
    pipe, drafter = _pipeline(model, *first), make(second, plugins.model_path(model))
    return mmspec.Pipeline(pipe.target, pipe.io, per_sequence(drafter), generation_config=pipe.generation_config)


def _answer(pipe: mmspec.Pipeline, request: Request) -> tuple[list[int], bool]:
    """New tokens, and whether the answer is whole."""
    if request.pieces == 0:
        return pipe.generate(request.prompt, **request.keywords).token_ids, True
    tokens: list[int] = []
    stream = pipe.stream(request.prompt, **request.keywords)
    for number, piece in enumerate(stream, 1):
        tokens += piece.token_ids
        if number == request.pieces and piece.finish_reason is None:
            stream.close()  # type: ignore[attr-defined]
            return tokens, False
    return tokens, True


def _requests_differ(case: Together) -> str | None:
    plain = _pipeline(case.model, None, case.dtype, 0)
    first = case.drafter, case.dtype, case.prefix_cache
    pipes = _pipeline(case.model, *first), _second_pipeline(case.model, case.second, *first)
    with ThreadPoolExecutor(len(case.requests)) as pool:
        received = list(pool.map(lambda request: _answer(pipes[request.other], request), case.requests))
    for number, (request, (tokens, whole)) in enumerate(zip(case.requests, received, strict=True)):
        expected = plain.generate(request.prompt, **request.keywords).token_ids
        if tokens != (expected if whole else expected[: len(tokens)]):
            return f"request {number}: alone {expected}; together {tokens}"
        if case.dtype == "float32" and not request.keywords.keys() - {"max_new_tokens", "nodes", "images"}:
            prompt = plain.encode([{"prompt": request.prompt, "images": request.keywords.get("images")}])
            inputs, length = {"input_ids": prompt.input_ids, **prompt.inputs}, prompt.input_ids.shape[1]
            new = {"max_new_tokens": request.keywords["max_new_tokens"], "do_sample": False}
            theirs = plain.model.generate(**inputs, **new)[0, length:].tolist()
            if expected != theirs:
                return f"request {number}: generate {theirs}; alone {expected}"
    return None


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of the cases.")
@click.option("--only", type=int, help="Run this case of the seed alone.")
@click.option("--count", default=300, show_default=True, help="Most cases.")
@click.option("--minutes", default=10.0, show_default=True, help="Most time; the case that runs then is completed.")
def main(seed: int, only: int | None, count: int, minutes: float) -> None:
    """Decode random cases in several ways, and compare their tokens."""
    start, counts = time.monotonic(), Counter[str]()
    warnings.simplefilter("ignore")
    for number in numbers() if only is None else [only]:
        if only is None and (number >= count or time.monotonic() - start > 60 * minutes):
            break
        case = drawn(seed, number)
        try:
            found = difference(case)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        counts["cases"] += 1
        if found is not None:
            counts["differences"] += 1
            click.echo(f"difference: --seed {seed} --only {number}\n  {case}\n  {found}")
    click.echo(json.dumps({"seed": seed, "cases": counts["cases"], "differences": counts["differences"]}))
    raise SystemExit(bool(counts["differences"]))


if __name__ == "__main__":
    main()
