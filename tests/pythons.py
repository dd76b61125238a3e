"""``python -m tests.pythons``: ``make caption`` and ``make test`` in fresh clones of the last commit.

One clone for every Python found, with the newest dependencies and with the oldest that pyproject.toml allows. Where no
CPU build of torch can be had, each clone takes gigabytes. Prints a table and one JSON line; exits with 1 if a target
failed. Logs stay in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
UV = str(Path(sys.executable).with_name("uv"))
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
DEPENDENCIES = ("newest", "oldest")
TARGETS = ("caption", "test")
EXTRAS = ("test", "eval", "ray", "browser")
SHOWN = ("torch", "transformers", "numpy", "av", "gradio", "triton")


def find(version: str) -> str | None:
    """An interpreter of this version that can create environments: on the path, pyenv's or uv's; None without one."""
    home = Path.home()
    roots = (
        Path(os.environ.get("PYENV_ROOT", home / ".pyenv"), "versions"),
        home / ".local" / "share" / "uv" / "python",
    )
    installed = [path for root in roots for path in root.glob(f"*{version}.*/bin/python{version}")]
    for python in filter(None, (shutil.which(f"python{version}"), *map(str, sorted(installed)))):
        # A pyenv shim may point to no interpreter.
        command = [python, "-c", "import ensurepip, sys, venv; print(sys.executable)"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def oldest(python: str, out: Path) -> Path:
    """A constraints file: the oldest release of each direct dependency that has a wheel for this interpreter."""
    command = [UV, "pip", "compile", "--quiet", "--resolution", "lowest-direct", "--only-binary", ":all:"]
    command += [part for extra in EXTRAS for part in ("--extra", extra)]
    command += ["--python", python, "--output-file", str(out), str(ROOT / "pyproject.toml")]
    subprocess.run(command, cwd=ROOT, check=True)
    return out


def check(python: str, version: str, dependencies: str, targets: tuple[str, ...], out: Path) -> dict[str, Any]:
    """Run the targets in a fresh clone: what became of each, the versions installed and the seconds taken."""
    name = f"{version}-{dependencies}"
    clone, started = out / name, time.monotonic()
    # What this process inherited from make would override the interpreter.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "VIRTUAL_ENV")}
    if dependencies == "oldest":
        constraints = str(oldest(python, out / f"{name}.txt"))
        environment |= {"PIP_CONSTRAINT": constraints, "UV_CONSTRAINT": constraints}
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    result: dict[str, Any] = {"python": version, "dependencies": dependencies}
    with (out / f"{name}.log").open("wb") as log:
        for target in targets:
            command = ["make", target, f"PYTHON={python}"]
            done = subprocess.run(
                command, cwd=clone, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            )
            result[target] = "passed" if done.returncode == 0 else "failed"
    result |= {"seconds": round(time.monotonic() - started), "versions": installed(clone / ".venv" / "bin" / "python")}
    shutil.rmtree(clone)
    return result


def installed(python: Path) -> dict[str, str]:
    command = [str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {}
    return {entry["name"]: entry["version"] for entry in json.loads(done.stdout) if entry["name"] in SHOWN}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only this version (may be repeated)")
    parser.add_argument("--dependencies", action="append", choices=DEPENDENCIES, help="only these")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this target")
    parser.add_argument("--out", type=Path, help="folder of clones and logs [a temporary one]")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="mmspec-pythons-"))
    out.mkdir(parents=True, exist_ok=True)
    targets = tuple(options.target or TARGETS)
    results: list[dict[str, Any]] = []
    for version in options.python or PYTHONS:
        python = find(version)
        if python is None:
            print(f"{version}: not found on this machine, skipped", flush=True)
            continue
        for dependencies in options.dependencies or DEPENDENCIES:
            result = check(python, version, dependencies, targets, out.resolve())
            results.append(result)
            became = "  ".join(f"{target} {result[target]}" for target in targets)
            versions = " ".join(f"{name} {number}" for name, number in result["versions"].items())
            print(f"{version} {dependencies}  {became}  {result['seconds']} s  ({versions})", flush=True)
    print(f"logs: {out}")
    print(json.dumps({"pythons": results}))
    return int(not results or any(result[target] == "failed" for result in results for target in targets))


if __name__ == "__main__":
    sys.exit(main())
