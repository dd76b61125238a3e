"""A whole run: jobs, records, and what is made of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import AutoConfig

from eval.benchmark.evaluator import Evaluator, Settings
from eval.benchmark.records import Journal, jobs_of
from eval.benchmark.report import write_report
from eval.benchmark.spec_bench import write_answers
from eval.benchmark.summary import summarise
from eval.tasks import TASKS
from mmspec import plugins
from mmspec.errors import UserError
from mmspec.hub import cache_if_offline
from mmspec.jobs import run_jobs
from mmspec.support import from_pretrained
from mmspec.training.files import write_text
from vision.targets import VisionTarget


def sees(model: str) -> bool:
    """Whether a model reads images, from its configuration alone.

    Raises:
        UserError: there is no such model.
    """
    folder = str(plugins.find("models", model)() if model in plugins.names("models") else model)
    try:
        with cache_if_offline("model", folder) as found:
            config = from_pretrained(AutoConfig, folder, **found)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load model {model!r}: {first_line}") from error
    return issubclass(plugins.target_class(config), VisionTarget)


def run(settings: Settings, out: Path, engine: str = "local", workers: int = 1) -> dict[str, Any]:
    """Measure what is missing in a run's folder, then write answers, summary and report.

    Returns:
        What ``summary.json`` holds: ``about`` model and machine, the ``settings``, ``rows`` of figures, ``refused``
        methods.

    Raises:
        UserError: settings that cannot be, or other ones than those that the folder's run was begun with.
    """
    plain = json.loads(json.dumps(dataclasses.asdict(settings)))
    samples = {task: settings.samples(task) for task in settings.tasks}
    journal = Journal(out, plain)
    jobs = jobs_of(settings, {task: len(found) for task, found in samples.items()})
    missing = journal.missing(jobs)
    notes = Console(stderr=True)
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
        bar = progress.add_task("measuring", total=len(jobs), completed=len(jobs) - len(missing))
        for _, record in run_jobs(missing, Evaluator, plain, engine, workers):
            journal.add(record)
            progress.advance(bar)
    records = journal.ordered(jobs)
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
