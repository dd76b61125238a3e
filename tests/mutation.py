"""Mutation run: the share of small faults that the tests of a file notice. ``make mutants``.

cosmic-ray generates the mutants of each file in ``mutation.toml``, with its own operators and one that deletes
statements. A seeded sample, one mutant per place in the source, is tried in a copy of the tree, so that the working
tree is never changed. Results are kept in ``.mutants/``, a line each: a killed run goes on, and a later run tries again
what survived. A changed source starts anew.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
CONFIG = Path(__file__).with_suffix(".toml")
RESULTS = ROOT / ".mutants"
GOAL = 0.9
LOGGED = ".mutation.log"


DELETED = ("expr_stmt", "atom_expr", "power", "return_stmt", "raise_stmt", "del_stmt", "await", "keyword")
"""Statements of functions that are deleted, as parso names them."""


@dataclass(frozen=True)
class Mutant:
    """``line`` is its place in the source, ``code`` the mutated source, ``change`` what it changes."""

    line: int
    code: str
    change: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.change}"


@click.command()
@click.argument("files", nargs=-1)
@click.option("--minutes", type=click.FloatRange(0), help="Stop after this time; the next run goes on.")
@click.option("--mutants", type=click.IntRange(1), help="Per file at most; by default as mutation.toml says.")
@click.option("--fresh", is_flag=True, help="Try everything again.")
def main(files: tuple[str, ...], minutes: float | None, mutants: int | None, fresh: bool) -> None:
    """Print the mutation score of FILES (by default all of mutation.toml); exit with 1 below 90 % in any of them."""
    config = tomllib.loads(CONFIG.read_text())
    if unknown := set(files) - set(config["files"]):
        raise click.UsageError(f"files must be listed in {CONFIG.name}: received {', '.join(sorted(unknown))}")
    os.nice(19)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command goes on from here"))
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    # Tests must import helpers from the copy, not from beside this file.
    sys.path[:] = [path for path in sys.path if path != str(CONFIG.parent)]
    import pytest  # noqa: F401  imported once: every mutant's process is forked from this one
    import transformers  # noqa: F401

    with tempfile.TemporaryDirectory() as copy:
        ignored = shutil.ignore_patterns(".*", "__pycache__")
        shutil.copytree(ROOT, copy, symlinks=True, dirs_exist_ok=True, ignore=ignored)  # mmspec/vision is one
        reached = [
            _tried(file, config, mutants or config["mutants"], Path(copy), end, fresh)
            for file in files or config["files"]
        ]
    sys.exit(not all(reached))


def sample(file: str, code: str, limit: int, seed: int) -> list[Mutant]:
    """At most ``limit`` mutants of a source, no two of them at one place, in the order of a draw.

    A mutant that changes annotations alone, or ``strict=`` and ``frozen=``, is none: no output depends on them.

    Args:
        file: seeds the draw, together with ``seed``.
    """
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    places = _places(code)
    rng, meaning, chosen = random.Random(f"{seed} {file}"), _meaning(code), []
    for place in rng.sample(sorted(places), len(places)):
        name, occurrence = rng.choice(sorted(places[place]))
        mutated = mutate_code(code, get_operator(name)(), occurrence)
        if mutated is not None and _meaning(mutated) not in (meaning, None):
            chosen.append(Mutant(place[0][0], mutated, change(code, mutated)))
        if len(chosen) == limit:
            break
    return chosen


def _places(code: str) -> dict[Any, list[tuple[str, int]]]:
    """The names of operators that change a source, with the number of the change, by its start and end."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    add_deletion()
    tree, places = get_ast(code), {}
    for name in operator_names():
        if not get_operator(name).arguments():
            operator = get_operator(name)()
            found = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
            for occurrence, place in enumerate(found):
                places.setdefault(place, []).append((name, occurrence))
    return places


def add_deletion() -> None:
    """Add an operator to cosmic-ray's, which have none that deletes a statement of a function."""
    from cosmic_ray.operators.operator import Operator
    from cosmic_ray.plugins import OPERATOR_PROVIDERS
    from parso.python.tree import Keyword

    class Deletion(Operator):
        """Puts ``pass`` in place of a statement; docstrings, imports, assertions and declarations stay."""

        def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
            statement = node.children[0] if node.type == "simple_stmt" else None
            in_function = statement is not None and statement.search_ancestor("funcdef", "classdef")
            if not in_function or in_function.type != "funcdef" or statement.type not in DELETED:
                return
            declared = statement.type == "expr_stmt" and getattr(statement.children[1], "children", ())
            if statement.type == "keyword" and statement.value not in ("continue", "break", "return", "raise"):
                return
            if not (declared and declared[0] == ":" and len(declared) == 2):  # no value
                yield statement.start_pos, statement.end_pos

        def mutate(self, node: Any, index: int) -> Any:
            old = node.children[0]
            node.children[0] = Keyword("pass", old.start_pos, prefix=old.get_first_leaf().prefix)
            return node

        @classmethod
        def examples(cls) -> Sequence[Any]:
            return ()

    OPERATOR_PROVIDERS["mmspec"] = {"Deletion": Deletion}


