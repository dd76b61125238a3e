"""Arithmetic: word problems of two to five steps with worked solutions, and plain calculations."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from mmspec.ssm.texts.words import THINGS, person, plural, sentence

MAX_NUMBER = 999
"""Largest number in a problem."""

ENDING = "Answer: "


@dataclass(frozen=True)
class ProblemStep:
    """A sentence of a problem (`text`), its paraphrase in the solution (`reason`), and its calculation."""

    text: str
    reason: str
    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        return {
            "+": self.left + self.right,
            "-": self.left - self.right,
            "x": self.left * self.right,
            "/": self.left // self.right,
        }[self.sign]


def worked(left: int, sign: str, right: int) -> str:
    """Returns a calculation as text; products of two-digit numbers are split into tens and ones.

    Returns:
        For example "6 x 24 = 120 + 24 = 144" or "84 / 4 = 21".
    """
    result = ProblemStep("", "", left, sign, right).result
    if sign == "x" and max(left, right) > 10 and max(left, right) % 10:
        small, large = sorted((left, right))
        ones = large % 10
        return f"{left} x {right} = {small * (large - ones)} + {small * ones} = {result}"
    return f"{left} {sign} {right} = {result}"


def sums(rng: random.Random) -> tuple[str, str]:
    """Returns three to six calculations, one per line."""
    lines = []
    for _ in range(rng.randint(3, 6)):
        sign = rng.choice("++--xx/")
        left, right = _operands(sign, rng)
        lines.append((f"{left} {sign} {right}", worked(left, sign, right)))
    ask = rng.choice(("Work out", "Calculate", "Compute"))
    return f"{ask}: " + "; ".join(line for line, _ in lines), "\n".join(line for _, line in lines)


def _operands(sign: str, rng: random.Random) -> tuple[int, int]:
    top = rng.choice((20, 100, 100, 500))
    if sign == "+":
        return rng.randint(2, top), rng.randint(2, min(top, 400))
    if sign == "-":
        left = rng.randint(4, top + 20)
        return left, rng.randint(1, left - 1)
    small = rng.randint(2, 9)
    other = rng.randint(2, rng.choice((12, 40, 99)))
    return (small, other) if sign == "x" else (small * min(other, 25), small)


def problem(rng: random.Random, steps: int | None = None) -> tuple[str, str]:
    """Returns a word problem of two to five steps (or `steps`) and its worked solution, which ends in "Answer: N"."""
    count = steps or rng.choice((2, 2, 2, 3, 3, 3, 4, 4, 5))
    plot = _Plot(rng)
    for _ in range(count):
        plot.add_step()
    story = " ".join([plot.opening, *(step.text for step in plot.steps), plot.question])
    return story, _solution(plot, rng)


def _solution(plot: _Plot, rng: random.Random) -> str:
    lines = []
    style = rng.randrange(4)
    start = plot.steps[0].left
    if style == 1:
        lines.append(rng.choice((f"{plot.name} starts with {start} {plot.things}.", f"We begin with {start}.")))
    for number, step in enumerate(plot.steps, start=1):
        shown = worked(step.left, step.sign, step.right)
        if style == 0:
            lines.append(f"Step {number}: {step.reason}. {shown}")
        elif style == 1:
            lines.append(f"{sentence(step.reason)}, so {shown}.")
        elif style == 2:
            word = "First" if number == 1 else "Finally" if number == len(plot.steps) else rng.choice(("Then", "Next"))
            lines.append(f"{word}, {step.reason}: {shown}.")
        else:
            lines.append(f"{shown}, {rng.choice(('because', 'since'))} {step.reason}.")
    result = plot.steps[-1].result
    if rng.random() < 0.5:
        lines.append(f"So {plot.closing} {result} {plot.things}.")
    return "\n".join([*lines, f"{ENDING}{result}"])


class _Plot:
    """Builds a word problem about one number (`now`), which every step changes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.name, self.pronoun = person(rng)
        self.things = rng.choice(list(THINGS))
        self.singular, self.kept, self.place = THINGS[self.things]
        self.steps: list[ProblemStep] = []
        self.shared = False
        top = rng.choice((12, 30, 60, 99, 250))
        self.now = rng.randint(5, top)
        where = f" in {'her' if self.pronoun == 'she' else 'his'} {self.place if rng.random() < 0.5 else 'room'}"
        where = where if rng.random() < 0.3 else ""
        self.opening = rng.choice(
            (
                f"{self.name} has {self.now} {self.things}{where}.",
                f"There are {self.now} {self.things} on the table of {self.name}.",
                f"{self.name} owns {self.now} {self.things}{where}.",
                f"In the morning {self.name} counts {self.now} {self.things}.",
                f"At first {self.name} has {self.now} {self.things}{where}.",
            )
        )
        if rng.random() < 0.15:
            self.opening += (
                f" {sentence(self.pronoun)} likes {rng.choice(['music', 'rain', 'cats', 'long walks', 'tea'])}."
            )
        self.closing = rng.choice((f"{self.name} has", f"{self.pronoun} ends up with", "there are"))
        self.question = rng.choice(
            (
                f"How many {self.things} does {self.name} have now?",
                f"How many {self.things} are there in the end?",
                f"Find the number of {self.things} at the end.",
                f"How many {self.things} does {self.pronoun} have at last?",
            )
        )

    def add_step(self) -> None:
        """Adds a random step that is possible with the current number."""
        options: list[Callable[[], ProblemStep]] = [self._get, self._give]
        if self.now <= 400:
            options += [self._packs]
        if self.now >= 6:
            options += [self._lose_packs]
        if self.now <= 99:
            options += [self._multiply]
        if self._divisors():
            options += [self._divide, self._divide]
        step = self.rng.choice(options)()
        if not 1 <= step.result <= MAX_NUMBER:
            step = self._give()
        self.steps.append(step)
        self.now = step.result

    def _other(self) -> str:
        return person(self.rng, self.name)[0]

    def _get(self) -> ProblemStep:
        n = self.rng.randint(2, self.rng.choice((9, 40, 99)))
        other, s, things = self._other(), self.pronoun, self.things
        text, reason = self.rng.choice(
            (
                (f"{other} gives {self._her()} {n} more.", f"{other} adds {n}"),
                (f"Then {s} buys {n} {things}.", f"{s} buys {n}"),
                (f"{sentence(s)} finds {n} more {things} on the way.", f"{s} finds {n}"),
                (f"A parcel with {n} {things} arrives.", f"the parcel brings {n}"),
                (f"{other} brings {n} {things} as a present.", f"the present of {other} is {n}"),
            )
        )
        return ProblemStep(text, reason, self.now, "+", n)

    def _give(self) -> ProblemStep:
        n = self.rng.randint(1, max(1, min(self.now - 1, self.rng.choice((9, 40, 99)))))
        other, s, things = self._other(), self.pronoun, self.things
        text, reason = self.rng.choice(
            (
                (f"{sentence(s)} gives {n} of them to {other}.", f"{other} gets {n}"),
                (f"Then {s} sells {n} {things}.", f"{s} sells {n}"),
                (f"{sentence(s)} loses {n} on the way home.", f"{s} loses {n}"),
                (f"{other} takes {n} {things} away.", f"{other} takes {n}"),
                (f"{n} of the {things} are broken and thrown away.", f"{n} are broken"),
            )
        )
        return ProblemStep(text, reason, self.now, "-", n)

    def _packs(self) -> ProblemStep:
        return self._of_packs("+")

    def _lose_packs(self) -> ProblemStep:
        return self._of_packs("-")

    def _of_packs(self, sign: str) -> ProblemStep:
        rng, s = self.rng, self.pronoun
        count, each = rng.randint(2, 9), rng.randint(2, rng.choice((9, 12, 20)))
        if sign == "-":
            each = max(1, min(each, (self.now - 1) // count))
        total = count * each
        if sign == "-" and total >= self.now:
            return self._give()
        packs = plural(self.kept)
        verb, done = rng.choice((("buys", "adds"), ("gets", "brings"))) if sign == "+" else ("gives away", "costs")
        text = rng.choice(
            (
                f"{sentence(s)} {verb} {count} {packs} with {each} {self.things} each.",
                f"Then {s} {verb} {count} {packs} of {each} {self.things}.",
            )
        )
        reason = f"{count} {packs} of {each} are {worked(count, 'x', each)}, which {done} {total}"
        return ProblemStep(text, reason, self.now, sign, total)

    def _multiply(self) -> ProblemStep:
        k = self.rng.randint(2, 9 if self.now <= 20 else 5)
        if self.now * k > MAX_NUMBER:
            k = 2
        s, other = self.pronoun, self._other()
        word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}.get(k, f"{k} times")
        text, reason = self.rng.choice(
            (
                (f"After a year {s} has {word} as many.", f"the number grows {k} times"),
                (f"{other} has {word} as many and gives them all in exchange.", f"{other} has {k} times as many"),
                (f"The {self.place} makes them {word} as many.", f"they become {k} times as many"),
            )
        )
        return ProblemStep(text, reason, self.now, "x", k)

    def _divisors(self) -> list[int]:
        """Divisors of the current number with quotients from 2 to 30."""
        return [k for k in range(2, 10) if self.now % k == 0 and 2 <= self.now // k <= 30]

    def _divide(self) -> ProblemStep:
        k = self.rng.choice(self._divisors())
        s, things = self.pronoun, self.things
        text, reason = self.rng.choice(
            (
                (
                    f"{sentence(s)} shares them equally among {k} friends and looks at one share.",
                    f"each of {k} friends gets a share",
                ),
                (f"All {things} go into {k} equal heaps, and {s} keeps one heap.", f"there are {k} equal heaps"),
                (f"Only one of every {k} {things} is good, and {s} keeps the good ones.", f"one in {k} is good"),
            )
        )
        return ProblemStep(text, reason, self.now, "/", k)

    def _her(self) -> str:
        return "her" if self.pronoun == "she" else "him"


def final(text: str) -> int | None:
    """Returns the number in the last line "Answer: N", or None."""
    numbers = re.findall(rf"^{ENDING}(-?\d+)\s*$", text, re.MULTILINE)
    return int(numbers[-1]) if numbers else None


def steps_of(answer: str) -> int:
    """Returns the number of steps of a worked solution."""
    return sum("=" in line for line in answer.splitlines())
