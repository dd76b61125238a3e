"""Masked plain decoding without mmspec: the model's own forward, and a new matcher of llguidance for every token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from llguidance import LLMatcher, hf
from torch import Tensor

SPELT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def source(kind: str, text: Any) -> str:
    """llguidance's form of a grammar."""
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults=SPELT)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


@cache
def _tokenizer(tokenizer: Any, eos: int) -> Any:
    return hf.from_tokenizer(tokenizer, eos_token=eos)


def allowed_tokens(tokenizer: Any, eos: Sequence[int], kind: str, text: Any, said: list[int]) -> list[int]:
    """Tokens allowed after ``said``."""
    matcher = LLMatcher(_tokenizer(tokenizer, eos[0]), source(kind, text), log_level=0)
    assert matcher.consume_tokens(said), matcher.get_error()
    allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
    return [*allowed, *eos[1:]] if eos[0] in allowed else allowed


def decode_plainly(
    model: Any,
    inputs: dict[str, Tensor],
    tokenizer: Any,
    constraint: tuple[str, Any] | None,
    new: int,
    *,
    processors: Sequence[Any] = (),
    seed: int | None = None,
) -> list[int]:
    """New tokens of one prompt, each from a forward without a cache.

    Args:
        processors: applied after the mask.
        seed: of the random numbers, of which each token takes the next; None is greedy decoding.
    """
    eos = model.generation_config.eos_token_id
    eos = [eos] if isinstance(eos, int) else eos
    numbers = None if seed is None else torch.rand(64, generator=torch.Generator().manual_seed(seed))
    said: list[int] = []
    while len(said) < new and not (said and said[-1] in eos):
        ids = torch.cat([inputs["input_ids"], torch.tensor([said], dtype=torch.long)], dim=1)
        with torch.no_grad():
            scores = model(**{**inputs, "input_ids": ids}, use_cache=False).logits[:, -1].float()
        if constraint is not None:
            allowed = allowed_tokens(tokenizer, eos, *constraint, said)
            masked = torch.full_like(scores, -torch.inf)
            masked[:, allowed] = scores[:, allowed]
            scores = masked
        for processor in processors:
            scores = processor(ids, scores)
        if numbers is None:
            said.append(int(scores.argmax()))
        else:
            total = scores.softmax(-1).double().cumsum(-1)
            said.append(int((total <= numbers[len(said)].double() * total[:, -1:]).sum()))
    return said
