"""Compares speculative and plain decoding of one request: interleaved timing, tokens, logit margin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter as clock
from typing import Any

import torch
from transformers import LogitsProcessorList

from mmspec.core.drafter import Drafter
from mmspec.core.target import Prompt, Target
from mmspec.core.tree import TokenTree
from mmspec.engine.request import pop_params
from mmspec.pipeline import Generation, Pipeline
from mmspec.sampling.sampler import Matcher


@dataclass(frozen=True)
class Speed:
    """Medians over the rounds.

    Attributes:
        tokens_per_second: decoding throughput, without prefill and first token.
        seconds: duration of the whole call, with preprocessing of images and prefill.
    """

    tokens_per_second: float
    seconds: float
    seconds_per_token: float


@dataclass(frozen=True)
class Difference:
    """The first difference between two outputs.

    Attributes:
        position: index of the first different token among the new tokens.
        speculative, plain: the tokens at this position; None for an output that has ended.
        margin: for greedy outputs, the target's highest logit at this position minus the lower logit of the two tokens
            (after grammar mask and logits processors), from another pass over prompt and common tokens. A margin near
            zero in half precision is a tie, decided by rounding.
    """

    position: int
    speculative: int | None
    plain: int | None
    margin: float | None


@dataclass(frozen=True)
class Comparison:
    """Result of ``compare``. ``equal`` is None for outputs sampled without a seed, which agree in distribution."""

    rounds: int
    speculative: Speed
    plain: Speed
    equal: bool | None
    difference: Difference | None

    @property
    def decode_ratio(self) -> float | None:
        """Speculative over plain tokens per second; None for answers of one token, which have no decode phase."""
        plain = self.plain.tokens_per_second
        return self.speculative.tokens_per_second / plain if plain else None

    @property
    def end_to_end_ratio(self) -> float:
        """Plain over speculative seconds per token of the whole call: sampled answers may differ in length."""
        return self.plain.seconds_per_token / self.speculative.seconds_per_token

    def to_dict(self) -> dict[str, Any]:
        """All metrics as JSON values."""
        return {**asdict(self), "decode_ratio": self.decode_ratio, "end_to_end_ratio": self.end_to_end_ratio}


def compare(
    pipe: Pipeline,
    make_drafter: Callable[[], Drafter | None],
    request: Mapping[str, Any],
    keywords: Mapping[str, Any],
    *,
    rounds: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> Comparison:
    """Interleaved timing of speculative and plain decoding of a request, after one warm-up run of each.

    Args:
        make_drafter: returns a new drafter for every run, as a learning drafter would memorise the answer.
        request: ``prompt``, ``images``, ``videos``.
        keywords: as for ``Pipeline.generate``.
        rounds: measured runs of each method, in alternating order.
        progress: called after every run.
    """

    def run(speculate: bool) -> tuple[Generation, float]:
        drafter = make_drafter() if speculate else None
        fresh = Pipeline(pipe.target, pipe.processor, drafter, generation_config=pipe.generation_config)
        start = clock()
        generation = fresh.generate(**request, **keywords)
        seconds = clock() - start
        progress()
        return generation, seconds

    run(True), run(False)
    runs: dict[bool, list[tuple[Generation, float]]] = {True: [], False: []}
    for turn in range(rounds):
        for speculate in (True, False) if turn % 2 == 0 else (False, True):
            runs[speculate].append(run(speculate))
    fast, slow = _speed(runs[True]), _speed(runs[False])
    params = pipe.defaults.complete(pop_params(dict(keywords)))
    if params.do_sample and params.seed is None:
        return Comparison(rounds, fast, slow, None, None)
    pairs = [(a.token_ids, b.token_ids) for (a, _), (b, _) in zip(runs[True], runs[False], strict=True)]
    unequal = next((pair for pair in pairs if pair[0] != pair[1]), None)
    difference = first_difference(pipe, request, keywords, *unequal) if unequal else None
    return Comparison(rounds, fast, slow, unequal is None, difference)


def _speed(runs: Sequence[tuple[Generation, float]]) -> Speed:
    return Speed(
        median(generation.stats.tokens_per_second for generation, _ in runs),
        median(seconds for _, seconds in runs),
        median(seconds / len(generation.token_ids) for generation, seconds in runs),
    )


def first_difference(
    pipe: Pipeline,
    request: Mapping[str, Any],
    keywords: Mapping[str, Any],
    speculative: Sequence[int],
    plain: Sequence[int],
) -> Difference:
    """The first difference between two outputs of a request, given by their new tokens, and the target's logit margin
    there. Other arguments as for ``compare``."""
    shorter = min(len(speculative), len(plain))
    at = next((i for i in range(shorter) if speculative[i] != plain[i]), shorter)
    params = pipe.defaults.complete(pop_params(dict(keywords)))
    if at == shorter or params.do_sample:
        speculative_token, plain_token = (tokens[at] if at < len(tokens) else None for tokens in (speculative, plain))
        return Difference(at, speculative_token, plain_token, None)
    names = ("chat_template", *pipe.processor.options)
    inputs = {name: keywords[name] for name in names if keywords.get(name) is not None}
    prompt = replace(pipe.encode([request], **inputs), adapter=keywords.get("adapter"))
    scores = next_token_scores(pipe.target, prompt, plain[:at], pipe.defaults.processors(params, prompt.input_ids))
    if (grammar := pipe.grammar(params)) is not None:
        allowed = Matcher(grammar, []).allowed(plain[:at], (), len(scores))
        scores = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
    two = scores[[speculative[at], plain[at]]]
    return Difference(at, speculative[at], plain[at], float(scores.max() - two.min()))


def next_token_scores(
    target: Target, prompt: Prompt, tokens: Sequence[int], processors: LogitsProcessorList
) -> torch.Tensor:
    """Processed float32 logits, (vocab,), of the token after ``tokens``, for a prompt of one row.

    The tokens are verified as a chain in one pass.
    """
    target = target.fork()  # the original may have sequences
    *_, output = target.prefill([prompt], [len(tokens)])
    assert output is not None
    if tokens:
        chain = torch.tensor([list(tokens)], dtype=torch.long, device=prompt.input_ids.device)
        parents = torch.arange(-1, len(tokens) - 1, device=chain.device)[None]
        output = target.verify(TokenTree(chain, parents))
    ids = prompt.input_ids
    history = torch.tensor([ids[0].tolist() + list(tokens)], dtype=torch.long, device=ids.device)
    return processors(history, output.logits[:, -1].float())[0]  # type: ignore[arg-type]
