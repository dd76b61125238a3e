"""Tables, list options and results of the benchmarks."""

import io
import json

import click
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from mmspec.checks import listed
from mmspec.cli.options import Value
from mmspec.errors import UserError
from mmspec.eval.harness.options import SIZES
from mmspec.eval.harness.output import BenchmarkCommand, benchmark, git_commit, make_table, milliseconds, write_result
from mmspec.sampling.params import SamplingParams


def cells(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def test_cells_are_format_strings_or_functions():
    rows = [{"a": 1.234, "b": 0.5}, {"a": None, "b": 0.25}, {"b": 1.0}]
    assert cells(make_table([("A", "{a:.1f}"), ("B", milliseconds("b", 0))], rows)) == [
        ["1.2", "500"],
        ["", "250"],
        ["", "1000"],
    ]


def test_sections_end_where_a_field_changes():
    rows = [{"suite": name} for name in ("x", "x", "y", "z")]
    table = make_table([("suite", "{suite}")], rows, sections=("suite",))
    assert [row.end_section for row in table.rows] == [False, True, True, False]


@click.command(cls=BenchmarkCommand)
@click.option("--sizes", type=SIZES, default="3, 1,3")
@click.option("--temperatures", type=Value(listed(SamplingParams.rule("temperature"))), default="0,0.5")
def command(sizes, temperatures):
    if sizes == (9,):
        raise UserError("nine is too many")
    click.echo(json.dumps([sizes, temperatures]))


def test_list_options_are_parsed_without_duplicates():
    assert json.loads(CliRunner().invoke(command, []).output) == [[3, 1], [0.0, 0.5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "2,0"], "each a whole number >= 1: got (2, 0)"),
        (["--sizes", "2,x"], "each a whole number >= 1: got '2,x'"),
        (["--sizes", ""], "each a whole number >= 1: got ''"),
        (["--temperatures", "inf"], "each 0 or >= 0.0001: got (inf,)"),
        (["--sizes", "9"], "nine is too many"),
    ],
)
def test_usage_errors_exit_with_status_2(options, message):
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 2
    assert message in result.output


def test_results_are_written_atomically(tmp_path, monkeypatch):
    out = tmp_path / "new" / "out.json"
    write_result({"a": 1}, out)
    assert json.loads(out.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write_result({"a": object()}, out)
    assert json.loads(out.read_text()) == {"a": 1}
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]


def test_a_benchmark_prints_and_writes_its_result(tmp_path):
    @benchmark
    @click.option("--size", default=2)
    def measure(size: int) -> dict[str, int]:
        """Measure."""
        return {"size": size, "threads": torch.get_num_threads()}

    before = torch.get_num_threads()
    try:
        run = CliRunner().invoke(measure, ["--threads", "2", "--out", str(tmp_path / "a.json"), "--size", "5"])
    finally:
        torch.set_num_threads(before)
    assert json.loads(run.output) == json.loads((tmp_path / "a.json").read_text()) == {"size": 5, "threads": 2}


def test_no_commit_where_git_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() == ""
