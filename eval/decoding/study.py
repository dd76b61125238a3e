"""Decoding held-out conversations plainly and with drafters, and counting what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.harness.acceptance import Tally
from eval.harness.drafters import Watched, tree_sizes
from eval.harness.prompts import Conversation
from mmspec.compare import first_difference
from mmspec.drafter import Drafter, fork
from mmspec.pipeline import Pipeline


@dataclass(frozen=True)
class Key:
    """What a tally is of. ``size`` is how the tree size was asked for, ``nodes`` what that meant."""

    suite: str
    temperature: float
    drafter: str
    size: str
    nodes: int


@dataclass
class Study:
    """Measures drafters on conversations with one target.

    Args:
        pipe: the target; it decodes plainly.
        drafters: by label, as loaded.
        nodes: tree sizes, as ``tree_sizes`` takes them.
        temperatures, seeds: how to decode; above temperature 0, every request is decoded with so many seeds.
        max_new_tokens: of each answer.
        advance: called after every decoded answer.

    Attributes:
        tallies: what was measured.
        unequal: the first few outputs that were not those of plain decoding.
    """

    pipe: Pipeline
    drafters: Mapping[str, Drafter]
    nodes: str = "default"
    temperatures: Sequence[float] = (0.0, 1.0)
    seeds: int = 1
    max_new_tokens: int = 160
    advance: Callable[[], Any] = lambda: None
    tallies: dict[Key, Tally] = field(default_factory=dict)
    unequal: list[dict[str, Any]] = field(default_factory=list)

    def decodings(self, counts: Mapping[str, int]) -> int:
        """About how many answers a run over so many conversations of each suite decodes."""
        trees = sum(len(tree_sizes(drafter, self.nodes)) for drafter in self.drafters.values())
        rounds = sum(self.seeds if temperature > 0 else 1 for temperature in self.temperatures)
        answers = sum(count * (3 if name == "turns" else 1) for name, count in counts.items())
        return answers * rounds * (1 + trees)

    def run(self, name: str, conversations: Sequence[Conversation]) -> None:
        """Decode a suite's conversations plainly and with every drafter and tree size."""
        asked, groups, greedy = self._ask(conversations)
        for temperature in self.temperatures:
            for turn in range(self.seeds if temperature > 0 else 1):
                options = [
                    {
                        "temperature": temperature,
                        "seed": 1_000_000 * turn + index,
                        "max_new_tokens": self.max_new_tokens,
                    }
                    for index in range(len(asked))
                ]
                expected = greedy if temperature == 0 else self._plain(asked, options)
                for label, drafter in self.drafters.items():
                    for size, nodes in tree_sizes(drafter, self.nodes).items():
                        key = Key(name, temperature, label, size, nodes)
                        tally = self.tallies.setdefault(key, Tally())
                        self._decode(key, tally, drafter, list(zip(groups, asked, options, expected, strict=True)))

    def _ask(self, conversations: Sequence[Conversation]) -> tuple[list[dict[str, Any]], list[int], list[list[int]]]:
        """The requests to measure, the number of each one's conversation, and the greedy tokens of its answer."""
        requests, groups, tokens = [], [], []
        for number, conversation in enumerate(conversations):
            answers: list[str] = []
            for turn in range(len(conversation.questions)):
                request = conversation.request(answers)
                answer = self.pipe.generate(**request, max_new_tokens=self.max_new_tokens)
                answers.append(answer.text)
                if turn >= conversation.counted:
                    requests.append(request)
                    groups.append(number)
                    tokens.append(answer.token_ids)
                self.advance()
        return requests, groups, tokens

    def _plain(self, asked: Sequence[dict[str, Any]], options: Sequence[dict[str, Any]]) -> list[list[int]]:
        answers = []
        for request, keywords in zip(asked, options, strict=True):
            answers.append(self.pipe.generate(**request, **keywords).token_ids)
            self.advance()
        return answers

    def _decode(
        self, key: Key, tally: Tally, drafter: Drafter, cases: Sequence[tuple[int, dict[str, Any], Any, list[int]]]
    ) -> None:
        watched = Watched(fork(drafter, self.pipe.target), count_forwards=True)
        speculative = Pipeline(self.pipe.target, watched)
        for number, (group, request, keywords, expected) in enumerate(cases):
            answer = speculative.generate(**request, nodes=key.nodes, **keywords)
            equal = answer.token_ids == expected
            tally.add((key.suite, group), answer.stats, equal)
            if not equal and len(self.unequal) < 20:
                where = first_difference(self.pipe.target, request, keywords, answer.token_ids, expected)
                self.unequal.append({**vars(key), "request": number, **vars(where)})
            self.advance()
        tally.watch(watched)
