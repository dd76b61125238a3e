"""Plain decoding for comparison: one token at a time, each from a forward over the whole history, without a cache.

Shares no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

SPELT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def decode_plainly(
    model: Any,
    inputs: dict[str, Tensor],
    processors: Sequence[Any] = (),
    new: int = 24,
    seed: int | None = None,
    ends: Sequence[int] = (),
) -> list[int]:
    """New tokens of one prompt.

    Args:
        inputs: of the model; ``input_ids`` (1, length) int64.
        processors: called once per token, with the history, (1, length) int64, and the logits, (1, vocab) float32.
        new: most tokens.
        seed: of the random numbers, of which each token takes the next; None is greedy decoding.
        ends: tokens that end the output.
    """
    numbers = None if seed is None else torch.rand(64, generator=torch.Generator().manual_seed(seed))
    said: list[int] = []
    while len(said) < new and not (said and said[-1] in ends):
        ids = torch.cat([inputs["input_ids"], torch.tensor([said], dtype=torch.long)], dim=1)
        with torch.no_grad():
            scores = model(**{**inputs, "input_ids": ids}, use_cache=False).logits[:, -1].float()
        for processor in processors:
            scores = processor(ids, scores)
        if numbers is None:
            said.append(int(scores.argmax()))
        else:
            total = scores.softmax(-1).double().cumsum(-1)
            said.append(int((total <= numbers[len(said)].double() * total[:, -1:]).sum()))
    return said


def masking(allowed: Callable[[list[int], int], Sequence[int] | None], prompt_length: int) -> Callable[..., Tensor]:
    """A processor that leaves the tokens which ``allowed`` returns for an output and a vocabulary's size; None: all."""

    def mask(ids: Tensor, scores: Tensor) -> Tensor:
        left = allowed(ids[0, prompt_length:].tolist(), scores.shape[-1])
        if left is None:
            return scores
        masked = torch.full_like(scores, -torch.inf)
        masked[:, left] = scores[:, left]
        return masked

    return mask


def source(kind: str, text: Any) -> str:
    """llguidance's form of a grammar."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults=SPELT)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


@cache
def llguidance_tokenizer(tokenizer: Any, eos: int) -> Any:
    from llguidance import hf

    return hf.from_tokenizer(tokenizer, eos_token=eos)


def allowed_tokens(tokenizer: Any, eos: Sequence[int], form: str, said: list[int]) -> list[int] | None:
    """Tokens that a grammar allows after ``said``; None where it does not allow these.

    Args:
        form: see ``source``.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(llguidance_tokenizer(tokenizer, eos[0]), form, log_level=0)
    if not matcher.consume_tokens(said):
        return None
    allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
    return [*allowed, *eos[1:]] if eos[0] in allowed else allowed


def chi_square(seen: Mapping[Any, int], expected: Mapping[Any, float], total: int) -> tuple[float, float]:
    """The statistic, and its 99.99 % quantile by Wilson and Hilferty; outcomes seen less than five times are joined.

    Args:
        seen: numbers of outcomes, which must be possible.
        expected: probability of each outcome.
    """
    assert all(expected.get(outcome) for outcome in seen)
    rare = {outcome for outcome, p in expected.items() if total * p < 5}
    cells = [(seen.get(outcome, 0), total * p) for outcome, p in expected.items() if outcome not in rare]
    if rare:
        cells.append((sum(seen.get(one, 0) for one in rare), max(total * sum(expected[one] for one in rare), 1.0)))
    df = len(cells) - 1
    limit = df * (1 - 2 / (9 * df) + 3.719 * math.sqrt(2 / (9 * df))) ** 3
    return sum((count - mean) ** 2 / mean for count, mean in cells), limit
