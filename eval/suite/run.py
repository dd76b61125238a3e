"""A complete run of ``mmspec eval``: decodes missing batches, then writes answers, summary and report.

A run's folder has its settings and a record per batch of conversations. ``settings.json`` is written before anything is
measured; ``records.jsonl`` gets a line per job. A stopped run resumes after its last complete line.

``answers/`` is in Spec-Bench's format, for its ``evaluation/speed.py`` and ``equal.py`` (arXiv 2401.07851): a file per
method, temperature and batch size, a line per conversation. Tokens are counted as generated; the time of a batch is
divided evenly among its rows.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from mmspec import plugins
from mmspec.errors import UserError
from mmspec.eval.suite.evaluator import Evaluator
from mmspec.eval.suite.report import write_report
from mmspec.eval.suite.settings import SuiteSettings
from mmspec.eval.suite.summary import summarise
from mmspec.eval.suite.tasks import TASKS
from mmspec.files import append_row, check_settings, read_json, read_rows, write_text
from mmspec.jobs import run_jobs
from mmspec.loading import load_config
from mmspec.progress import show_progress

Job = dict[str, Any]


def suite_jobs(settings: SuiteSettings, counts: dict[str, int]) -> list[Job]:
    """All batches of a run, given the number of samples of each task."""
    return [
        {"task": task, "temperature": temperature, "batch": size, "group": group}
        for task in settings.tasks
        for temperature in settings.temperatures
        for size in settings.batch_sizes
        for group in range(-(-counts[task] // size))
    ]


def job_key(job: Job) -> tuple[Any, ...]:
    return job["task"], job["temperature"], job["batch"], job["group"]


class RunRecords:
    """The records of a run, stored in its folder.

    Raises:
        UserError: the folder holds a run with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._path = folder / "records.jsonl"
        settings_file = folder / "settings.json"
        if settings_file.exists():
            check_settings(folder, read_json(settings_file), settings)
        else:
            write_text(settings_file, json.dumps(settings, indent=1) + "\n")
        self.records = {}
        for number, record in read_rows(self._path, cut=True):
            if missing := {"task", "temperature", "batch", "group", "turns"} - record.keys():
                raise UserError(f"{self._path}, line {number}: expected a record with {min(missing)}, received none")
            self.records[job_key(record)] = record
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in self.records.values()))

    def add(self, record: dict[str, Any]) -> None:
        append_row(self._path, record)
        self.records[job_key(record)] = record

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if job_key(job) not in self.records]

    def ordered(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Records of ``jobs``, in the same order."""
        return [self.records[job_key(job)] for job in jobs if job_key(job) in self.records]


def is_visual(model: str) -> bool:
    """Whether a model takes images, from its configuration.

    Raises:
        UserError: the model cannot be loaded.
    """
    return plugins.target_class(load_config(model)).processor_class.reads_media


def run_suite(settings: SuiteSettings, out: Path, engine: str = "local", workers: int = 1) -> dict[str, Any]:
    """Decode all conversations that a run's folder has no record of, then write answers, summary and report.

    Returns:
        The content of ``summary.json``: ``about`` model and machine, ``settings``, ``rows`` of results, ``refused``
        methods.

    Raises:
        UserError: invalid settings, or a folder that holds a run with other settings.
    """
    plain = json.loads(json.dumps(dataclasses.asdict(settings)))
    samples = {task: settings.samples(task) for task in settings.tasks}
    run_records = RunRecords(out, plain)
    jobs = suite_jobs(settings, {task: len(part) for task, part in samples.items()})
    missing = run_records.missing(jobs)
    done = len(jobs) - len(missing)
    with show_progress(Console(stderr=True), "measuring") as show:
        show(done, len(jobs))
        for job, record in run_jobs(missing, Evaluator, plain, engine, workers):
            run_records.add(record)
            done += 1
            show(done, len(jobs), part=job["task"])
    records = run_records.ordered(jobs)
    write_answers(records, out / "answers")
    refused = {
        (method, record["temperature"], record["batch"]): reason
        for record in records
        for method, reason in record["refused"].items()
    }
    summary = {
        "about": records[0]["about"],
        "settings": plain,
        "rows": summarise(records, samples, {task: TASKS[task].score for task in settings.tasks}),
        "refused": [
            {"method": method, "temperature": temperature, "batch": batch, "reason": reason}
            for (method, temperature, batch), reason in refused.items()
        ],
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


def write_answers(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write all answer files of a run, named in Spec-Bench's scheme; returns their paths."""
    files: dict[str, list[str]] = {}
    for record in records:
        about, batch = record["about"], f"-batch-{record['batch']}" if record["batch"] > 1 else ""
        for method in record["turns"][0]["methods"]:
            name = f"{Path(about['model']).name}-{method}-{about['dtype']}-temp-{record['temperature']}{batch}"
            name = re.sub(r"[^\w.@+-]+", "_", name) + ".jsonl"
            files.setdefault(name, []).extend(json.dumps(line) for line in answer_lines(record, method))
    for name, lines in files.items():
        write_text(folder / name, "".join(f"{line}\n" for line in lines))
    return [folder / name for name in files]
