"""Prompts that a target writes itself: after its chat template's opening of a user's turn it continues with one.

The method is Magpie's (arXiv 2406.08464); it needs no data of anybody's.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mmspec.core.target import Prompt
from mmspec.distil.answering import PendingConversation
from mmspec.engine.request_state import Wakeup
from mmspec.engine.stopping import Stopper
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.sampling.params import SamplingParams

MAX_TOKENS = 128
"""A prompt that has not ended by then is dropped."""

_MARK = "mmspec-user-turn"


def draw_prompts(
    pipe: Pipeline, numbers: Sequence[int], done: Collection[str], params: SamplingParams, *, chunk: int = 256
) -> Iterator[PendingConversation]:
    """Draws prompts and yields them as conversations to be answered; repeated and unusable ones are dropped.

    Args:
        pipe: of a target with a chat template.
        numbers: of the prompts; a number and ``params`` give the same prompt in every run.
        done: ids of conversations that exist, which are not drawn again.
        chunk: prompts drawn at a time.
    """
    opening = user_opening(pipe.io.tokenizer)
    seen: set[str] = set()
    left = [number for number in numbers if prompt_id(number) not in done]
    for start in range(0, len(left), chunk):
        drawn = left[start : start + chunk]
        for number, text in zip(drawn, _draw(pipe, opening, drawn, params), strict=True):
            if text is not None and text.lower() not in seen:
                seen.add(text.lower())
                yield PendingConversation(prompt_id(number), [[{"type": "text", "text": text}]], [0])


def prompt_id(number: int) -> str:
    """The id of the conversation that starts with this prompt."""
    return f"self-{number:07d}"


def user_opening(tokenizer: Any) -> list[int]:
    """Returns the tokens of a chat template before a user's first words.

    Raises:
        UserError: there is no chat template, or it does not show a user's words as they are.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("a model that writes its own prompts needs a chat template: its tokenizer has none")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    opening, found, _ = rendered.partition(_MARK)
    if not found or not opening:
        raise UserError(f"expected a chat template that opens a user's turn, received {rendered[:60]!r}")
    return tokenizer(opening, add_special_tokens=False)["input_ids"]


def _draw(pipe: Pipeline, opening: list[int], numbers: Sequence[int], params: SamplingParams) -> list[str | None]:
    """Samples prompts; None for unusable ones."""
    target = pipe.target
    prompt = torch.tensor([opening], device=target.device)
    stopper = Stopper(MAX_TOKENS, context_limit=target.context_limit, eos_token_ids=target.eos_token_ids)
    sequences, wakeup = [], Wakeup()
    seeds = [zlib.crc32(f"prompt {params.seed} {number}".encode()) for number in numbers]
    samplers = [replace(params, seed=seed).sampler() for seed in seeds]
    with pipe.engine.together():
        for sampler in samplers:
            sequences += pipe.add(Prompt(prompt, None), sampler, stopper, 0, on_change=wakeup)
    try:
        wakeup.wait(lambda: all(sequence.done for sequence in sequences))
    finally:
        pipe.engine.remove(sequences)
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
    return [_usable(pipe.io.tokenizer, s.token_ids) if s.finish_reason == "stop" else None for s in sequences]


def _usable(tokenizer: Any, token_ids: list[int]) -> str | None:
    """The text of a prompt that has ended; None unless it has two words and every token of it shows as text."""
    text = tokenizer.decode(token_ids[:-1]).strip()
    special = set(tokenizer.all_special_ids) & set(token_ids[:-1])
    return None if special or "\N{REPLACEMENT CHARACTER}" in text or len(text.split()) < 2 else text
