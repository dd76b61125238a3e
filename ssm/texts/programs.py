"""Small Python functions: a request in words, the program, and sometimes a trace of its output for a list."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class CodeFragment:
    """A condition or expression in a program: its wordings in a request, and its code with `{v}` as the variable."""

    words: tuple[str, ...]
    code: str


def _filters(k: int) -> tuple[CodeFragment, ...]:
    return (
        CodeFragment(("the even {n}", "all {n} that are even"), "{v} % 2 == 0"),
        CodeFragment(("the odd {n}", "all {n} that are odd"), "{v} % 2 == 1"),
        CodeFragment((f"the {{n}} above {k}", f"all {{n}} larger than {k}"), f"{{v}} > {k}"),
        CodeFragment((f"the {{n}} below {k}", f"all {{n}} smaller than {k}"), f"{{v}} < {k}"),
        CodeFragment((f"the {{n}} divisible by {k}", f"all multiples of {k} in {{n}}"), f"{{v}} % {k} == 0"),
        CodeFragment((f"the {{n}} different from {k}", f"all {{n}} except {k}"), f"{{v}} != {k}"),
    )


def _maps(k: int) -> tuple[CodeFragment, ...]:
    return (
        CodeFragment(("doubled", "each taken twice"), "2 * {v}"),
        CodeFragment(("squared", "each times itself"), "{v} * {v}"),
        CodeFragment((f"plus {k}", f"with {k} added to each"), f"{{v}} + {k}"),
        CodeFragment((f"minus {k}", f"with {k} taken from each"), f"{{v}} - {k}"),
        CodeFragment((f"times {k}", f"each multiplied by {k}"), f"{k} * {{v}}"),
    )


NUMBERS = ("numbers", "values", "prices", "points", "ages", "scores", "items")
NAMES = {"list": ("pick", "select", "collect"), "sum": ("total", "add_up", "sum_of"), "count": ("count", "how_many")}
NAMES |= {"largest": ("largest", "top"), "smallest": ("smallest", "lowest")}
EMPTY = {"largest": "0", "smallest": "0"}


@dataclass(frozen=True)
class ProgramSpec:
    """Specification of a program over a list: filter, map, and reduction (`goal`)."""

    numbers: str
    keep: CodeFragment | None
    change: CodeFragment | None
    goal: str
    name: str

    def apply(self, values: list[int]) -> tuple[list[int], list[int], int | list[int]]:
        """Returns the filtered values, the mapped values and the result."""
        kept = [v for v in values if self.keep is None or eval(self.keep.code.format(v=v))]
        changed = [eval(self.change.code.format(v=v)) if self.change else v for v in kept]
        goals: dict[str, Callable[[list[int]], int | list[int]]] = {"list": list, "sum": sum, "count": len}
        if self.goal in goals:
            return kept, changed, goals[self.goal](changed)
        return kept, changed, (max if self.goal == "largest" else min)(changed, default=0)


def program(rng: random.Random) -> tuple[str, str]:
    """Returns a request for a function, sometimes with a trace of an input, and its answer."""
    task = _task(rng)
    loop = rng.random() < 0.55
    variable = rng.choice(("x", "n", "v", task.numbers[:-1]))
    prompt = f"{_request(task, rng)}{_form(loop, rng)}"
    code = _looped(task, variable, rng) if loop else _short(task, variable, rng)
    if rng.random() < 0.45:
        values = [rng.randint(1, 20) for _ in range(rng.randint(3, 6))]
        prompt += rng.choice((f" What does it give for {values}?", f" Trace it for {values}."))
        code += "\n\n" + _trace(task, values)
    return prompt, code


def _task(rng: random.Random) -> ProgramSpec:
    keep = rng.choice(_filters(rng.randint(2, 9))) if rng.random() < 0.7 else None
    change = rng.choice(_maps(rng.randint(2, 9))) if keep is None or rng.random() < 0.5 else None
    goal = rng.choice(tuple(NAMES))
    if goal == "count":
        keep, change = keep or _filters(5)[0], None
    numbers = rng.choice(NUMBERS)
    name = rng.choice(NAMES[goal]) + rng.choice(("", f"_{numbers}", "_of_list"))
    return ProgramSpec(numbers, keep, change, goal, name)


def _request(task: ProgramSpec, rng: random.Random) -> str:
    """The specification in words."""
    what = rng.choice(task.keep.words).format(n=task.numbers) if task.keep else f"the {task.numbers}"
    if task.change:
        what += f", {rng.choice(task.change.words)}"
    goals = {
        "list": ("a list of {}", "{} as a list"),
        "sum": ("the sum of {}", "the total of {}"),
        "count": ("the count of {}", "how many there are of {}"),
        "largest": ("the largest of {}", "the maximum of {}"),
        "smallest": ("the smallest of {}", "the minimum of {}"),
    }
    wanted = rng.choice(goals[task.goal]).format(what)
    verb = rng.choice(("returns", "gives", "computes"))
    ask = rng.choice(("Write a function", "Write a Python function", "Define a function"))
    return f"{ask} {task.name}({task.numbers}) that {verb} {wanted}."


def _form(loop: bool, rng: random.Random) -> str:
    if loop:
        return rng.choice((" Use a loop.", " Go through them one by one.", " Use a for loop."))
    return rng.choice((" Use a comprehension.", " Keep it short.", " One line is enough.", ""))


def _short(task: ProgramSpec, v: str, rng: random.Random) -> str:
    value = task.change.code.format(v=v) if task.change else v
    inner = f"{value} for {v} in {task.numbers}" + (f" if {task.keep.code.format(v=v)}" if task.keep else "")
    calls = {
        "list": f"[{inner}]",
        "sum": f"sum({inner})",
        "count": f"len([{inner}])",
        "largest": f"max(({inner}), default=0)",
        "smallest": f"min(({inner}), default=0)",
    }
    head = f"def {task.name}({task.numbers}):\n"
    if rng.random() < 0.3:
        return f"{head}    result = {calls[task.goal]}\n    return result"
    return f"{head}    return {calls[task.goal]}"


def _looped(task: ProgramSpec, v: str, rng: random.Random) -> str:
    value = task.change.code.format(v=v) if task.change else v
    lines = [f"def {task.name}({task.numbers}):"]
    if task.goal in EMPTY:
        collected, sign = "found", ">" if task.goal == "largest" else "<"
        lines += [f"    {collected} = []", f"    for {v} in {task.numbers}:"]
        body, pad = _guard(task, v)
        lines += [*body, f"{pad}{collected}.append({value})"]
        return "\n".join(
            [
                *lines,
                f"    best = {collected}[0] if {collected} else 0",
                f"    for {v} in {collected}:",
                f"        if {v} {sign} best:",
                f"            best = {v}",
                "    return best",
            ]
        )
    result = {"list": "result", "sum": "total", "count": "count"}[task.goal]
    lines += [f"    {result} = {'[]' if task.goal == 'list' else '0'}", f"    for {v} in {task.numbers}:"]
    body, pad = _guard(task, v, skip=rng.random() < 0.3)
    ends = {"list": f"result.append({value})", "sum": f"total += {value}", "count": "count += 1"}
    return "\n".join([*lines, *body, pad + ends[task.goal], f"    return {result}"])


def _guard(task: ProgramSpec, v: str, skip: bool = False) -> tuple[list[str], str]:
    """Lines of a loop's body that skip filtered values, and the indent of the next line."""
    if task.keep is None:
        return [], " " * 8
    condition = task.keep.code.format(v=v)
    if skip:
        return [f"        if not {condition}:", "            continue"], " " * 8
    return [f"        if {condition}:"], " " * 12


def _trace(task: ProgramSpec, values: list[int]) -> str:
    kept, changed, result = task.apply(values)
    lines = [f"For {values}:"]
    if task.keep:
        lines.append(f"It keeps {kept}.")
    if task.change:
        lines.append(f"They become {changed}.")
    return "\n".join([*lines, f"Answer: {result}"])
