"""Differential fuzzing of decoding: ``python -m tests.fuzz_decoding``.

A case is drawn from a seed and its number. There are two kinds:

- a call of ``mmspec.generate`` on a tiny random model in float32, compared with transformers' ``generate`` or, when
  sampling, with plain decoding from the same seed;
- requests that decode together on an embedded model, whole, as streams or cancelled, of two drafters, compared with the
  same request alone in plain decoding, and in greedy float32 with transformers' ``generate``, too.

Tokens must be equal. Differences are printed with the command that runs their case alone, and fail the command.
"""

from __future__ import annotations

import json
import random
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count as numbers
from typing import Any

import click
import torch
from transformers import LogitsProcessor, StoppingCriteria

import mmspec
from mmspec import plugins
from mmspec.checking.oracle import Oracle
from mmspec.drafters.registry import make_drafter as make
from mmspec.drafters.union import per_sequence
from mmspec.errors import UserError
from mmspec.vision.embedded import samples
from tests.tiny import shared_model
from tests.tiny.configs import HYBRID_CONFIGS, TEXT_CONFIGS, VISION_CONFIGS
from tests.tiny.drafters import NETWORKS, tiny_drafter, tiny_drafters
from tests.tiny.models import generate, text_inputs, vision_inputs

MODELS = (*TEXT_CONFIGS, *HYBRID_CONFIGS, *VISION_CONFIGS)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "sampled-filtered": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.4},
}
DRAFTERS = ("oracle", *(name for name in tiny_drafters() if name not in NETWORKS))
NEW = 16
LOOPS = "single layers need a decoder that runs each once"
PADDING = "attention_mask must have padding before tokens only"
"""Starts of messages that are no difference; of padding, where slots inside of a prompt are masked."""

PROMPTS = {
    "tiny-llava": ("Describe the image.", "What is on the left?", "How many objects are there?"),
    "tiny-hybrid": ("Work out: 37 + 48", "Tell a story about a cat.", "Work out: 5 + 6", "Work out: 37 + 49"),
}
EMBEDDED = {
    "tiny-llava": (None, "auto", "msd", "ngram", "recycle", "auto+ngram", "ngram@chain", "msd@chain"),
    "tiny-hybrid": (None, "auto", "mamba", "ngram", "recycle", "ngram+recycle", "ngram@chain", "suffix"),
}
KEYWORDS: tuple[dict[str, Any], ...] = (
    *({}, {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0}, {"stop": ["a", " 4"]}),
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


def check_case(seed: int, number: int) -> None:
    """Draw and decode case ``number`` of a seed. Raises ``AssertionError`` where tokens differ."""
    rng = random.Random(f"{seed} {number}")
    (check_call if rng.random() < 0.7 else check_requests)(rng)


def check_call(rng: random.Random) -> None:
    name = rng.choice(MODELS)
    model = shared_model(name)  # building it takes random numbers
    vision = name in VISION_CONFIGS
    weights = NETWORKS if vision or name in ("llama", "bamba") else ()
    images, batch = (rng.choice((0, 1, 2)), rng.randint(1, 3)) if vision else (0, rng.randint(1, 4))
    length, setting = 8 if vision else rng.choice((5, 9, 14, 23)), rng.choice(list(SETTINGS))
    seed, kind = rng.randrange(1000), rng.choice((*DRAFTERS, *weights))
    some: dict[str, Any] = {
        "repetition_penalty": rng.choice((0.8, 1.3)),
        "no_repeat_ngram_size": rng.choice((1, 2, 3)),
        "min_new_tokens": rng.randint(1, NEW),
        "suppress_tokens": rng.sample(range(3, 90), 20),
        "bad_words_ids": [[rng.randrange(3, 90)], [rng.randrange(3, 90), rng.randrange(3, 90)]],
        "sequence_bias": [[[rng.randrange(3, 90)], 4.0]],
        "logits_processor": [Drifting()],
        "stopping_criteria": [Sums()],
    }
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **SETTINGS[setting]}
    options |= {name: value for name, value in some.items() if rng.random() < 0.2}
    options["eos_token_id"] = rng.choice((None, 2, rng.sample(range(3, 90), 6)))
    if options["eos_token_id"] is None:
        options.pop("min_new_tokens", None)
    inputs = vision_inputs(name, batch, images, seed) if vision else text_inputs(batch, length, seed)
    nodes = rng.choice((0, 1, 3, 6, 12))
    masked = not vision and batch < 4 and rng.random() < 0.2
    if masked:
        start = rng.randrange(batch, length)
        inputs["attention_mask"][-1, start : rng.randint(start + 1, length)] = 0

    def ours(drafter: Any) -> Any:
        torch.manual_seed(seed)
        return mmspec.generate(model, drafter=drafter, nodes=nodes, **inputs, **options)

    try:
        expected = ours(None) if options["do_sample"] else generate(model, batch, **inputs, **options)
        said = expected[:, inputs["input_ids"].shape[1] :].tolist()
        received = ours(Oracle(said, vocab=90, seed=seed) if kind == "oracle" else tiny_drafter(kind, model))
    except UserError as error:
        if str(error).startswith(LOOPS) or (masked and str(error).startswith(PADDING)):
            return
        raise
    asked = f"{name}, {batch=}, {images=}, {length=}, {seed=}, {kind}, {nodes=}, {options}"
    same = torch.equal(received, expected)
    assert same, f"{asked}: plain {expected.tolist()}; speculative {received.tolist()}"


