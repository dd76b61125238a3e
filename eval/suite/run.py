"""A whole run of ``mmspec eval``: decodes what is missing, then writes answers, summary and report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from mmspec import plugins
from mmspec.eval.suite.evaluator import Evaluator
from mmspec.eval.suite.records import RunRecords, suite_jobs
from mmspec.eval.suite.report import write_report
from mmspec.eval.suite.settings import SuiteSettings
from mmspec.eval.suite.spec_bench import write_answers
from mmspec.eval.suite.summary import summarise
from mmspec.eval.suite.tasks import TASKS
from mmspec.files import write_text
from mmspec.jobs import run_jobs
from mmspec.loading import load_config
from mmspec.progress import show_progress


def is_visual(model: str) -> bool:
    """Whether a model takes images, from its configuration.

    Raises:
        UserError: the model cannot be loaded.
    """
    return plugins.target_class(load_config(model)).processor_class.reads_media


def run_suite(settings: SuiteSettings, out: Path, engine: str = "local", workers: int = 1) -> dict[str, Any]:
    """Decode all conversations that a run's folder has no record of, then write answers, summary and report.

    Returns:
        The content of ``summary.json``: ``about`` model and machine, ``settings``, ``rows`` of figures, ``refused``
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
