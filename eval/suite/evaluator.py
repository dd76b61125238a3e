"""Decodes a task's conversations in every way, in turn, and tells what came of it.

Every conversation starts from what drafters and budgets had learnt in the warm-up. So a result depends on no other
conversation, a run can go on where it stopped, and several machines share one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import mmspec
from eval.harness.prompts import held_out_requests, held_out_texts
from eval.harness.timing import Asked, Run, Way, rounds_of
from eval.suite.methods import BASELINE, PLAIN, ways_of
from eval.suite.sample import Sample
from eval.suite.tasks import TASKS
from mmspec.calibrate import cost_table, describe
from mmspec.compare import first_difference
from mmspec.pipeline import Pipeline
from mmspec.stats import Stats
from vision.targets import VisionTarget

_WARM_UP_TOKENS = 64
_FIGURES = tuple(field.name for field in dataclasses.fields(Stats))


@dataclass(frozen=True)
class Settings:
    """What a run measures, all of it plain JSON values; see the options of ``mmspec eval``."""

    model: str
    tasks: tuple[str, ...]
    methods: str = "auto"
    data: str | None = None
    limit: int | None = None
    frames: int = 8
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    rounds: int = 3
    warm_up: int = 2
    max_new_tokens: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> Settings:
        """From JSON values."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)

    def samples(self, task: str) -> list[Sample]:
        """The samples of one of the tasks."""
        return TASKS[task].samples(None if self.data is None else Path(self.data), self.limit, self.frames)


class Evaluator:
    """A model, its methods and the tasks; call it with a job to have it done.

    Args:
        settings: as JSON values, see ``Settings``.

    Attributes:
        ways: the methods.
        refused: why a method cannot decode at a temperature and batch size, by its name and these.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.settings = Settings.of(settings)
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        pipe = mmspec.load(self.settings.model, drafter=None, device=self.settings.device, dtype=self.settings.dtype)
        self.pipe = pipe
        self.ways = ways_of(self.settings.methods, pipe.target)
        self.refused: dict[tuple[str, float, int], str] = {}
        self._samples: dict[str, list[Sample]] = {}
        self._warm_up()

    @property
    def visual(self) -> bool:
        """Whether the model sees."""
        return isinstance(self.pipe.target, VisionTarget)

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decode a batch of conversations.

        Args:
            job: ``task``, ``temperature``, ``batch`` (size) and ``group``, the batch's number.

        Returns:
            The job, ``ids`` and ``categories`` of its samples, ``refused`` methods, for each turn its ``rows`` and what
            each method made of them (see ``_told``), and ``about`` model, machine and software.
        """
        task, size, temperature = TASKS[job["task"]], job["batch"], job["temperature"]
        if task.name not in self._samples:
            self._samples[task.name] = self.settings.samples(task.name)
        samples = self._samples[task.name][job["group"] * size : (job["group"] + 1) * size]
        asked = Asked(
            self.settings.max_new_tokens or task.max_new_tokens, temperature, self.settings.seed + job["group"]
        )
        ways = [way.fork(self.pipe.target) for way in self.ways if (way.name, temperature, size) not in self.refused]
        texts: list[list[str]] = [[] for _ in samples]
        turns = []
        for turn in range(max(len(sample.conversation.questions) for sample in samples)):
            rows = [k for k, sample in enumerate(samples) if turn < len(sample.conversation.questions)]
            requests = [samples[k].conversation.request(texts[k]) for k in rows]
            runs = rounds_of(self.pipe, requests, ways, self.settings.rounds, asked)
            told = _told(self.pipe, requests, asked, ways, runs)
            # All methods are asked the same next question, behind the answers of plain decoding.
            for k, text in zip(rows, told[PLAIN]["texts"], strict=True):
                texts[k].append(text)
            turns.append({"rows": rows, "methods": told})
        return {
            **job,
            "ids": [sample.id for sample in samples],
            "categories": [sample.category for sample in samples],
            "refused": {n: why for (n, *cell), why in self.refused.items() if cell == [temperature, size]},
            "turns": turns,
            "about": {"model": self.settings.model, **describe(self.pipe.target)},
            "tstamp": time.time(),
        }

    def _warm_up(self) -> None:
        """Let every way decode prompts that are no part of any task, and find out what transformers refuses."""
        self.pipe.target.cost = cost_table(self.pipe.target, refresh=True)
        count = self.settings.warm_up
        for size in self.settings.batch_sizes:
            number = max(count, 1) * size
            prompts = held_out_requests(number, 0, first=4000) if self.visual else held_out_texts(number, 4_000_000)
            for temperature in self.settings.temperatures:
                asked = Asked(_WARM_UP_TOKENS, temperature)
                self._try(prompts[:size], size, temperature)
                for start in range(0, count * size, size):
                    ways = [way for way in self.ways if (way.name, temperature, size) not in self.refused]
                    rounds_of(self.pipe, prompts[start : start + size], ways, 1, asked)

    def _try(self, requests: Sequence[dict[str, Any]], size: int, temperature: float) -> None:
        for way in self.ways:
            if way.options:  # transformers' own speculation is not made for every model and batch
                try:
                    rounds_of(self.pipe, requests, [way], 1, Asked(8, temperature))
                except Exception as error:  # it refuses, or fails, in many ways
                    first_line = (str(error).strip().splitlines() or [""])[0]
                    self.refused[way.name, temperature, size] = f"{type(error).__name__}: {first_line}"[:200]


def _told(
    pipe: Pipeline, requests: Sequence[dict[str, Any]], asked: Asked, ways: Sequence[Way], runs: dict[str, list[Run]]
) -> dict[str, dict[str, Any]]:
    """What each method made of a batch: ``answers`` (token ids), ``texts``, ``seconds`` of each round, ``stats``, the
    peak of ``memory``, whether each row is ``equal`` to the reference (transformers' greedy answer, our own plain one
    when sampling) in all rounds, and the ``differences`` where it is not."""
    told = {}
    for way in ways:
        rounds = runs[way.name]
        first = rounds[0]
        # transformers draws other random numbers than we do.
        comparable = asked.temperature == 0 or way.options is None
        reference = runs[BASELINE if asked.temperature == 0 else PLAIN][0].answers
        equal: list[bool | None] = [None] * len(first.answers)
        differences = []
        if comparable:
            for row, wanted in enumerate(reference):
                other = next((run.answers[row] for run in rounds if run.answers[row] != wanted), None)
                equal[row] = other is None
                if other is not None:
                    keywords = {"temperature": asked.temperature}
                    found = first_difference(pipe.target, requests[row], keywords, other, wanted)
                    differences.append({"row": row, **vars(found)})
        told[way.name] = {
            "answers": first.answers,
            "texts": [pipe.target.decode(answer).strip() for answer in first.answers],
            "seconds": [run.seconds for run in rounds],
            "stats": [{figure: getattr(stats, figure) for figure in _FIGURES} for stats in first.stats],
            "memory": max((run.memory for run in rounds if run.memory is not None), default=None),
            "equal": equal,
            "differences": differences,
        }
    return told
