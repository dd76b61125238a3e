"""Trial of a case: sends requests to both sides, compares answers, records differences. Drafters that cases use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from mmspec.cache.prefix_cache import PrefixCache
from mmspec.checking.oracle import Oracle
from mmspec.checking.sides import Answer, Difference, LocalSide, Question, ServerSide, Side, SkippedError
from mmspec.core.drafter import Drafter, Wrapper
from mmspec.core.plan import StepPlan
from mmspec.core.target import KeepsStates
from mmspec.core.tree import TokenTree
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline

BOUNDS = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.0625}
"""Maximum logit margin of a tie by activation dtype: in half precision, four spacings of numbers from 16 to 32, where
most models' largest logits lie; in float32, fifty spacings, for rounding of sums over thousands of terms."""

SIZE = 12  # default draft tokens per step of a case; fixed, even if drafting is not faster
_PREFIXES = 1 << 28  # bytes


class NowAndThen(Wrapper):
    """Uses another drafter only in every second step, so that accepted drafts and plain steps alternate."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._steps = 0

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        self._steps += 1
        return self.drafter.propose(token, plan) if self._steps % 2 else TokenTree.root(token)


@dataclass
class Record:
    """Results of a case.

    Attributes:
        differences: JSON objects; ``margin`` is None for differences that rounding cannot explain.
        tokens: number of compared tokens, up to first differences.
        accepted: accepted draft tokens of the tested side; None if not known.
        rehearsed: further accepted draft tokens, from known answers.
        sampling: p-value, level and tokens of a test of samples.
        power: detectable sampling deviations, with the probability of detection.
    """

    differences: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    accepted: int | None = None
    rehearsed: int = 0
    notes: dict[str, None] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    power: dict[str, float] = field(default_factory=dict)

    def outcome(self, bound: float) -> str:
        """``"equal"``, ``"tie"`` or ``"different"``."""
        margins = [difference["margin"] for difference in self.differences]
        if not margins:
            return "equal"
        return "tie" if all(margin is not None and margin <= bound for margin in margins) else "different"


class Trial:
    """Sends requests of cases to the tested side and the references (plain decoding first), and records results.
    ``bound`` is the maximum margin of a tie, ``images`` are data URIs. The references' greedy answers are cached."""

    def __init__(self, tested: Side, references: Sequence[Side], bound: float, images: Sequence[str] = ()) -> None:
        self.tested, self.references, self.bound, self.images = tested, references, bound, images
        self.record = Record()
        self._kept: dict[tuple[Side, Question], list[Answer]] = {}

    @property
    def pipe(self) -> Pipeline:
        """The tested pipeline. Raises ``SkippedError``: the tested side is a server."""
        if not isinstance(self.tested, LocalSide):
            raise SkippedError("needs the model in this process")
        return self.tested.pipe

    @property
    def is_local(self) -> bool:
        return isinstance(self.tested, LocalSide)

    def drafted(self, drafter: Drafter | None, size: int | None = SIZE, source: str = "", **options: Any) -> LocalSide:
        """A side with another drafter and ``generation_config``; further arguments as for ``LocalSide``."""
        pipe, source = self.pipe, source or self.pipe.generation_config
        fresh = Pipeline(pipe.target, pipe.processor, drafter, pipe.name, generation_config=source)
        return LocalSide(fresh, size=size, **options).limited(self.tested.limit)

    def known(self, answers: Sequence[Sequence[int]]) -> LocalSide:
        """A side whose drafts are random trees around known answers, in the order of the requests."""
        return self.drafted(Oracle(list(map(list, answers)), vocab=self.pipe.target.config.vocab_size))

    def variant(self, change: Callable[[Drafter], Drafter] = lambda one: one, **options: Any) -> LocalSide:
        """A side with a modified copy of the drafter; further arguments as for ``LocalSide``. Raises ``SkippedError``:
        the tested side is a server."""
        drafter = self.pipe.drafter
        copied = None if drafter is None else drafter.fork(self.pipe.target)
        return self.drafted(None if copied is None else change(copied), **options)

    def caching(self) -> Side:
        """A speculating side with a prefix cache; servers use their own settings."""
        if not self.is_local:
            return self.tested
        if not isinstance(self.pipe.target, KeepsStates):
            raise SkippedError("the target keeps no prefixes")
        return self.variant(prefixes=PrefixCache(_PREFIXES))

    def limited(self, limit: int) -> Trial:
        """A trial with a lower context limit that shares this trial's record."""
        other = copy(self)
        other.tested, *other.references = (
            side.limited(limit) for side in (self.tested, *self.references) if isinstance(side, LocalSide)
        )
        return other

    def ask(self, *questions: Question, side: Side | None = None) -> list[list[Answer]]:
        side = side or self.tested
        found = side.ask(*questions)
        known = isinstance(side, LocalSide) and isinstance(side.pipe.drafter, Oracle)
        for question, choices in zip(questions, found, strict=True):
            self.require(len(choices) == question.n, question, f"{len(choices)} choices, {question.n} are expected")
        for answer in (answer for choices in found for answer in choices):
            if known:
                self.record.rehearsed += answer.accepted or 0
            elif answer.accepted is not None:
                self.record.accepted = (self.record.accepted or 0) + answer.accepted
            if answer.failure:
                self.note(f"drafting stopped: {answer.failure}")
        return found

    def expect(self, question: Question, reference: Side | None = None) -> list[Answer]:
        """A reference's choices for a question sent alone; plain decoding by default. Raises ``SkippedError``: the
        reference does not support the question."""
        key = reference or self.references[0], question
        if key not in self._kept:
            try:
                self._kept[key] = key[0].ask(question)[0]
            except UserError as error:
                raise SkippedError(str(error)) from error
        return self._kept[key]

    def same(
        self, *questions: Question, side: Side | None = None, together: bool = False, rehearse: bool = False
    ) -> list[Answer]:
        """Compare answers of the tested side, or of ``side``, with all references' answers; returns plain decoding's.

        Questions are sent one after another or ``together``; with ``rehearse``, also with drafts of the known
        answer.
        """
        expected = [self.expect(question)[0] for question in questions]
        for group in [questions] if together else [(question,) for question in questions]:
            for question, found in zip(group, self.ask(*group, side=side), strict=True):
                self.compare(question, found)
        for question in questions if rehearse and self.is_local else ():
            self.compare(question, [self.rehearsed(question)])
        return expected

    def rehearsed(self, question: Question) -> Answer:
        """Decode with drafts around plain decoding's answer, see ``Oracle``."""
        ((found,),) = self.ask(question, side=self.known([self.expect(question)[0].tokens or ()]))
        return found

    def compare(self, question: Question, found: Sequence[Answer]) -> None:
        for reference in self.references:
            try:
                expected = self.expect(question, reference)
            except SkippedError as error:
                if str(error):
                    self.note(str(error))
                continue
            for one, own in zip(found, expected, strict=False):  # generate returns a single choice
                difference = reference.difference(question, one, own)
                if difference is not None:
                    self.add(question.text, reference.name, difference)
                if reference is self.references[0]:
                    same = own.length if difference is None else difference.position or 0
                    self.record.tokens += same
                    self._compare_scores(question, one, own, same)

    def _compare_scores(self, question: Question, found: Answer, own: Answer, count: int) -> None:
        if question.top_logprobs is None:
            return
        tolerance = max(self.bound, 1e-3)
        if found.tokens is not None:
            lengths = f"{len(found.steps)} log probabilities of {len(found.tokens)} tokens"
            self.require(len(found.steps) == len(found.tokens), question, lengths)
        for place, (step, other) in enumerate(zip(found.steps[:count], own.steps, strict=False)):
            pairs = [(step[1], other[1]), *zip(*([p for _, p in one[2]] for one in (step, other)), strict=False)]
            error = max(abs(a - b) for a, b in pairs)
            missing = len(step[2]) < min(len(other[2]), question.top_logprobs)
            text = f"log probabilities of token {place} differ by {error:.3g}, at most {tolerance:.3g} is expected"
            text = f"token {place} has {len(step[2])} alternatives" if missing else text
            if missing or error > tolerance:
                self.require(False, question, text)
                return

    def require(self, holds: bool, question: Question, text: str) -> None:
        """Unless ``holds``, record a difference that rounding cannot explain."""
        if not holds:
            self.add(question.text, "the rule", Difference(None, text, "", None))

    def add(self, question: str, against: str, difference: Difference) -> None:
        found = asdict(difference)
        shown = {name: value[:80] for name, value in found.items() if isinstance(value, str)}
        self.record.differences.append({"question": question, "against": against, **found, **shown})

    def note(self, text: str) -> None:
        self.record.notes[text] = None

    def close(self) -> None:
        for side in (self.tested, *self.references):
            if isinstance(side, ServerSide):
                side.close()

    def begin(self) -> None:
        self.record = Record()
        self._before = self.tested.total_accepted() if isinstance(self.tested, ServerSide) else None

    def end(self) -> Record:
        """Return the record of the case, completed with a server's count of accepted draft tokens."""
        if self.record.accepted is None and isinstance(self.tested, ServerSide) and self._before is not None:
            self.record.accepted = (self.tested.total_accepted() or 0) - self._before
        return self.record
