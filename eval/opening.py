"""Load time of GGUF files, compared with llama.cpp: ``python -m mmspec.eval opening``.

In each round, for each file, in new processes: this package loads it for the first time (its part of the cache is
empty; kernels are compiled before) and once more, and llama.cpp's server starts until it answers, if
``--llama-server`` is given. Seconds are without the imports of Python modules, which have a column of their own;
memory is the resident set of the process with the loaded model, and its peak; ``written`` is the data left on disk.
Medians over the rounds.

``--write FILE`` makes a file to load: blocks of random weights in the formats of Q4_K_M, with the metadata of
``--model`` but for the sizes of Qwen2.5-7B.
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
import numpy as np
import psutil

from mmspec.cli.options import OUT_FILE
from mmspec.errors import UserError
from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.eval.harness.peers import LlamaServer, gguf_file
from mmspec.eval.suite.settings import llama_server_option
from mmspec.files import atomic, cache_folder
from mmspec.loading import load_config
from mmspec.targets.gguf import GGUFFile

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
import psutil, torch
from mmspec import loading
torch.set_num_threads(int(sys.argv[2]))
pipe = loading.load(sys.argv[1], drafter=None)
seconds = time.perf_counter() - start - imports
peak = next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"imports": imports, "seconds": seconds,
                  "resident": psutil.Process().memory_info().rss, "peak": peak}))
"""
SIZES = {"embedding_length": 3584, "feed_forward_length": 18944, "block_count": 28}
SIZES |= {"attention.head_count": 28, "attention.head_count_kv": 4}


@benchmark
@click.option("--model", "models", multiple=True, required=True, help="A GGUF file, or a name; may be repeated.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--write", type=OUT_FILE, help="Write a file of random weights in a 7B's sizes instead.")
@llama_server_option
def main(
    models: tuple[str, ...], rounds: int, threads: int, write: Path | None, llama_server: str | None
) -> dict[str, Any]:
    """Measure how long a model takes until it can answer, and its memory."""
    for model in models:
        load_config(model)
    if write is not None:
        return {"written": str(write), "bytes": write_random(Path(gguf_file("this package", models[0])), write)}
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
        resident = psutil.Process(server.pid).memory_info().rss
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


def write_random(like: Path, out: Path) -> int:
    """Write a GGUF file of random weights in a 7B's sizes, in the mixture of formats that is called Q4_K_M.

    Args:
        like: GGUF file to copy other metadata and the vocabulary from.

    Returns:
        File size in bytes.
    """
    import gguf

    source = GGUFFile(like)
    architecture, vocab = source.architecture(), source.tensors["token_embd.weight"].shape[0]
    hidden, inner, layers = (SIZES[name] for name in ("embedding_length", "feed_forward_length", "block_count"))
    narrow = hidden // SIZES["attention.head_count"] * SIZES["attention.head_count_kv"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (hidden, hidden),
        "attn_k": (narrow, hidden),
        "attn_v": (narrow, hidden),
    }
    shapes |= {"attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}
    shapes |= {"ffn_down": (hidden, inner)}
    with atomic(out) as part:
        writer = gguf.GGUFWriter(str(part), architecture)
        kinds: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        kinds |= {str: writer.add_string, list: writer.add_array}
        for key, value in source.metadata.items():
            value = SIZES.get(key.removeprefix(f"{architecture}."), value)
            if key != "general.architecture":
                kinds[type(value)](key, value)
        tensors: list[tuple[str, str, tuple[int, ...]]] = [("token_embd.weight", "Q4_K", (vocab, hidden))]
        tensors.append(("output.weight", "Q6_K", (vocab, hidden)))
        for block in range(layers):
            more = block < layers // 8 or block >= 7 * layers // 8 or (block - layers // 8) % 3 == 2
            for name, shape in shapes.items():
                kind = "Q6_K" if more and name in ("attn_v", "ffn_down") else "Q4_K"
                tensors.append((f"blk.{block}.{name}.weight", kind, shape))
            biases = [(name, shapes[name][0]) for name in ("attn_q", "attn_k", "attn_v")]
            tensors += [(f"blk.{block}.{name}.bias", "F32", (size,)) for name, size in biases]
            tensors += [(f"blk.{block}.{name}_norm.weight", "F32", (hidden,)) for name in ("attn", "ffn")]
        tensors.append(("output_norm.weight", "F32", (hidden,)))
        for name, kind, shape in tensors:
            one = gguf.GGMLQuantizationType[kind]
            count, size = gguf.GGML_QUANT_SIZES[one]
            bytes_of = int(np.prod(shape)) // count * size
            stored = (*shape[:-1], shape[-1] // count * size) if count > 1 else shape
            writer.add_tensor_info(name, stored, np.dtype(np.uint8 if count > 1 else np.float32), bytes_of, one)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        random = np.random.default_rng(0)
        for name, kind, shape in tensors:
            writer.write_tensor_data(_random(random, kind, shape, name.endswith("norm.weight")))
        writer.close()
    return out.stat().st_size


def _random(random: np.random.Generator, kind: str, shape: tuple[int, ...], ones: bool) -> Any:
    """Blocks of random codes whose scales make weights of about 1 / sqrt(features)."""
    import gguf

    if kind == "F32":
        return np.ones(shape, np.float32) if ones else np.zeros(shape, np.float32)
    count, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (int(np.prod(shape)) // count, size), dtype=np.uint8)
    step = 1 / (40 if kind == "Q6_K" else 60) / 32 / shape[-1] ** 0.5
    halves = {"Q4_K": {0: step, 2: 8 * step}, "Q6_K": {208: step}}[kind]
    for place, value in halves.items():
        blocks[:, place : place + 2] = np.full((len(blocks), 1), value, np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
