"""Load time of GGUF files, compared with llama.cpp: ``python -m mmspec.eval opening``.

In each round, for each file, in new processes: this package loads it with an empty cache (kernels are compiled before)
and once more, and llama.cpp's server starts until it answers. Seconds are without the imports of Python modules, which
have a column of their own; ``written`` is the data left on disk. Medians over the rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter as clock
from typing import Any

import click

from mmspec.errors import UserError
from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.eval.harness.peers import LlamaServer, gguf_file
from mmspec.eval.harness.timing import memory_of
from mmspec.eval.suite import llama_server_option
from mmspec.files import cache_folder
from mmspec.loading import load_config

FIRST, LATER, LLAMA = "mmspec, first", "mmspec, later", "llama.cpp"
_PROGRAM = """
import builtins, importlib, json, sys, threading, time
start, imports, within = time.perf_counter(), 0.0, False

def timed(plain):
    def call(*args, **options):
        global imports, within
        if within or threading.current_thread() is not threading.main_thread():
            return plain(*args, **options)
        within, begun = True, time.perf_counter()
        try:
            return plain(*args, **options)
        finally:
            within, imports = False, imports + time.perf_counter() - begun
    return call

builtins.__import__, importlib.import_module = timed(builtins.__import__), timed(importlib.import_module)
import torch
from mmspec import loading
torch.set_num_threads(int(sys.argv[2]))
pipe = loading.load(sys.argv[1], drafter=None)
seconds = time.perf_counter() - start - imports
status = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Vm"))
memory = {name: 1024 * int(status[key].split()[0]) for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))}
print(json.dumps({"imports": imports, "seconds": seconds, **memory}))
"""


@benchmark
@click.option("--model", "models", multiple=True, required=True, help="A GGUF file, or a name; may be repeated.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=2, show_default=True)
@llama_server_option
def main(models: tuple[str, ...], rounds: int, threads: int, llama_server: str | None) -> dict[str, Any]:
    """Measure how long a model takes until it can answer, and its memory."""
    for model in models:
        load_config(model)
    files = {model: gguf_file("this package", model) for model in models}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    _open(next(iter(files.values())), threads, cache_folder())  # compiles the kernels, reads the imports from disk
    for _ in range(rounds):
        for model, file in files.items():
            for name, row in _measured(file, threads, llama_server):
                found.setdefault((model, name), []).append(row)
    rows = []
    for (model, name), measured in found.items():
        medians = {key: median(one[key] for one in measured) for key in measured[0]}
        size = Path(files[model]).stat().st_size
        rows.append({"model": Path(model).name, "by": name, **medians, "of file": medians["resident"] / size})
    wide_console().print(make_table(_COLUMNS, rows, title=f"medians of {rounds} rounds, threads: {threads}"))
    return {"threads": threads, "rounds": rounds, "rows": rows}


def _measured(file: str, threads: int, llama_server: str | None) -> Iterator[tuple[str, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        if (cache_folder() / "kernels").is_dir():
            shutil.copytree(cache_folder() / "kernels", cache / "kernels")
        kernels = _size(cache)
        for name in (FIRST, LATER):
            yield name, {**_open(file, threads, cache), "written": _size(cache) - kernels}
    if llama_server:
        start = clock()
        server = LlamaServer(llama_server, file, threads)
        resident = memory_of(server.pid, "VmRSS") or 0
        yield LLAMA, {"imports": 0.0, "seconds": clock() - start, "resident": resident, "peak": resident, "written": 0}
        server.close()


def _open(file: str, threads: int, cache: Path) -> dict[str, float]:
    """Load a file in a new process."""
    environment = {**os.environ, "MMSPEC_CACHE": str(cache)}
    command = [sys.executable, "-c", _PROGRAM, file, str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"cannot load {file}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


_COLUMNS: list[Column] = [
    ("model", "{model}"),
    ("by", "{by}"),
    ("seconds", "{seconds:.2f}"),
    ("imports", "{imports:.1f}"),
    ("resident, bytes", "{resident:,.0f}"),
    ("peak", "{peak:,.0f}"),
    ("of the file", "{of file:.2f}"),
    ("written", "{written:,.0f}"),
]
