"""Prebuilt kernels of wheels: chosen by the processor, refused if stale, loaded without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mmspec.ops import builds, compiler, cpu_library
from tests.test_packaging import ROOT

V3 = "sse2 ssse3 fma movbe f16c abm bmi1 avx2 bmi2"
V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"
PROCESSORS = {
    "Ivy Bridge": ("sse2 ssse3 f16c avx", None),
    "Haswell": (V3, 3),
    "Zen 3": (f"{V3} vaes", 3),
    "Alder Lake": (f"{V3} avx_vnni", 2),
    "Skylake-X": (V4, 3),
    "Cascade Lake": (f"{V4} avx512_vnni", 1),
    "Zen 4": (f"{V4} avx512_vnni avx512_bf16", 0),
    "Sapphire Rapids": (f"{V4} avx512_vnni avx512_bf16 avx_vnni amx_bf16 amx_tile", 0),
    "Cortex-A72": ("fp asimd aes crc32", None),
    "Neoverse N1": ("fp asimd asimddp", 4),
}
"""Features of processors, and the fastest build of ``WHEEL`` that they run."""


@pytest.fixture
def libraries(tmp_path: Path) -> list[Path]:
    """A file for each build of a wheel."""
    files = [builds._library(tmp_path, flags) for *_, flags in builds.WHEEL]
    for file in files:
        file.touch()
    return files


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_fastest_build_that_the_processor_supports(processor: str, libraries: list[Path]) -> None:
    features, number = PROCESSORS[processor]
    has, folder = frozenset(features.split()), libraries[0].parent
    assert builds.prebuilt("AVX-512 VNNI", has, folder) == (None if number is None else libraries[number])
    # As MMSPEC_CPU_BUILD asks.
    assert builds.prebuilt("AVX2", has, folder) == (None if number is None else libraries[max(number, 3)])
    if number is not None:
        libraries[number].unlink()  # a compiler too old for it
        left = builds.prebuilt("AVX-512 VNNI", has, folder)
        assert left is None if number >= 3 else left in libraries[number + 1 :]


def test_features_are_those_of_this_processor() -> None:
    if not Path("/proc/cpuinfo").exists() or not cpu_library._has_instructions():
        pytest.skip("needs Linux and AVX2")
    assert "avx2" in compiler.processor().split()


def changed_header(source: Path) -> None:
    header = source.with_name("dots.h")
    header.write_text(header.read_text() + "\n")


def changed_source(source: Path) -> None:
    source.write_text(source.read_text() + "\n")


@pytest.mark.parametrize("change", [changed_header, changed_source])
def test_stale_libraries_are_not_loaded(change, libraries, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(builds, "SOURCE", tmp_path / "cpp" / "kernels.cpp")
    shutil.copytree(Path(builds.__file__).with_name("cpp"), tmp_path / "cpp")
    features = frozenset(V3.split())
    assert builds.prebuilt("AVX2", features, tmp_path) == libraries[3]
    change(builds.SOURCE)
    assert builds.prebuilt("AVX2", features, tmp_path) is None


def test_a_library_of_another_system_is_compiled_instead(tmp_path, monkeypatch) -> None:
    if compiler.find_compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    source, other = tmp_path / "small.cpp", tmp_path / "other.so"
    source.write_text('extern "C" int answer() { return 42; }\n')
    other.write_text("of another system")
    assert compiler.load(source, ["-O1"], other).answer() == 42


def run(tree: Path, script: str, **environment: str) -> str:
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX", "MMSPEC_CPU_BUILD")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tree, env={**given, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources that wheels are built from."""
    pytest.importorskip("setuptools")
    ignored = shutil.ignore_patterns(".*", "embedded", "results", "tests", "docs", "build", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=ignored))


BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
SCRIPT = "from mmspec.ops import cpu_library as l; print(l.problem() or l.functions().instructions().decode())"


def test_a_wheel_without_a_compiler_is_pure(tree: Path) -> None:
    assert run(tree, BUILD, PATH="").endswith("-py3-none-any.whl")


@pytest.mark.long
def test_a_wheel_brings_kernels_that_need_no_compiler(tree: Path, tmp_path: Path) -> None:
    if not cpu_library._has_instructions() or compiler.find_compiler() is None or sys.platform != "linux":
        pytest.skip("needs Linux, AVX2 and a C++ compiler")
    wheel = run(tree, BUILD)
    assert wheel.endswith("-py3-none-linux_x86_64.whl")
    zipfile.ZipFile(tmp_path / wheel).extractall(tmp_path / "site")
    folder, cache = tmp_path / "site/mmspec/ops/prebuilt", tmp_path / "cache"
    made = {builds.identity(builds.SOURCE, flags): name for name, _, flags in builds.WHEEL if name != "AArch64"}
    assert sorted(file.stem for file in folder.iterdir()) == sorted(made)
    for name in ("AVX-512 VNNI", "AVX-VNNI", "AVX2"):
        file = builds.prebuilt(name, compiler.processor().split(), folder)
        alone = {"PATH": "", "MMSPEC_CACHE": str(cache), "MMSPEC_KERNELS": "auto", "MMSPEC_CPU_BUILD": name}
        assert run(tmp_path / "site", SCRIPT, **alone) == made[file.stem]
    assert not cache.exists()


@pytest.mark.long
def test_a_wheel_of_a_cross_compiler_is_for_its_machine(tree: Path, tmp_path: Path) -> None:
    if not shutil.which("aarch64-linux-gnu-g++"):
        pytest.skip("needs a compiler for AArch64")
    wheel = run(tree, BUILD, CXX="aarch64-linux-gnu-g++")
    assert wheel.endswith("-py3-none-linux_aarch64.whl")
    (name,) = (name for name in zipfile.ZipFile(tmp_path / wheel).namelist() if "/prebuilt/" in name)
    assert zipfile.ZipFile(tmp_path / wheel).read(name)[18] == 183  # ELF's number of the machine
