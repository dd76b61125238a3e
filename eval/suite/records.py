"""A run's folder: its settings, and a record per batch of conversations.

``settings.json`` is written before anything is measured; ``records.jsonl`` gets a line per job. A stopped run resumes
after its last complete line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec.errors import UserError
from mmspec.eval.suite.settings import SuiteSettings
from mmspec.files import check_settings, write_text

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
    """The unique key of a job."""
    return job["task"], job["temperature"], job["batch"], job["group"]


class RunRecords:
    """The records of a run, kept in its folder.

    Args:
        folder: of the run; created if missing.
        settings: of the run.

    Raises:
        UserError: the folder holds a run with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._path = folder / "records.jsonl"
        settings_file = folder / "settings.json"
        try:
            if settings_file.exists():
                check_settings(folder, json.loads(settings_file.read_text()), settings)
            else:
                write_text(settings_file, json.dumps(settings, indent=1) + "\n")
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(f"--out must be a folder to write a run to: {folder} is not ({error})") from error
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:  # a line cut off by a kill
                break
        if len(records) < len(lines) or (lines and not self._path.read_text().endswith("\n")):
            write_text(self._path, "".join(json.dumps(record) + "\n" for record in records))
        self.records = {job_key(record): record for record in records}

    def add(self, record: dict[str, Any]) -> None:
        """Append a job's record."""
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records[job_key(record)] = record

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs without a record."""
        return [job for job in jobs if job_key(job) not in self.records]

    def ordered(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """The records of some jobs, in the order of the jobs."""
        return [self.records[job_key(job)] for job in jobs if job_key(job) in self.records]
