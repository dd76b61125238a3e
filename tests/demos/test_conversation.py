"""Tests of conversations as the page keeps them: JSON and back, malformed ones."""

import json
from dataclasses import asdict

import pytest

from mmspec.demos.conversation import Conversation, Turn, parse
from mmspec.demos.racing import Token
from mmspec.demos.views import tokens_html, turns_html

TOKENS = [Token("A", "first", 0), Token(" <b", "accepted", 1), Token("ox>", "accepted", 1), Token(".", "bonus", 1)]


def kept():
    return Conversation([Turn.of("What?", TOKENS, stopped=True)], seed=7, running="id", opened=True)


def test_page_keeps_a_conversation():
    conversation = kept()
    assert parse(json.loads(json.dumps(asdict(conversation)))) == conversation
    assert conversation.history == [("What?", "A <box>.")]
    assert turns_html(conversation.turns)[0][1].startswith(tokens_html(TOKENS))
    assert "<b" not in turns_html(conversation.turns)[0][1].replace("&lt;b", "")


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: sent.pop("turns"),
        lambda sent: sent["turns"][0]["tokens"][0].update(origin='"><script>'),
        lambda sent: sent["turns"][0]["tokens"][0].update(step="many"),
        lambda sent: sent["turns"][0].update(tokens=sent["turns"][0]["tokens"] * 300),
        lambda sent: sent.update(seed=None),
    ],
)
def test_malformed_conversation_is_an_empty_one(change):
    sent = asdict(kept())
    change(sent)
    assert parse(sent) == Conversation()
    assert parse(None) == parse([1]) == Conversation()


def test_long_conversation_is_cut_to_its_last_turns():
    sent = asdict(kept())
    sent["turns"] *= 40
    assert len(parse(sent).turns) == 12