def change(before: str, after: str) -> str:
    """The lines that a mutant changes: what was there, an arrow, what stands there now."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    gone, new = ([line[2:].strip() for line in lines if line.startswith(sign)] for sign in ("- ", "+ "))
    return f"{' '.join(gone)} -> {' '.join(new)}"


def _meaning(code: str) -> str | None:
    """The syntax tree without annotations and keywords that only check, as ``zip(strict=...)``; None without Python."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
        if isinstance(node, ast.Call):
            node.keywords = [word for word in node.keywords if word.arg not in ("strict", "frozen", "kw_only")]
    return ast.dump(tree)


def _tried(file: str, config: dict[str, Any], limit: int, copy: Path, end: float, fresh: bool) -> bool:
    """Try the mutants of a file, print its score and what survived; whether the score reaches the goal."""
    code, tests = (ROOT / file).read_text(), config["files"][file]
    reasons = {one["change"]: one["reason"] for one in config.get("equivalent", ()) if one["file"] == file}
    known = RESULTS / f"{file.replace('/', '.')}-{hashlib.sha256(code.encode()).hexdigest()[:12]}.jsonl"
    if fresh:
        known.unlink(missing_ok=True)
    known.parent.mkdir(exist_ok=True)
    outcomes = dict(json.loads(line) for line in known.read_text().splitlines()) if known.exists() else {}
    mutants = sample(file, code, limit, config["seed"])
    caught = {one: outcomes.get(str(one)) for one in mutants}
    left = [one for one in mutants if caught[one] is None or not (caught[one] or one.change in reasons)]
    if left:
        passed, longest = _passes(tests, copy, 3600.0)
        if not passed:
            said = (copy / LOGGED).read_text()[-2000:]
            raise click.ClickException(f"the tests of {file} must pass before it is mutated: {tests}\n{said}")
    for one in left:
        if time.monotonic() > end:
            break
        (copy / file).write_text(one.code)
        survived, _ = _passes(tests, copy, 60 + 5 * longest)
        (copy / file).write_text(code)
        caught[one] = not survived
        with known.open("a") as log:
            log.write(json.dumps([str(one), caught[one]]) + "\n")
    return _report(file, caught, reasons)


def _passes(tests: Sequence[str], copy: Path, limit: float) -> tuple[bool, float]:
    """Whether tests pass in the copy, and the seconds they took; those that take longer than ``limit`` fail."""
    start = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_test, args=(tests, copy))
    process.start()
    assert process.pid is not None
    try:
        process.join(limit)
        late = process.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the tests have started ends with them
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return not late and process.exitcode == 0, time.monotonic() - start


def _test(tests: Sequence[str], copy: Path) -> None:
    import pytest

    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    # A mutant may have the size and, to the second, the age of the one before: its bytecode must not be taken.
    sys.dont_write_bytecode = True
    with open(copy / LOGGED, "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        # cosmic-ray has imported what a plug-in of pytest belongs to.
        rest = ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main(["-x", "--no-header", *rest, *tests])
        import mmspec

        assert Path(mmspec.__file__).is_relative_to(copy)
        os._exit(code)


def _report(file: str, caught: Mapping[Mutant, bool | None], reasons: Mapping[str, str]) -> bool:
    """Print the score of a file and its survivors; whether the score reaches the goal and every mutant was tried."""
    killed, left = (sum(one is outcome for one in caught.values()) for outcome in (True, None))
    survivors = sorted((one for one, outcome in caught.items() if outcome is False), key=lambda one: one.line)
    equivalent = sum(one.change in reasons for one in survivors)
    tried = len(caught) - left - equivalent
    score, rest = killed / max(tried, 1), f", {left} not tried" if left else ""
    click.echo(f"{file}: {score:.0%}, {killed} of {tried} caught, {equivalent} equivalent{rest}")
    for one in survivors:
        why = f"  (equivalent: {reasons[one.change]})" if one.change in reasons else ""
        click.echo(f"  {one}{why}")
    return score >= GOAL and not left


if __name__ == "__main__":
    main()
