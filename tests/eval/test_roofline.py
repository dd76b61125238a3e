"""Products against the limits of the processor, and load times of GGUF files."""

from __future__ import annotations

import ctypes
import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import mmspec
from mmspec.eval import roofline
from mmspec.eval.harness.output import make_table
from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import BlockLinear
from tests.compiled import needs_kernels
from tests.model_folders import save_gguf

pytestmark = needs_kernels
MEMORY = 3 << 20


def library() -> ctypes.CDLL:
    loaded = cpu_library.library()
    assert isinstance(loaded, ctypes.CDLL)
    return loaded


def test_shares_are_medians_over_the_rounds_of_shares_within_a_round() -> None:
    size = cpu.bytes_of_blocks("int4", roofline.INPUTS, 32)
    assert size == 32 * roofline.INPUTS * 5 // 8
    seconds = {roofline.READ: [1.0, 2.0, 1.5], "int4": [0.5, 1.0, 0.75], ("int4", 4): [4.0, 4.0, 2.0]}
    products = 4 * 32 * roofline.INPUTS
    assert roofline.table_rows(seconds, {"int4": 32}, {"int4": 2 * products}, 2 * size) == [
        {"weights": "int4", "rows": 4, "milliseconds": 4000.0, "gigabytes": size / 4e9, "of_reading": 0.25}
        | {"products": products / 4e9, "of_peak": 0.125}
    ]


def test_reading_takes_every_byte() -> None:
    memory = torch.randint(256, (MEMORY,), dtype=torch.uint8)
    expected = np.bitwise_xor.reduce(memory.numpy().view(np.int64))
    for threads in (1, 2, 3):
        assert library().read_bytes(memory.data_ptr(), MEMORY, threads) == expected


@pytest.mark.parametrize("kind", roofline.FORMATS)
def test_multiply_adds_are_counted(kind: str) -> None:
    number = cpu_library.KINDS.index(kind)
    once = library().multiply_add(number, 1, 1)
    lanes = 16 if library().instructions() == b"AVX-512 VNNI" else 8
    assert once == 12 * lanes * (2 if kind == "bfloat16" else 4)
    for threads in (1, 2, 3):
        assert library().multiply_add(number, 1000, threads) == 1000 * once


def test_products_and_limits_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.randint(60, (MEMORY,), dtype=torch.uint8)
    calls, multiply = [], roofline._multiply
    monkeypatch.setattr(roofline, "_multiply", lambda *given: calls.append(multiply(*given)))
    limits, rows = roofline.measure(library(), memory, ["int4", "q6_k"], [1, 3], rounds=2)
    assert len(calls) == 4 * (1 + 2)  # with a warm-up
    assert limits.keys() == {roofline.READ, "int4", "q6_k"}
    assert [(row["weights"], row["rows"]) for row in rows] == [("int4", 1), ("int4", 3), ("q6_k", 1), ("q6_k", 3)]
    for row in rows:  # weights fill the memory
        assert 0 <= 1 - row["gigabytes"] * row["milliseconds"] * 1e6 / MEMORY < 0.05
    assert make_table(roofline.COLUMNS, rows).row_count == 4


@pytest.mark.parametrize(
    ("share", "least", "threads", "seconds"),
    [
        (0.0, 1, 1, 40.0),
        (0.0, 1, 2, 20.0 + 3 * 0.5 + 3.0),  # chunks of 2, 2, 1, 1, 1 and 1 blocks
        (0.0, 8, 2, 40.0 + 0.5 + 3.0),  # a single chunk
        (3.0, 1, 2, 40.0 + 3 * 0.5 + 3.0),
        (0.0, 1, 4, 10.0 + 2 * 1.5 + 9.0),
    ],
)
def test_simulated_loops_take_the_time_of_the_busiest_thread(share, least, threads, seconds, monkeypatch) -> None:
    """A block takes 5 s, or 10 s where ``share`` slows reading; a claim 0.5 s and a barrier 3 s per further thread."""
    monkeypatch.setattr(roofline, "_RUN", 100 * least)
    costs = roofline.Costs(read=0.025, share=share, products={"int4": 0.05, "q4_k": 0.02}, claim=0.5, barrier=3.0)
    found = roofline.simulated([("int4", 100, 8)], costs, threads)
    assert found == pytest.approx(seconds)
    assert roofline.simulated([("int4", 100, 8)] * 3, costs, threads) == pytest.approx(3 * found)


