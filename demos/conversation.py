"""A visitor's conversation in a tab. The page keeps it, so that it survives a restart of the server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, get_args
from unittest import mock

import gradio as gr

from mmspec.demos.chat_request import MAX_NEW_TOKENS, MAX_TURNS
from mmspec.demos.racing import Origin, Token


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        tokens: of the answer; tokens of one pass and origin are joined.
        stopped: whether the visitor stopped it.
    """

    prompt: str
    tokens: list[Token]
    stopped: bool = False

    @staticmethod
    def of(prompt: str, tokens: Iterable[Token], stopped: bool) -> Turn:
        """The turn of an answer's tokens."""
        groups = groupby(tokens, key=lambda token: (token.origin, token.step))
        joined = [Token("".join(token.text for token in group), *key) for key, group in groups]
        return Turn(prompt, joined, stopped)

    @property
    def answer(self) -> str:
        return "".join(token.text for token in self.tokens).strip()


@dataclass(frozen=True)
class Conversation:
    """State of a visitor's conversation.

    Attributes:
        turns: oldest first.
        seed: sampling seed of all turns; 0 until the first.
        running: id of the running request; empty if none runs.
        opened: whether the tab has been used, or has shown its opening race.
    """

    turns: list[Turn] = field(default_factory=list)
    seed: int = 0
    running: str = ""
    opened: bool = False

    def restarted(self) -> Conversation:
        """A new conversation beside the running request, if any."""
        return Conversation(running=self.running, opened=True)

    def with_turn(self, turn: Turn) -> Conversation:
        return replace(self, turns=[*self.turns, turn])

    @property
    def history(self) -> list[tuple[str, str]]:
        return [(turn.prompt, turn.answer) for turn in self.turns]


def parse(value: Any) -> Conversation:
    """The conversation that a page sent; an empty one if it is malformed."""
    try:
        turns = [_parse_turn(turn) for turn in value["turns"][-MAX_TURNS:]]
        return Conversation(turns, int(value["seed"]), str(value["running"]), bool(value["opened"]))
    except (KeyError, TypeError, ValueError):
        return Conversation()


def _parse_turn(turn: Any) -> Turn:
    tokens = [Token(str(token["text"]), token["origin"], int(token["step"])) for token in turn["tokens"]]
    if len(tokens) > MAX_NEW_TOKENS or not {token.origin for token in tokens} <= set(get_args(Origin)):
        raise ValueError("malformed tokens")
    return Turn(str(turn["prompt"]), tokens, bool(turn["stopped"]))


with mock.patch("gradio.component_meta.create_or_modify_pyi", create=True):  # see ``uploads``

    class KeptConversation(gr.JSON):
        """A component, not meant to be seen, whose value is a ``Conversation``."""

        def get_block_name(self) -> str:
            return "json"

        def preprocess(self, payload: Any) -> Conversation:  # type: ignore[override]
            return parse(payload)

        def postprocess(self, value: Conversation | None) -> Any:  # type: ignore[override]
            return super().postprocess(asdict(value or Conversation()))