@cache
def _pipeline(model: str, drafter: str | None, dtype: str, prefix_cache: int) -> mmspec.Pipeline:
    return mmspec.load(model, drafter, dtype=dtype, prefix_cache=prefix_cache)


@cache
def _second_pipeline(model: str, second: str, *first: Any) -> mmspec.Pipeline:
    """A pipeline of another drafter over the target of ``_pipeline``, as in the server."""
    pipe, drafter = _pipeline(model, *first), make(second, plugins.model_path(model))
    return mmspec.Pipeline(pipe.target, pipe.processor, per_sequence(drafter), generation_config=pipe.generation_config)


def _answer(pipe: mmspec.Pipeline, prompt: str, pieces: int, keywords: dict[str, Any]) -> tuple[list[int], bool]:
    """New tokens, and whether the answer is complete.

    Args:
        pieces: pieces to read before the request is cancelled; 0 for the answer as a whole, -1 for the whole stream.
    """
    if pieces == 0:
        return pipe.generate(prompt, **keywords).token_ids, True
    tokens: list[int] = []
    stream = pipe.stream(prompt, **keywords)
    for number, piece in enumerate(stream, 1):
        tokens += piece.token_ids
        if number == pieces and piece.finish_reason is None:
            stream.close()  # type: ignore[attr-defined]
            return tokens, False
    return tokens, True


def check_requests(rng: random.Random) -> None:
    model, requests = rng.choice(list(EMBEDDED)), []
    sizes = rng.choice(((None, 0), (None, None, 0), (0, 2, 5, 12), (None, 0, 1, 9, 64)))
    for _ in range(rng.randint(1, 8)):
        keywords: dict[str, Any] = {"max_new_tokens": rng.randint(1, 40), "nodes": rng.choice(sizes)}
        if rng.random() < 0.4:
            keywords |= {"temperature": rng.choice((0.5, 1.0, 1.6)), "seed": rng.randrange(99)}
            keywords |= rng.choice(({}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}))
        keywords |= rng.choice(KEYWORDS)
        if model == "tiny-llava" and rng.random() < 0.7:
            keywords["images"] = [str(samples() / "scene.png")]
        requests.append((rng.choice(PROMPTS[model]), rng.choice((0, 0, -1, 1, 3)), keywords, rng.random() < 0.15))
    # Recurrent layers sum in another order along trees: their rounding in bfloat16 differs.
    dtype = rng.choice(("float32", "float32", *(("bfloat16", "int8", "int4") if model == "tiny-llava" else ())))
    first = rng.choice(EMBEDDED[model]), dtype, rng.choice((0, 1 << 26))
    second = rng.choice(EMBEDDED[model][1:])
    pipes, plain = (_pipeline(model, *first), _second_pipeline(model, second, *first)), _pipeline(model, None, dtype, 0)
    with ThreadPoolExecutor(len(requests)) as pool:
        received = list(pool.map(lambda one: _answer(pipes[one[3]], *one[:3]), requests))
    for number, ((prompt, _, keywords, _), (tokens, whole)) in enumerate(zip(requests, received, strict=True)):
        expected = plain.generate(prompt, **keywords).token_ids
        where = f"{model}, {first}, {second}, request {number} of {requests}"
        assert tokens == (expected if whole else expected[: len(tokens)]), f"{where}: alone {expected}; got {tokens}"
        if dtype == "float32" and not keywords.keys() - {"max_new_tokens", "nodes", "images"}:
            encoded = plain.encode([{"prompt": prompt, "images": keywords.get("images")}])
            new = {"max_new_tokens": keywords["max_new_tokens"], "do_sample": False}
            output = plain.model.generate(input_ids=encoded.input_ids, **encoded.inputs, **new)
            theirs = output[0, encoded.input_ids.shape[1] :].tolist()
            assert expected == theirs, f"{where}: generate {theirs}; alone {expected}"


@click.command()
@click.option("--seed", default=0, show_default=True, help="Seed of the cases.")
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
        counts["cases"] += 1
        try:
            check_case(seed, number)
        except Exception as error:
            counts["differences"] += 1
            click.echo(f"difference: --seed {seed} --only {number}\n  {type(error).__name__}: {error}")
    click.echo(json.dumps({"seed": seed, "cases": counts["cases"], "differences": counts["differences"]}))
    raise SystemExit(bool(counts["differences"]))


if __name__ == "__main__":
    main()