def test_costs_are_of_loops_with_one_and_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim takes 0.25 s and a barrier 3 s in the second thread; two threads read 1.5 times as much as one."""
    now, given = [0.0], []
    table = [{"weights": "int4", "gigabytes": 4.0}, {"weights": "q5", "gigabytes": 2.0}]

    def multiply_add(kind: int, loops: int, threads: int) -> None:
        now[0] += loops + (threads - 1) * (3.0 + 0.25 * {2: 2, 64: 11}[loops])

    def measure(_: object, *sizes: object) -> object:
        given.append((torch.get_num_threads(), *sizes))
        return {roofline.READ: 5.0 + 5.0 * len(given)}, table

    monkeypatch.setattr(roofline, "clock", lambda: now[0])
    monkeypatch.setattr(roofline, "measure", measure)
    found = roofline.costs_of(SimpleNamespace(multiply_add=multiply_add), "memory", ["int4", "q5"], 8, 3)
    expected = {"read": 1e-10, "share": 2 / 1.5 - 1, "claim": 0.25, "barrier": 3.0}
    assert {name: vars(found)[name] for name in expected} == pytest.approx(expected)
    assert found.products == {"int4": 2.5e-10, "q5": 5e-10}
    assert given == [(1, "memory", ["int4", "q5"], [8], 3), (2, "memory", [], [], 3)]


def test_a_model_s_passes_are_simulated_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_gguf(tmp_path / "a.gguf")
    model = mmspec.load(str(file), drafter=None).target.model
    packed = sum(part._blocks.numel() for part in model.modules() if isinstance(part, BlockLinear))
    simulated, given = roofline.simulated, []
    monkeypatch.setattr(roofline, "simulated", lambda *task: given.append(task) or simulated(*task))
    seconds = {1: iter([9.0, 0.5, 0.25, 7.0]), 2: iter([9.0, 0.25, 0.125, 7.0])}  # the first warms up
    monkeypatch.setattr(roofline, "pass_seconds", lambda *_: {3: next(seconds[torch.get_num_threads()])})
    memory = torch.randint(60, (MEMORY,), dtype=torch.uint8)
    rows = roofline.simulate(library(), memory, str(file), 3, rounds=3)
    assert [(row["threads"], row["measured"]) for row in rows] == [(1, 500), (2, 250), (4, None), (8, None), (16, None)]
    assert rows[0]["simulated"] == pytest.approx(500)
    assert [threads for *_, threads in given] == [1, 1, 2, 4, 8, 16]  # the first for the rest
    assert all(sum(size * count for _, size, count in layers) == packed for layers, *_ in given)
    assert all(row["simulated"] >= row["rest"] > 0 for row in rows)


@pytest.mark.parametrize("simulates", [False, True])
def test_a_run(simulates: bool, tmp_path: Path) -> None:
    options = ["--formats", "int4,q6_k", "--rows", "1,3", "--mib", "1", "--rounds", "1"]
    options += ["--model", str(save_gguf(tmp_path / "a.gguf")), "--nodes", "1,3"] if simulates else []
    done = CliRunner().invoke(roofline.main, options)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    if simulates:
        places = [(nodes, threads) for nodes in (1, 3) for threads in (1, 2, 4, 8, 16)]
        assert [(row["nodes"], row["threads"]) for row in result["rows"]] == places
        return
    build = result["builds"][library().instructions().decode()]
    assert build["limits"].keys() == {roofline.READ, "int4", "q6_k"}
    assert [(row["weights"], row["rows"]) for row in build["rows"]] == list(product(("int4", "q6_k"), (1, 3)))
