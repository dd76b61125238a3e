"""A target answers the questions of conversations, many at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mmspec.distil import data
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from vision.targets import VisionTarget

_POOL = 8  # batches whose requests are sorted together, so that answers of a batch end at about the same time


@dataclass
class Job:
    """A conversation in the making.

    Attributes:
        id: of the conversation.
        questions: the content of each user message, as in `data.Conversation`.
        expected: a guess of the length of each answer, in characters.
        system: what stands before the first question.
        known: answers from elsewhere, where there are any.
        messages, answers: those so far.
    """

    id: str
    questions: list[list[dict[str, Any]]]
    expected: list[int]
    system: tuple[dict[str, Any], ...] = ()
    known: tuple[str, ...] = ()
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[tuple[int, ...] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages += self.system

    @property
    def open(self) -> bool:
        return len(self.answers) < len(self.questions)

    @property
    def likeness(self) -> tuple[int, int]:
        """Close for questions that cost about the same to answer: visual input, then length of the answer."""
        asked = self.questions[: len(self.answers) + 1]
        return sum(item["type"] in data.MEDIA for items in asked for item in items), self.expected[len(self.answers)]

    def ask(self) -> list[dict[str, Any]]:
        """The messages up to the next question."""
        return [*self.messages, {"role": "user", "content": self.questions[len(self.answers)]}]

    def hear(self, text: str, token_ids: Sequence[int] | None) -> None:
        """Take in the next answer, its tokens too where they are known."""
        self.messages.append({"role": "user", "content": self.questions[len(self.answers)]})
        self.messages.append({"role": "assistant", "content": text.strip()})
        self.answers.append(None if token_ids is None else tuple(token_ids))

    def result(self) -> data.Conversation:
        return data.Conversation(self.id, tuple(self.messages), tuple(self.answers))


def job_of(conversation: data.Conversation) -> Job:
    """The conversation's questions, to be answered anew."""
    questions, expected = [], []
    for message in conversation.messages:
        if message["role"] == "user":
            questions.append(message["content"])
            expected.append(0)
        elif message["role"] == "assistant":
            expected[-1] = len(message["content"])
    system = tuple(message for message in conversation.messages[:1] if message["role"] == "system")
    return Job(conversation.id, questions, expected, system)


class Answering:
    """Runs jobs through a pipeline, questions of a kind together.

    Attributes:
        answers, tokens: given so far.
        failures: why conversations ended early, one line each.
    """

    def __init__(self, pipe: Pipeline, batch: int, seed: int, keywords: dict[str, Any]) -> None:
        self.pipe, self.batch, self.seed, self.keywords = pipe, batch, seed, keywords
        self.answers = self.tokens = 0
        self.failures: list[str] = []
        self._reads_text_only = not isinstance(pipe.target, VisionTarget)

    def run(self, jobs: Iterable[Job]) -> Iterator[list[data.Conversation]]:
        """The finished conversations of each batch."""
        stream = iter(jobs)
        while pool := list(islice(stream, _POOL * self.batch)):
            while pool:
                pool.sort(key=lambda job: job.likeness)
                for start in range(0, len(pool), self.batch):
                    group = pool[start : start + self.batch]
                    self._answer(group)
                    yield [job.result() for job in group if not job.open and job.answers]
                pool = [job for job in pool if job.open]

    def _answer(self, group: list[Job]) -> None:
        first = group[0]
        # A seed of its own for each batch: equal ones would draw alike.
        seed = zlib.crc32(f"{self.seed} {first.id} {len(first.answers)}".encode())
        try:
            requests = [{"prompt": self._shaped(job.ask())} for job in group]
            said = self.pipe.generate_batch(requests, seed=seed, **self.keywords)
        except UserError as error:
            if len(group) > 1:
                for job in group:
                    self._answer([job])
                return
            self.failures.append(f"{first.id}: {error}")
            del first.questions[len(first.answers) :]
            return
        for job, answer in zip(group, said, strict=True):
            job.hear(answer.text, answer.token_ids)
            self.answers += 1
            self.tokens += len(answer.token_ids)

    def _shaped(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return data.as_text(messages) if self._reads_text_only else messages
