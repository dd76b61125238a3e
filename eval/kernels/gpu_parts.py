"""Runs the parts of the GPU benchmark, each in a process of its own, so that a failure costs one part only.

A part's process writes its rows to standard output, one JSON object per line; the parent writes the whole result after
every row. Rows before a failure are kept, the failure is recorded, and the other parts still run.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter as clock
from typing import IO, Any

import torch
import transformers

from mmspec.eval.harness.output import git_commit
from mmspec.ops import graphs, kernels

Row = dict[str, Any]
Rows = Iterator[Row]

SAME = ("device", "torch", "transformers", "commit", "quick")
"""Facts of a machine that must agree for a run to be resumed."""

_LOG_CHARACTERS = 4000  # of a failed part's log that are kept


def describe_machine(device: torch.device) -> Row:
    """Device, software versions and commit."""
    facts: Row = {
        "device": platform.processor() or platform.machine(),
        "kernels": kernels.in_use(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": git_commit(),
    }
    if device.type == "cuda":
        import triton

        properties: Any = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return facts


def finished_parts(out: Path | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Finished parts of an earlier run on the same machine and commit."""
    try:
        earlier = json.loads(out.read_text()) if out is not None else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(earlier, dict) or any(earlier.get(key) != facts[key] for key in SAME):
        return {}
    return {name: part for name, part in earlier["parts"].items() if "seconds" in part and "error" not in part}


# ---------------------------------------------------------------------- in a part's process


def write_rows(rows: Rows) -> None:
    """Write rows to standard output, which all other output leaves for standard error from now on.

    Raises:
        SystemExit: a row was an error.
    """
    with os.fdopen(os.dup(1), "w") as stream:
        os.dup2(2, 1)
        failed = False
        for row in rows:
            failed |= "error" in row and "where" in row
            stream.write(json.dumps(row) + "\n")
            stream.flush()
        if (failure := graphs.capture_failure()) is not None:
            stream.write(json.dumps({"error": "a CUDA graph could not be captured", "where": failure}) + "\n")
            failed = True
    sys.exit(failed)


def row_or_error(step: Callable[[], Row | Rows], device: torch.device, **facts: Any) -> Rows:
    """The rows of a step, followed by an error row if it fails.

    Args:
        **facts: fields of the error row that say which step it was.

    Raises:
        Exception: the step's, if the device can no longer be used, e.g. after an illegal memory access.
    """
    try:
        result = step()
        yield from [result] if isinstance(result, dict) else result
    except Exception as error:  # the other steps still run
        if device_is_lost(device):
            raise
        yield {**facts, "error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-2000:]}


def device_is_lost(device: torch.device) -> bool:
    """Whether this process can no longer use the device."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


# ---------------------------------------------------------------------- in the parent


def run_part(command: Sequence[str], seconds: float, on_row: Callable[[Row], None]) -> str | None:
    """Run a part's process.

    Args:
        command: of the process.
        seconds: after which it is ended.
        on_row: called with every row.

    Returns:
        Why it failed, with the end of its log; None if it did not.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True) as process,
    ):
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                on_row(json.loads(line))
            status = process.wait()
        finally:
            timer.cancel()
            timer.join()
            _kill(process)
        if late.is_set():
            return f"not finished after {seconds:.0f} s\n{_end_of(log)}"
        if status:
            name = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit status {status}"
            return f"{name}\n{_end_of(log)}"
    return None


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end_of(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-_LOG_CHARACTERS:].strip()


def run_parts(
    limits: Mapping[str, float],
    content: dict[str, Any],
    command: Callable[[str], Sequence[str]],
    deadline: float,
    save: Callable[[], None],
    report: Callable[[str], None],
) -> None:
    """Run all parts that ``content`` lacks, and add their rows to it.

    A part that failed has the field ``error``; one for which no time was left is ``skipped``.

    Args:
        limits: seconds of each part.
        command: of a part's process.
        deadline: by ``time.perf_counter``; parts are ended there, and none is started after it.
        save: called after every row.
        report: called with the name of each part that has ended.
    """
    for name in (name for name in limits if name not in content["parts"]):
        start, part = clock(), content["parts"].setdefault(name, {"rows": []})

        def on_row(row: Row, rows: list[Row] = part["rows"]) -> None:
            rows.append(row)
            save()

        if start >= deadline:
            part["skipped"] = "no time was left"
        else:
            failure = run_part(command(name), min(limits[name], deadline - start), on_row)
            if failed := [row["error"] for row in part["rows"] if "where" in row]:
                part["error"] = "; ".join(failed)
            elif failure is not None:
                part["error"], _, part["log"] = failure.partition("\n")
            part["seconds"] = clock() - start
        save()
        report(name)


def failures(content: Mapping[str, Any]) -> dict[str, str]:
    """Why parts failed, by name."""
    return {name: part["error"] for name, part in content["parts"].items() if "error" in part}
