"""A complete run of ``mmspec eval``: decodes missing batches, then writes answers, summary and report.

Every conversation starts from the state of drafters and policies after the warm-up. So results do not depend on other
conversations, and a run can be resumed, after its last complete record, or split over several machines.

``answers/`` is in Spec-Bench's format (arXiv 2401.07851). Tokens are counted as generated; the time of a batch is
divided evenly among its rows.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console

import mmspec
from mmspec.compare import first_difference
from mmspec.engine.threads import fix_threads
from mmspec.errors import UserError, first_line
from mmspec.eval.harness.output import describe
from mmspec.eval.harness.peers import engines
from mmspec.eval.harness.prompts import warm_up_requests
from mmspec.eval.harness.timing import DecodingOptions, Method, TimedBatch, pass_costs, results_of, run_interleaved
from mmspec.eval.suite import SuiteSettings
from mmspec.eval.suite.methods import BASELINE, PLAIN, parse_methods
from mmspec.eval.suite.report import write_report
from mmspec.eval.suite.summary import copy_lengths, summarise
from mmspec.eval.suite.tasks import TASKS, Sample
from mmspec.files import append_row, check_settings, read_json, read_rows, write_text
from mmspec.jobs import run_jobs
from mmspec.pipeline import Pipeline
from mmspec.progress import show_progress

Job = dict[str, Any]
_WARM_UP_TOKENS = 64
_RECORDS = "records.jsonl"


class Evaluator:
    """A model with its methods, callable with a job to decode a batch of conversations. ``refused``: the reason why a
    method cannot decode, by (method, temperature, batch size)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.settings = SuiteSettings(**settings)
        if self.settings.threads:
            fix_threads(self.settings.threads)
        pipe = mmspec.load(self.settings.model, drafter=None, device=self.settings.device, dtype=self.settings.dtype)
        self.pipe = pipe
        peers = engines(self.settings.model, torch.get_num_threads(), self.settings.peers)
        self.methods = parse_methods(self.settings.methods, pipe.target, peers, pipe.name)
        for method in self.methods:
            method.max_num_seqs = max(method.max_num_seqs, *self.settings.batch_sizes)
        self.refused: dict[tuple[str, float, int], str] = {}
        self._samples: dict[str, list[Sample]] = {}
        self._warm_up()

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decode a job's batch of conversations: the ``group``-th of ``batch`` samples of a ``task``.

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
            prompts = warm_up_requests(number, self.pipe.processor.reads_media)
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
    """``results_of`` each method on a batch, and ``texts``, whether each row is ``equal`` to the reference in all
    rounds, and the ``differences`` of lossless methods where it is not. The reference is transformers' answer if greedy
    and measured, else our plain decoding's. Answers of other engines are not compared: None."""
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
            "texts": [pipe.processor.decode(answer).strip() for answer in first.answers],
            **results_of(rounds),
            "equal": equal,
            "differences": differences,
        }
    return results


def job_key(job: Job) -> tuple[Any, ...]:
    return job["task"], job["temperature"], job["batch"], job["group"]


def read_records(folder: Path, settings: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The records of a run by ``job_key``. A new run's folder gets its ``settings.json``."""
    settings_file, path, records = folder / "settings.json", folder / _RECORDS, {}
    if settings_file.exists():
        check_settings(folder, read_json(settings_file), settings)
    else:
        write_text(settings_file, json.dumps(settings, indent=1) + "\n")
    for number, record in read_rows(path, cut=True):
        if missing := {"task", "temperature", "batch", "group", "turns"} - record.keys():
            raise UserError(f"{path}, line {number}: expected a record with {min(missing)}, received none")
        records[job_key(record)] = record
    write_text(path, "".join(json.dumps(record) + "\n" for record in records.values()))
    return records


def run_suite(settings: SuiteSettings, out: Path, engine: str = "local", workers: int = 1) -> dict[str, Any]:
    """Decode all conversations that a run's folder has no record of, then write answers, summary and report. Returns
    the content of ``summary.json``: ``about`` model and machine, ``settings``, ``rows`` of results, ``refused``."""
    plain = json.loads(json.dumps(dataclasses.asdict(settings)))
    samples = {task: settings.samples(task) for task in settings.tasks}
    known = read_records(out, plain)
    jobs = [
        {"task": task, "temperature": temperature, "batch": size, "group": group}
        for task, temperature, size in product(settings.tasks, settings.temperatures, settings.batch_sizes)
        for group in range(-(-len(samples[task]) // size))
    ]
    missing = [job for job in jobs if job_key(job) not in known]
    done = len(jobs) - len(missing)
    with show_progress(Console(stderr=True), "measuring") as show:
        show(done, len(jobs))
        for job, record in run_jobs(missing, Evaluator, plain, engine, workers):
            append_row(out / _RECORDS, record)
            known[job_key(job)] = record
            done += 1
            show(done, len(jobs), part=job["task"])
    records = [known[job_key(job)] for job in jobs]
    write_answers(records, out / "answers")
    refused = dict.fromkeys(
        (method, record["temperature"], record["batch"], why)
        for record in records
        for method, why in record["refused"].items()
    )
    summary = {
        "about": records[0]["about"],
        "settings": plain,
        "rows": summarise(records, samples, {task: TASKS[task].score for task in settings.tasks}),
        "refused": [dict(zip(("method", "temperature", "batch", "reason"), one, strict=True)) for one in refused],
    }
    write_text(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_report(summary, out)
    return summary


def answer_lines(record: dict[str, Any], method: str) -> list[dict[str, Any]]:
    """One method's answers to a batch of conversations, a JSON object per conversation."""
    model_id = f"{Path(record['about']['model']).name}-{method}"
    lines = []
    for row, (sample, category) in enumerate(zip(record["ids"], record["categories"], strict=True)):
        choice: dict[str, Any] = {"index": 0, "turns": [], "decoding_steps": [], "new_tokens": [], "wall_time": []}
        accepted: list[int] = []
        for turn in record["turns"]:
            if row not in turn["rows"]:
                continue
            result, index = turn["methods"][method], turn["rows"].index(row)
            tokens = len(result["answers"][index])
            # The prefill gives the first token; without statistics, assume one pass for each further token.
            steps = result["stats"][index]["accept_lengths"] if result["stats"] else [1] * (tokens - 1)
            choice["turns"].append(result["texts"][index])
            choice["decoding_steps"].append(len(steps))
            choice["new_tokens"].append(tokens)
            choice["wall_time"].append(median(seconds["total"] for seconds in result["seconds"]) / len(turn["rows"]))
            accepted += steps
        choice["accept_lengths"] = accepted
        question_id = int(sample) if sample.isdecimal() else sample
        head = {"question_id": question_id, "category": category or record["task"], "model_id": model_id}
        lines.append({**head, "choices": [choice], "tstamp": record["tstamp"]})
    return lines


def write_answers(records: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write all answer files of a run, named in Spec-Bench's scheme."""
    files: dict[str, list[str]] = {}
    for record in records:
        about, batch = record["about"], f"-batch-{record['batch']}" if record["batch"] > 1 else ""
        for method in record["turns"][0]["methods"]:
            name = f"{Path(about['model']).name}-{method}-{about['dtype']}-temp-{record['temperature']}{batch}"
            name = re.sub(r"[^\w.@+-]+", "_", name) + ".jsonl"
            files.setdefault(name, []).extend(json.dumps(line) for line in answer_lines(record, method))
    for name, lines in files.items():
        write_text(folder / name, "".join(f"{line}\n" for line in lines))
