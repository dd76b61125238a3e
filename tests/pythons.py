"""``python -m tests.pythons``: ``make caption`` and ``make test`` in fresh clones of the last commit.

One clone for every Python found, with the newest dependencies and with the oldest that pyproject.toml allows. Where no
CPU build of torch can be had, each clone takes gigabytes. Prints one JSON line per clone; exits with 1 if a target
failed. Logs stay in ``--out``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
UV = str(Path(sys.executable).with_name("uv"))
PYTHONS, DEPENDENCIES, TARGETS = ("3.11", "3.12", "3.13", "3.14"), ("newest", "oldest"), ("caption", "test")
EXTRAS = ("test", "eval", "ray", "browser")
# What this process inherited from make would override the interpreter.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "VIRTUAL_ENV")}


def find(version: str) -> str | None:
    """An interpreter of this version: on the path, pyenv's or uv's; None without one."""
    command = [UV, "python", "find", "--no-python-downloads", "--no-project", version]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def check(python: str, dependencies: str, targets: tuple[str, ...], clone: Path) -> dict[str, str]:
    """Run the targets in a fresh clone; returns what became of each."""
    environment = dict(ENVIRONMENT)
    if dependencies == "oldest":  # the oldest release of each direct dependency that has a wheel for this interpreter
        constraints = str(clone.with_suffix(".txt"))
        command = [UV, "pip", "compile", "--quiet", "--resolution", "lowest-direct", "--only-binary", ":all:"]
        command += [part for extra in EXTRAS for part in ("--extra", extra)]
        command += ["--python", python, "--output-file", constraints, str(ROOT / "pyproject.toml")]
        subprocess.run(command, cwd=ROOT, check=True)
        environment |= {"PIP_CONSTRAINT": constraints, "UV_CONSTRAINT": constraints}
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    result = {}
    with clone.with_suffix(".log").open("wb") as log:
        for target in targets:
            command = ["make", target, f"PYTHON={python}"]
            done = subprocess.run(command, cwd=clone, env=environment, stdout=log, stderr=log, check=False)
            result[target] = "passed" if done.returncode == 0 else "failed"
        subprocess.run([clone / ".venv/bin/python", "-m", "pip", "list"], stdout=log, stderr=log, check=False)
    shutil.rmtree(clone)
    return result


@click.command()
@click.option("--python", "pythons", multiple=True, type=click.Choice(PYTHONS), default=PYTHONS)
@click.option("--dependencies", multiple=True, type=click.Choice(DEPENDENCIES), default=DEPENDENCIES)
@click.option("--target", "targets", multiple=True, type=click.Choice(TARGETS), default=TARGETS)
@click.option("--out", type=click.Path(path_type=Path, resolve_path=True, exists=False), help="Folder of the logs.")
def main(pythons: tuple[str, ...], dependencies: tuple[str, ...], targets: tuple[str, ...], out: Path | None) -> None:
    """Run targets of the Makefile with every Python and all dependencies; options narrow that, and may be repeated."""
    out = out or Path(tempfile.mkdtemp(prefix="mmspec-pythons-"))
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for version in pythons:
        if (python := find(version)) is None:
            click.echo(f"{version}: not found on this machine, skipped")
            continue
        for kind in dependencies:
            result = check(python, kind, targets, out / f"{version}-{kind}".replace(".", "-"))
            results.append(result)
            click.echo(json.dumps({"python": version, "dependencies": kind, **result}))
    click.echo(f"logs: {out}")
    sys.exit(not results or any("failed" in result.values() for result in results))


if __name__ == "__main__":
    main()
