"""The compiled kernels in the cache: made once, checked before they are loaded, and one line where they cannot be."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from mmspec.cli import main
from mmspec.ops import compiler, cpu_library
from mmspec.quantisation.linear import Int4Linear
from mmspec.targets.packing import packed
from tests.model_folders import save_text_model

SOURCE = 'extern "C" int answer() { return 42; }\n'
OTHER = 'extern "C" int other() { return 7; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source, and an empty cache."""
    if compiler.find_compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "small.cpp"
    file.write_text(SOURCE)
    return file


def libraries(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "kernels").iterdir())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The compiler's calls."""
    calls: list[list[str]] = []
    run = compiler.run_compiler
    monkeypatch.setattr(
        compiler, "run_compiler", lambda command, folders: calls.append(command) or run(command, folders)
    )
    return calls


def test_compiled_once(source: Path, tmp_path: Path, runs: list[list[str]]) -> None:
    assert [answer(source), answer(source)] == [42, 42]
    assert len(runs) == 1
    assert [file.suffix for file in libraries(tmp_path)] == [".so"]


def test_compiled_again_when_a_header_changes(source: Path, runs: list[list[str]]) -> None:
    header = source.with_name("number.h")
    header.write_text("#define NUMBER 1\n")
    source.write_text('#include "number.h"\n' + SOURCE.replace("42", "NUMBER"))
    first = answer(source)
    header.write_text("#define NUMBER 2\n")
    assert [first, answer(source)] == [1, 2]
    assert len(runs) == 2


def foreign(file: Path) -> None:
    other = file.with_suffix(".cpp")
    other.write_text(OTHER)
    subprocess.run([compiler.find_compiler(), "-shared", "-fPIC", "-o", file, other], check=True)
    other.unlink()


def flipped(file: Path) -> None:
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "flipped": flipped,
    "foreign": foreign,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(damage: str, source: Path, tmp_path: Path) -> None:
    """In processes of their own: loading such a file may end the process, and a path is loaded once."""

    def exit_code() -> int | None:
        process = multiprocessing.get_context("fork").Process(target=check_answer, args=[source])
        process.start()
        process.join()
        return process.exitcode

    assert exit_code() == 0
    (file,) = libraries(tmp_path)
    whole = file.read_bytes()
    DAMAGES[damage](file)
    assert exit_code() == 0
    (file,) = libraries(tmp_path)
    assert file.read_bytes() == whole


def test_processes_that_compile_at_the_same_time(source: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(answer, [source] * 8, chunksize=1) == [42] * 8
    assert {file.suffix for file in libraries(tmp_path)} == {".so"}


def answer(source: Path) -> int:
    return compiler.load(source, ["-O1"]).answer()


def check_answer(source: Path) -> None:
    assert answer(source) == 42


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    file = tmp_path / "fake"
    file.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit 0\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("CXX", str(file))


def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    return r"expected a C\+\+ compiler \(g\+\+ or clang\+\+\), found none"


def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    lines = r"small.cpp: in main\nx.cpp:1: error: no such thing in $LC_ALL\nerror: later"
    fake(tmp_path, monkeypatch, f'printf "{lines}" >&2\nexit 1')
    return r"\S+fake cannot compile small.cpp: x.cpp:1: error: no such thing in C"


def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fake(tmp_path, monkeypatch, "printf '\\377' >&2\nexit 3")
    return r"\S+fake cannot compile small.cpp: exit 3"


def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fake(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(compiler, "_SECONDS", 2)
    return r"\S+fake does not run: Command .*"


def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cache").write_text("a file")
    return r"cannot keep compiled kernels in \S+kernels: .*; MMSPEC_CACHE names another folder"


def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Sequence[None] = ()) -> str:
    fake(tmp_path, monkeypatch, "echo 'collect2: error: ld returned 1 exit status' >&2\nexit 1")
    error, where = OSError(28, "No space left on device"), tempfile.gettempdir() if written else r"\S+kernels"
    monkeypatch.setattr(compiler.os, "fsync", mock.Mock(side_effect=[*written, error]))
    return rf"cannot compile kernels: {where} cannot be written: \[Errno 28\] No space left.*MMSPEC_CACHE.*"


def not_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError("failed to map segment from shared object")))
    return r"cannot load the compiled .* failed to map segment .*\(not mounted noexec\); MMSPEC_CACHE names another.*"


@pytest.mark.parametrize(
    "problem", [no_compiler, failing, silent, endless, unwritable, full, partial(full, written=[None]), not_executable]
)
def test_what_prevents_compiled_kernels_is_one_line(
    problem: Callable[[Path, pytest.MonkeyPatch], str],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = problem(tmp_path, monkeypatch)
    with pytest.raises(compiler.CompilerError, match=f"^{expected}$"):
        compiler.load(source, ["-O1"])
    assert problem is not_executable or not list(tmp_path.glob("cache/kernels/*"))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No kernels loaded; kernels loaded by other tests stay loaded."""
    monkeypatch.setattr(cpu_library, "library", cache(cpu_library.library.__wrapped__))
    monkeypatch.setenv("MMSPEC_KERNELS", "auto")
    return monkeypatch


@pytest.mark.parametrize(
    "reason", ["expected a C++ compiler (g++ or clang++), found none", "expected a processor with AVX2"]
)
def test_without_the_kernels_torchs_run_and_the_command_line_says_so(
    reason: str, fresh: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(save_text_model(tmp_path / "model"))
    fresh.setenv("PATH", "")
    fresh.delenv("CXX", raising=False)
    fresh.setattr(cpu_library, "_has_instructions", lambda: "compiler" in reason)
    assert not cpu_library.available()
    assert type(packed(torch.nn.Linear(64, 32), "int4")) is Int4Linear
    for dtype, lines in (
        ("int4", [f"note: quantised weights decode several times slower here: {reason}"]),
        ("float32", []),
    ):
        options = ["--model", model, "--dtype", dtype, "--drafter", "none", "--max-new-tokens", "2", "--json"]
        assert main(["generate", "A", *options]) == 0
        assert [one for one in capfd.readouterr().err.splitlines() if "slower" in one] == lines
