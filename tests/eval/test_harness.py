"""Tables, list options and results of the benchmarks, held-out conversations, profiled drafters; SIGTERM ends them."""

import io
import json
import os
import signal
import time

import click
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from rich.console import Console

import mmspec
from mmspec.cli.options import Finite, Listed
from mmspec.drafters.recycle import Recycle
from mmspec.errors import UserError
from mmspec.eval.harness.output import (
    BenchmarkCommand,
    benchmark,
    git_commit,
    make_table,
    mebibytes,
    milliseconds,
    print_result,
)
from mmspec.eval.harness.prompts import Questions, held_out_requests, warm_up_requests
from mmspec.eval.harness.timing import ProfiledDrafter, TimedBatch, results_of
from mmspec.eval.suite import SIZES
from mmspec.pipeline import Pipeline
from mmspec.vision.drafters.msd import MSD
from tests.model_folders import save_llava
from tests.tiny.models import msd_network


def test_cells_are_format_strings_or_functions_and_sections_end_where_a_field_changes():
    rows = [{"a": 0.0, "b": 0.5, "c": [7.1], "s": "x"}, {"a": None, "b": 0.25, "c": [None], "s": "x"}]
    rows = [{**row, "d": 3 << 20} for row in rows] + [{"b": 1.23456, "d": None, "s": "y"}]
    cells = ("{a:.1f}", milliseconds("b", 0), milliseconds("b"), "{c[0]:.0f}", mebibytes("d"))
    table = make_table(list(zip("ABCDE", cells, strict=True)), rows, sections=("s",))
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line.strip("│").split("│")] for line in lines] == [
        ["0.0", "500", "500.00", "7", "3"],
        ["", "250", "250.00", "", "3"],
        ["", "1235", "1234.56", "", ""],
    ]
    assert [row.end_section for row in table.rows] == [False, True, False]


@click.command(cls=BenchmarkCommand)
@click.option("--sizes", type=SIZES, default="3, 1,3")
@click.option("--temperatures", type=Listed(Finite(0)), default="0,0.5")
def command(sizes, temperatures):
    if sizes == (9,):
        raise UserError("nine is too many")
    click.echo(json.dumps([sizes, temperatures]))


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ([], 0, "[[3, 1], [0.0, 0.5]]"),  # without duplicates
        (["--sizes", "2,0"], 2, "0 is not in the range x>=1."),
        (["--sizes", "2,x"], 2, "'x' is not a valid integer range."),
        (["--sizes", ""], 2, "'' is not a valid integer range."),
        (["--temperatures", "inf"], 2, "inf is not a finite number."),
        (["--sizes", "9"], 2, "nine is too many"),
    ],
)
def test_list_options(options, status, message):
    result = CliRunner().invoke(command, options)
    assert result.exit_code == status
    assert message in result.output


def test_a_benchmark_prints_and_writes_its_result_atomically(tmp_path):
    @benchmark
    @click.option("--size", default=2)
    def measure(size: int) -> dict[str, int]:
        """Measure."""
        return {"size": size, "threads": torch.get_num_threads()}

    out = tmp_path / "new" / "out.json"
    threads = torch.get_num_threads()
    run = CliRunner().invoke(measure, [f"--threads={threads + 1}", "--out", str(out), "--size", "5"])
    assert json.loads(run.output) == json.loads(out.read_text()) == {"size": 5, "threads": threads + 1}
    assert torch.get_num_threads() == threads
    with pytest.raises(TypeError):
        print_result({"a": object()}, out)
    assert json.loads(out.read_text())["size"] == 5
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]


def test_no_commit_where_git_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() == ""


def test_sigterm_ends_a_benchmark_as_an_exception_does():
    ended, before = [], signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @click.command(cls=BenchmarkCommand)
    def study():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        finally:
            ended.append(True)

    try:
        assert CliRunner().invoke(study).exit_code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended


def test_a_later_question_follows_the_answers_so_far():
    picture = Image.new("RGB", (8, 8))
    conversation = Questions(("What is it?", "And its colour?", "Why?"), (picture,))
    request = conversation.request(["A star. ", "Red."])
    assert request["images"] == [picture]
    first, *later = request["prompt"]
    assert first == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    assert [message["content"] for message in later] == ["A star.", "And its colour?", "Red.", "Why?"]
    assert [message["role"] for message in later] == ["assistant", "user"] * 2
    assert Questions(("Hello!",)).request([])["prompt"] == "Hello!"


def test_held_out_sets_have_no_prompt_twice():
    clips = held_out_requests("clips", 8)
    others = held_out_requests("images", 24) + warm_up_requests(8, visual=True) + held_out_requests("mixed", 96)
    shown = [request["images"][0].tobytes() for request in others]
    assert len(set(shown)) == len(shown)
    assert len({clip["videos"][0].frames[0].tobytes() for clip in clips}) == 8
    assert [clip["videos"][0].times for clip in clips] == [[float(k) for k in range(8)]] * 8
    texts = [request["prompt"] for request in held_out_requests("prompts", 96) + warm_up_requests(8, visual=False)]
    assert len(set(texts)) == len(texts)
    repeated = warm_up_requests(11, visual=False)
    assert repeated[8:] == repeated[:3]


def test_the_peak_of_memory_is_that_of_all_rounds():
    rounds = [TimedBatch([[1]], [], {"total": 1.0, "decoding": 0.5}, memory) for memory in (None, 5, 7, 6)]
    assert results_of(rounds)["memory"] == 7
    assert results_of(rounds[:1])["memory"] is None


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return mmspec.load(str(save_llava(tmp_path_factory.mktemp("tiny"))), drafter=None)


def test_profiling_counts_trees(pipe):
    assert ProfiledDrafter(Recycle()).learns
    observer = ProfiledDrafter(MSD(msd_network(pipe.model), depth=3, total_tokens=6))
    stats = Pipeline(pipe.target, pipe.processor, observer).generate("A star", max_new_tokens=9, nodes=6).stats
    assert observer.proposals == sum(sum(stats.accept_lengths[:k]) < 7 for k in range(stats.num_spec_steps))
    assert 0 < observer.seconds < stats.draft_seconds
