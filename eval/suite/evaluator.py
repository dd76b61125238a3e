"""Decodes a task's conversations with every method, interleaved.

Every conversation starts from the state of drafters and budgets after the warm-up. So results do not depend on other
conversations, and a run can be resumed or split over several machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers

import mmspec
from mmspec.compare import first_difference
from mmspec.errors import first_line
from mmspec.eval.harness.acceptance import copy_lengths
from mmspec.eval.harness.output import describe
from mmspec.eval.harness.passes import pass_costs
from mmspec.eval.harness.peers import LlamaServer, OpenVino, Peer
from mmspec.eval.harness.prompts import warm_up_requests
from mmspec.eval.harness.timing import DecodingOptions, Method, TimedBatch, run_interleaved
from mmspec.eval.suite.data import Sample
from mmspec.eval.suite.methods import BASELINE, LLAMA, OPENVINO, PLAIN, parse_methods
from mmspec.eval.suite.settings import SuiteSettings
from mmspec.eval.suite.tasks import TASKS
from mmspec.pipeline import Pipeline

_WARM_UP_TOKENS = 64


class Evaluator:
    """A model with its methods, callable with a job to decode a batch of conversations.

    Args:
        settings: fields of ``SuiteSettings``.

    Attributes:
        methods: the decoding methods.
        refused: the reason why a method cannot decode, by (method, temperature, batch size).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.settings = SuiteSettings(**settings)
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        pipe = mmspec.load(self.settings.model, drafter=None, device=self.settings.device, dtype=self.settings.dtype)
        self.pipe = pipe
        program, model, threads = self.settings.llama_server, self.settings.model, torch.get_num_threads()
        peers: dict[str, Callable[[str], Peer]] = {OPENVINO: partial(OpenVino, model, threads)}
        if program is not None:
            peers[LLAMA] = partial(LlamaServer, program, model, threads)
        self.methods = parse_methods(self.settings.methods, pipe.target, peers)
        for method in self.methods:
            method.max_num_seqs = max(method.max_num_seqs, *self.settings.batch_sizes)
        self.refused: dict[tuple[str, float, int], str] = {}
        self._samples: dict[str, list[Sample]] = {}
        self._warm_up()

    @property
    def visual(self) -> bool:
        return self.pipe.processor.reads_media

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decode a batch of conversations.

        Args:
            job: ``task``, ``temperature``, ``batch`` (size) and ``group`` (index of the batch).

        Returns:
            The job, ``ids`` and ``categories`` of its samples, ``refused`` methods, for each turn its ``rows`` and the
            results of all ``methods`` (see ``_method_results``) and, in batches of one, the ``copy_lengths`` of our
            plain decoding's answer, and ``about`` model, machine, software and ``cost`` of passes.
        """
        task, size, temperature = TASKS[job["task"]], job["batch"], job["temperature"]
        if task.name not in self._samples:
            self._samples[task.name] = self.settings.samples(task.name)
        samples = self._samples[task.name][job["group"] * size : (job["group"] + 1) * size]
        tokens, seed = self.settings.max_new_tokens or task.max_new_tokens, self.settings.seed + job["group"]
        options = DecodingOptions(tokens, temperature, seed, self.settings.top_p)
        methods = [method.fork(self.pipe.target) for method in self._usable(temperature, size)]
        texts: list[list[str]] = [[] for _ in samples]
        turns = []
        for turn in range(max(len(sample.conversation.questions) for sample in samples)):
            rows = [k for k, sample in enumerate(samples) if turn < len(sample.conversation.questions)]
            requests = [samples[k].conversation.request(texts[k]) for k in rows]
            batches = run_interleaved(self.pipe, requests, methods, self.settings.rounds, options)
            results = _method_results(self.pipe, requests, options, methods, batches)
            # All methods get the same history: the answers of plain decoding.
            for k, text in zip(rows, results[PLAIN]["texts"], strict=True):
                texts[k].append(text)
            turns.append({"rows": rows, "methods": results})
            if size == 1:
                (prompt,) = self.pipe.encode(requests).input_ids.tolist()
                turns[-1]["copy_lengths"] = copy_lengths(prompt, results[PLAIN]["answers"][0])
        return {
            **job,
            "ids": [sample.id for sample in samples],
            "categories": [sample.category for sample in samples],
            "refused": {name: why for (name, *key), why in self.refused.items() if key == [temperature, size]},
            "turns": turns,
            "about": {"model": self.settings.model, **describe(self.pipe.target), "cost": self._cost},
            "tstamp": time.time(),
        }

    def _usable(self, temperature: float, size: int) -> list[Method]:
        return [method for method in self.methods if (method.name, temperature, size) not in self.refused]

    def _warm_up(self) -> None:
        """Decode prompts outside the tasks with every method, and record what baselines cannot decode."""
        self._cost = pass_costs(self.pipe.target)
        count = self.settings.warm_up
        for size in self.settings.batch_sizes:
            number = max(count, 1) * size
            prompts = warm_up_requests(number, self.visual)
            for temperature in self.settings.temperatures:
                options = DecodingOptions(_WARM_UP_TOKENS, temperature)
                self._find_refused(prompts[:size], size, temperature)
                for start in range(0, count * size, size):
                    batch = prompts[start : start + size]
                    run_interleaved(self.pipe, batch, self._usable(temperature, size), 1, options)

    def _find_refused(self, requests: Sequence[dict[str, Any]], size: int, temperature: float) -> None:
        for method in self.methods:
            if method.peer is not None and (size > 1 or temperature > 0):
                self.refused[method.name, temperature, size] = "other engines decode greedily, one request at a time"
            if method.lossy and temperature > 0:
                self.refused[method.name, temperature, size] = "lossy acceptance is greedy"
            if method.generate_options:  # transformers' speculation does not support every model and batch
                try:
                    run_interleaved(self.pipe, requests, [method], 1, DecodingOptions(8, temperature))
                except Exception as error:  # unsupported cases raise many kinds of errors
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    self.refused[method.name, temperature, size] = reason[:200]


def _method_results(
    pipe: Pipeline,
    requests: Sequence[dict[str, Any]],
    options: DecodingOptions,
    methods: Sequence[Method],
    batches: dict[str, list[TimedBatch]],
) -> dict[str, dict[str, Any]]:
    """Results of each method on a batch, as JSON values.

    Returns:
        By method: ``answers`` (token ids), ``texts``, ``seconds`` of each round, ``request_seconds`` (of its rows),
        ``stats`` of rows, peak ``memory``, and whether each row is ``equal`` to the reference in all rounds, with the
        ``differences`` of lossless methods where it is not. The reference is transformers' answer if greedy and
        measured, else our plain decoding's. Answers of other engines are not compared: None.
    """
    greedy = options.temperature == 0
    reference = batches[BASELINE if greedy and BASELINE in batches else PLAIN][0].answers
    results = {}
    for method in methods:
        rounds = batches[method.name]
        first = rounds[0]
        equal: list[bool | None] = [None] * len(first.answers)
        differences = []
        # Other engines round differently, transformers draws other random numbers.
        if method.peer is None and (greedy or method.generate_options is None):
            for row, expected in enumerate(reference):
                other = next((batch.answers[row] for batch in rounds if batch.answers[row] != expected), None)
                equal[row] = other is None
                if other is not None and not method.lossy:
                    keywords = {"temperature": options.temperature, "top_p": options.top_p}
                    difference = first_difference(pipe, requests[row], keywords, other, expected)
                    differences.append({"row": row, **vars(difference)})
        results[method.name] = {
            "answers": first.answers,
            "texts": [pipe.processor.decode(answer).strip() for answer in first.answers],
            "seconds": [batch.seconds for batch in rounds],
            "request_seconds": [batch.request_seconds for batch in rounds],
            "stats": [dict(vars(stats)) for stats in first.stats],
            "memory": max((batch.memory for batch in rounds if batch.memory is not None), default=None),
            "equal": equal,
            "differences": differences,
        }
    return results
