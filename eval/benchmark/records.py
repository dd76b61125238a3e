"""A run's folder: what it was begun with and what was measured, a line per batch of conversations.

``settings.json`` is written before anything is measured, ``records.jsonl`` grows by a line per job. A run that was
stopped goes on behind its last whole line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.benchmark.evaluator import Settings
from mmspec.errors import UserError
from mmspec.training.files import check_settings, write_text

Job = dict[str, Any]


def jobs_of(settings: Settings, counts: dict[str, int]) -> list[Job]:
    """All batches of a run, given how many samples each task has."""
    return [
        {"task": task, "temperature": temperature, "batch": size, "group": group}
        for task in settings.tasks
        for temperature in settings.temperatures
        for size in settings.batch_sizes
        for group in range(-(-counts[task] // size))
    ]


def key_of(job: Job) -> tuple[Any, ...]:
    """What tells jobs apart."""
    return job["task"], job["temperature"], job["batch"], job["group"]


class Journal:
    """The records of a run.

    Args:
        folder: of the run; made where there is none.
        settings: of the run.

    Raises:
        UserError: the folder holds a run of other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._path = folder / "records.jsonl"
        begun = folder / "settings.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if begun.exists():
                check_settings(folder, json.loads(begun.read_text()), settings)
            else:
                write_text(begun, json.dumps(settings, indent=1) + "\n")
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(f"--out must be a folder to write a run to: {folder} is not ({error})") from error
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:  # the line that a kill cut off
                break
        if len(records) < len(lines) or (lines and not self._path.read_text().endswith("\n")):
            write_text(self._path, "".join(json.dumps(record) + "\n" for record in records))
        self.records = {key_of(record): record for record in records}

    def add(self, record: dict[str, Any]) -> None:
        """Note a job's result."""
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records[key_of(record)] = record

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs that have no record yet."""
        return [job for job in jobs if key_of(job) not in self.records]

    def ordered(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """The records of these jobs, in their order."""
        return [self.records[key_of(job)] for job in jobs if key_of(job) in self.records]
