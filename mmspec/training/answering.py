"""Generates prompts and answers with a target, as training conversations for drafters.

Answers are generated in batches of similar cost. The target can also generate the prompts: given the start of a user
turn in its chat template, it continues with a user message (Magpie, arXiv 2406.08464). This needs no dataset.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.sampling.params import LIBRARY, SamplingParams
from mmspec.targets.processor import Processor
from mmspec.training import data

_POOL = 8  # batches sorted together, so that answers of similar lengths are generated together
_GROUP = 2  # batches per yield; a finished sequence frees its slot for the next


@dataclass
class PendingConversation:
    """A conversation whose answers, of ``expected`` lengths in characters, are being generated."""

    id: str
    questions: list[list[dict[str, Any]]]
    expected: list[int]
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def pending(self) -> bool:
        return len(self.answers) < len(self.questions)

    @property
    def cost(self) -> tuple[int, int]:
        """Sort key by the cost of the next answer: number of media so far, then expected length."""
        questions = self.questions[: len(self.answers) + 1]
        media = sum(item["type"] in data.MEDIA for items in questions for item in items)
        return media, self.expected[len(self.answers)]

    def prompt(self) -> list[dict[str, Any]]:
        return [*self.messages, {"role": "user", "content": self.questions[len(self.answers)]}]

    def result(self) -> data.Conversation:
        return data.Conversation(self.id, tuple(self.messages), tuple(self.answers))


def without_answers(conversation: data.Conversation) -> PendingConversation:
    """The conversation's questions, to be answered by a target."""
    questions, expected = [], []
    for message in conversation.messages:
        if message["role"] == "user":
            questions.append(message["content"])
            expected.append(0)
        elif message["role"] == "assistant":
            expected[-1] = len(message["content"])
    system = [message for message in conversation.messages[:1] if message["role"] == "system"]
    return PendingConversation(conversation.id, questions, expected, system)


class AnswerGenerator:
    """Generates answers with a pipeline, batching questions of similar cost. Each answer has its own seed; a share of
    conversations is answered greedily. ``failures`` are errors that ended conversations early, one line each."""

    def __init__(self, pipe: Pipeline, seed: int, params: SamplingParams, greedy: float = 0.0) -> None:
        self.pipe, self.seed, self.params, self.greedy = pipe, seed, params, greedy
        self.answers = self.tokens = 0
        self.failures: list[str] = []
        self._text_only = not pipe.processor.reads_media

    def run(self, jobs: Iterable[PendingConversation]) -> Iterator[list[data.Conversation]]:
        """Yield completed conversations, a few batches at a time."""
        stream, size = iter(jobs), _GROUP * self.pipe.max_num_seqs
        while pool := list(islice(stream, _POOL * self.pipe.max_num_seqs)):
            while pool:
                pool.sort(key=lambda job: job.cost)
                for start in range(0, len(pool), size):
                    group = pool[start : start + size]
                    self._answer(group)
                    yield [job.result() for job in group if not job.pending and job.answers]
                pool = [job for job in pool if job.pending]

    def _answer(self, group: list[PendingConversation]) -> None:
        prompts = [data.as_text(job.prompt()) if self._text_only else job.prompt() for job in group]
        requests = [{"prompt": prompt, "params": self._params(job)} for prompt, job in zip(prompts, group, strict=True)]
        answers = self.pipe.generate_batch(requests, num_draft_tokens=0, on_error="return")
        for job, answer in zip(group, answers, strict=True):
            if isinstance(answer, UserError):
                self.failures.append(f"{job.id}: {answer}")
                del job.questions[len(job.answers) :]
                continue
            job.messages = [*job.prompt(), {"role": "assistant", "content": answer.text.strip()}]
            job.answers.append(tuple(answer.token_ids))
            self.answers += 1
            self.tokens += len(answer.token_ids)

    def _params(self, job: PendingConversation) -> SamplingParams:
        """Sampling parameters of the next answer, deterministic across runs."""
        if zlib.crc32(f"greedy {job.id}".encode()) < self.greedy * 2**32:
            return replace(self.params, temperature=0.0)
        return replace(self.params, seed=zlib.crc32(f"{self.seed} {job.id} {len(job.answers)}".encode()))


MAX_TOKENS = 128  # prompts that have not ended after this number of tokens are dropped
_MARK = "mmspec-user-turn"


def draw_prompts(
    pipe: Pipeline, numbers: Sequence[int], done: Collection[str], params: SamplingParams, *, chunk: int = 256
) -> Iterator[PendingConversation]:
    """Sample prompts and yield them as conversations to answer, without duplicates and unusable prompts. A number and
    ``params`` determine a prompt."""
    opening = user_opening(pipe.processor.tokenizer)
    seen: set[str] = set()
    plain = replace(params.over(LIBRARY), max_new_tokens=MAX_TOKENS)  # without the model's own defaults
    left = [number for number in numbers if prompt_id(number) not in done]
    for start in range(0, len(left), chunk):
        drawn = left[start : start + chunk]
        seeds = [zlib.crc32(f"prompt {params.seed} {number}".encode()) for number in drawn]
        requests = [{"prompt": opening, "params": replace(plain, seed=seed)} for seed in seeds]
        for number, one in zip(drawn, pipe.generate_batch(requests, num_draft_tokens=0), strict=True):
            text = _usable(pipe.processor, one.token_ids) if one.finish_reason == "stop" else None
            if text is not None and text.lower() not in seen:
                seen.add(text.lower())
                yield PendingConversation(prompt_id(number), [[{"type": "text", "text": text}]], [0])


def prompt_id(number: int) -> str:
    """The id of the conversation that starts with this prompt."""
    return f"self-{number:07d}"


def user_opening(tokenizer: Any) -> list[int]:
    """The chat template's tokens before the content of the first user message."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("a model that writes its own prompts needs a chat template: its tokenizer has none")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    opening, found, _ = rendered.partition(_MARK)
    if not found or not opening:
        raise UserError(f"expected a chat template that opens a user's turn, received {rendered[:60]!r}")
    return tokenizer(opening, add_special_tokens=False)["input_ids"]


def _usable(processor: Processor, token_ids: list[int]) -> str | None:
    """The text of a finished prompt; None unless it has at least two words and only text tokens."""
    text = processor.decode(token_ids[:-1]).strip()
    special = processor.vocabulary.special_ids & set(token_ids[:-1])
    return None if special or "\N{REPLACEMENT CHARACTER}" in text or len(text.split()) < 2 else text
