"""Tests of the HTML of hand-written answers: tokens, statistics, races, plots."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from demos.answer_details import answer_details, plots_html, tree_html
from demos.endpoints import answer_result
from demos.plots import histogram, time_split
from demos.streaming import Race, StreamedAnswer, Token
from demos.views import conversation_html, race_html, tokens_html
from mmspec.compare import Difference
from mmspec.engine.stats import Stats
from mmspec.pipeline import Piece
from mmspec.speculation.trace import JudgedTree

SVG = "{http://www.w3.org/2000/svg}"


def judged(tokens, parents, path, bonus):
    return JudgedTree(tokens, parents, path, bonus, [1.0] * len(tokens), 0.5)


STEPS = [
    judged([65, 66, 67, 90], [-1, 0, 1, 0], [0, 1, 2], 68),  # A -> B C, then D
    judged([68], [-1], [0], 69),  # nothing drafted: E
    judged([69, 91], [-1, 0], [0], 70),  # rejected: F
]


def text(ids):
    return "".join(map(chr, ids))


def finished(drafter="msd", ids=(65, 66, 67, 68, 69, 70), seconds=2.0):
    answer = StreamedAnswer("tiny", drafter, text)
    stats = Stats(wall_seconds=seconds, time_to_first_token=0.5, prefill_seconds=0.5, verify_seconds=1.0)
    stats.num_generated_tokens = 1
    for drafted, depth, accepted, emitted in ((3, 2, 2, 3), (0, 0, 0, 1), (1, 1, 0, 1)):
        stats.record_step(drafted, depth, accepted, emitted)
    answer.append(Piece(text(ids), list(ids), "stop", stats, STEPS if drafter != "none" else []), text)
    answer.seconds = seconds
    return answer


def test_token_origins():
    answer = finished()
    origins = [(token.text, token.origin, token.step) for token in answer.tokens]
    assert origins == [
        ("A", "first", 0),
        ("B", "accepted", 1),
        ("C", "accepted", 1),
        ("D", "bonus", 1),
        ("E", "plain", 2),
        ("F", "bonus", 3),
    ]
    assert [token.origin for token in finished("none").tokens] == ["plain"] * 6


def test_origins_do_not_depend_on_pieces():
    answer = StreamedAnswer("tiny", "msd")
    for count, ids in ((0, [65]), (1, [66, 67, 68]), (3, [69, 70])):
        answer.append(Piece(text(ids), ids, trees=STEPS[:count]), text)
    assert answer.tokens == finished().tokens


def test_character_of_several_tokens_is_shown_when_complete():
    answer = StreamedAnswer("tiny", "none")
    whole = "é".encode()

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    answer.append(Piece("é!", [*whole, 33]), decode)
    assert [token.text for token in answer.tokens] == ["", "é", "!"]


def test_tokens_are_coloured_and_escaped():
    html = tokens_html([Token(" <b>", "first", 0), Token(" x", "accepted", 1), Token(" y", "accepted", 1)])
    assert html == '&lt;b&gt; <span class="mm-accepted" title="pass 1: drafted and accepted">x y</span>'
    html = tokens_html([Token("a", "bonus", 2), Token("\n", "accepted", 3), Token("", "bonus", 3)])
    assert html == '<span class="mm-bonus" title="pass 2: bonus token, the model\'s own">a</span>\n'


def test_conversation_html():
    html = conversation_html([("Who?", "<i>me</i>")], "<script>", finished())
    assert html.index("Who?") < html.index("<i>me</i>") < html.index("&lt;script&gt;")
    assert "<script>" not in html
    assert "4 passes" in html
    assert "drafter msd" in html
    assert conversation_html([], "", None, note="<oops>").count("&lt;oops&gt;") == 1


def test_note_on_limits_in_html():
    line = '<p class="mm-limits">shapes &amp; texts only</p>'
    assert conversation_html([("Who?", "me")], "And?", finished(), limits="shapes & texts only").count(line) == 1
    assert race_html(Race(finished(), finished("none")), limits="shapes & texts only").count(line) == 1
    assert "mm-limits" not in conversation_html([], "And?", finished()) + race_html(Race(finished(), finished("none")))


def test_answer_result():
    assert answer_result(finished()) == {
        "text": "ABCDEF",
        "tokens": 6,
        "seconds": 2.0,
        "tokens_per_second": pytest.approx(5 / 1.5),
        "acceptance": pytest.approx(5 / 3),
        "draft_acceptance_rate": pytest.approx(2 / 4),
        "finish_reason": "stop",
        "model": "tiny",
        "drafter": "msd",
    }


@pytest.mark.parametrize("equal", [True, False])
def test_race_html(equal):
    fast, slow = finished(), finished("none", seconds=4.0)
    race = Race(fast, slow)
    assert "racing" in race_html(race)
    assert "waiting until other requests have ended" in race_html(replace(race, waiting=True))
    race.decode_ratio, race.end_to_end_ratio, race.equal = 2.346, 2.0, equal
    race.difference = None if equal else Difference(3, 1, 2, 0.0123)
    html = race_html(race)
    assert "<b>2.35x</b> the decoding speed, <b>2.00x</b> end to end" in html
    assert ("The 6 tokens are equal." in html) is equal
    assert ("differ first at position 3. The logit margin there is 0.012." in html) is not equal
    assert "each on its own clock" in html


def test_answer_details():
    details = answer_details(finished())
    assert details is not None
    assert details.best_step == 1
    tree = ElementTree.fromstring(tree_html(details, 1))
    kinds = [group.get("class") for group in tree.iter(f"{SVG}g")]
    assert kinds[:5] == ["root", "kept", "kept", "rejected", "bonus"]
    assert tree_html(details, 0) == tree_html(details, 4) == tree_html(None, 1) == ""
    assert "Passes by accepted draft tokens" in plots_html(details)
    assert answer_details(finished("none")) is None


def test_plots():
    root = ElementTree.fromstring(histogram([3, 0, 6]))
    bars = [float(bar.get("height")) for bar in root.iter("rect")]
    assert bars == [42.0, 0.0, 84.0]
    assert [title.text for title in root.iter("title")][2] == "6 passes accepted 2"
    assert histogram([]) == ""
    stats = Stats(prefill_seconds=0.1, draft_seconds=0.2, verify_seconds=0.6, commit_seconds=0.1)
    root = ElementTree.fromstring(time_split(stats))
    labels = [element.text for element in root.iter("text")]
    assert labels[0] == "Time: 1.00 s"
    assert "600 ms · 60%" in labels
    widths = {bar.get("class"): float(bar.get("width")) for bar in root.iter("rect")}
    assert widths["verify"] == 170.0 == pytest.approx(3 * widths["draft"], abs=0.3)
