"""Suffix drafter: continuations of the longest earlier match of the sequence's end.

SuffixDecoding (arXiv 2411.04975) looks the longest match up in a suffix tree. Here the structure is a suffix automaton,
which takes constant time per token, and continuations are weighted as by prediction by partial matching: a context's
counts, mixed with those of its shorter suffixes. ``ngram`` looks up the latest matches instead, learns how far to trust
them by their length, resumes copies after a difference, and remembers earlier requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmspec.core.target import Prompt, TargetOutput
from mmspec.drafters.lookup import Children, LookUpDrafter, mixed
from mmspec.drafters.spec import DrafterSpec

_CONTEXTS = 2  # contexts that are mixed, longest first; more did not raise acceptance
_COUNTED = 64  # contexts counted per token: of more, the text repeats itself and the longest ones decide


class Suffix(LookUpDrafter):
    """Suffix drafter. Proposals depend on the sequence alone."""

    learns = False

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self.rows += map(_Row, history)

    def start(self, row: int, path: Sequence[int] = ()) -> tuple[int, Children]:
        text, state = self.rows[row].text, self.rows[row].current()
        for token in path:
            state = text.follow(state, token)
        return state, text.children


class _Row:
    """The automaton of one sequence, extended as the sequence grows."""

    def __init__(self, history: list[int]) -> None:
        self.history, self.text, self.indexed = history, Automaton(), 0

    def current(self) -> int:
        """State of the longest suffix of the sequence that occurred earlier in it."""
        for token in self.history[self.indexed :]:
            self.text.append(token)
        self.indexed = len(self.history)
        return self.text.link[self.text.last]


class Automaton:
    """Suffix automaton of a text (Blumer et al., 1985).

    A state represents the substrings that end at the same places of the text; state 0 is the empty substring.

    Attributes:
        next: of each state, the state after each further token.
        link: of each state, that of its longest suffix which ends at more places; -1 of state 0.
        count: of each state, the number of places.
        last: state of the whole text.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.count = [-1], [0]
        self._length = [0]  # of the longest substring of each state
        self.last = 0

    def append(self, token: int) -> None:
        new = self._add({}, self._length[self.last] + 1, 0, 0)
        state, self.last = self.last, new
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._ending(state, token)
        state = new
        for _ in range(_COUNTED):
            if state <= 0:
                break
            self.count[state] += 1
            state = self.link[state]

    def _ending(self, state: int, token: int) -> int:
        """The state whose longest substring is that of ``state`` and then ``token``, split off if needed."""
        successor = self.next[state][token]
        if self._length[successor] == self._length[state] + 1:
            return successor
        copied = self._add(
            dict(self.next[successor]), self._length[state] + 1, self.link[successor], self.count[successor]
        )
        self.link[successor] = copied
        while state >= 0 and self.next[state].get(token) == successor:
            self.next[state][token] = copied
            state = self.link[state]
        return copied

    def _add(self, following: dict[int, int], length: int, link: int, count: int) -> int:
        self.next.append(following)
        self._length.append(length)
        self.link.append(link)
        self.count.append(count)
        return len(self.next) - 1

    def follow(self, state: int, token: int) -> int:
        """State of the longest suffix of a state's substring and a token that is in the text."""
        while state >= 0 and token not in self.next[state]:
            state = self.link[state]
        return self.next[state][token] if state >= 0 else 0

    def children(self, state: int) -> Iterator[tuple[int, float, int]]:
        """Next tokens after a state's substring, with their probabilities and states."""
        contexts: list[dict[int, int]] = []
        states: dict[int, int] = {}
        while state > 0 and len(contexts) < _CONTEXTS:  # single tokens' frequencies predict nothing
            contexts.append({token: self.count[at] for token, at in self.next[state].items()})
            states = self.next[state] | states
            state = self.link[state]
        for token, p in mixed(contexts).items():
            yield token, p, states[token]


SPEC = DrafterSpec(
    "suffix",
    "Suffix",
    "looks up the longest earlier match of the sequence's end, of any length (arXiv 2411.04975)",
    Suffix,
)
