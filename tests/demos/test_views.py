"""What the page shows of runs that are written down here: texts, colours, plots."""

from xml.etree import ElementTree

import pytest

from demos.endpoints import answer
from demos.inside import inside_of, plots_html, step_html
from demos.plots import histogram, time_split
from demos.runs import Race, Run, Token
from demos.views import conversation_html, race_html, tokens_html
from mmspec.compare import Difference
from mmspec.pipeline import Piece
from mmspec.stats import Stats
from mmspec.trace import JudgedTree

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
    run = Run("tiny", drafter, text)
    stats = Stats(wall_seconds=seconds, time_to_first_token=0.5, prefill_seconds=0.5, verify_seconds=1.0)
    stats.num_generated_tokens = 1
    for drafted, depth, accepted, emitted in ((3, 2, 2, 3), (0, 0, 0, 1), (1, 1, 0, 1)):
        stats.record_step(drafted, depth, accepted, emitted)
    run.take(Piece(text(ids), list(ids), "stop", stats), STEPS if drafter != "none" else [], text)
    run.seconds = seconds
    return run


def test_every_token_has_an_origin():
    run = finished()
    origins = [(token.text, token.origin, token.step) for token in run.tokens]
    assert origins == [
        ("A", "first", 0),
        ("B", "accepted", 1),
        ("C", "accepted", 1),
        ("D", "bonus", 1),
        ("E", "plain", 2),
        ("F", "bonus", 3),
    ]
    assert [token.origin for token in finished("none").tokens] == ["plain"] * 6


def test_origins_do_not_depend_on_how_pieces_arrive():
    run = Run("tiny", "msd")
    for count, ids in ((0, [65]), (1, [66, 67, 68]), (3, [69, 70])):
        run.take(Piece(text(ids), ids), STEPS[:count], text)
    assert run.tokens == finished().tokens


def test_a_character_of_several_tokens_is_shown_when_whole():
    run = Run("tiny", "none")
    whole = "é".encode()

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    run.take(Piece("é!", [*whole, 33]), [], decode)
    assert [token.text for token in run.tokens] == ["", "é", "!"]


def test_tokens_are_marked_and_escaped():
    html = tokens_html([Token(" <b>", "first", 0), Token(" x", "accepted", 1), Token(" y", "accepted", 1)])
    assert html == '&lt;b&gt; <span class="mm-accepted" title="pass 1: drafted and accepted">x y</span>'
    html = tokens_html([Token("a", "bonus", 2), Token("\n", "accepted", 3), Token("", "bonus", 3)])
    assert html == '<span class="mm-bonus" title="pass 2: bonus token, the model\'s own">a</span>\n'


def test_a_conversation_keeps_what_was_said():
    html = conversation_html([("Who?", "<i>me</i>")], "<script>", finished())
    assert html.index("Who?") < html.index("<i>me</i>") < html.index("&lt;script&gt;")
    assert "<script>" not in html
    assert "4 passes" in html
    assert "drafter msd" in html
    assert conversation_html([], "", None, note="<oops>").count("&lt;oops&gt;") == 1


def test_limits_of_the_model_stand_beside_the_answer():
    line = '<p class="mm-limits">shapes &amp; texts only</p>'
    assert conversation_html([("Who?", "me")], "And?", finished(), limits="shapes & texts only").count(line) == 1
    assert race_html(Race(finished(), finished("none")), limits="shapes & texts only").count(line) == 1
    assert "mm-limits" not in conversation_html([], "And?", finished()) + race_html(Race(finished(), finished("none")))


def test_an_endpoints_figures_are_the_runs():
    assert answer(finished()) == {
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
def test_a_race_tells_who_won_and_whether_it_was_the_same_race(equal):
    fast, slow = finished(), finished("none", seconds=4.0)
    race = Race(fast, slow)
    assert "racing" in race_html(race)
    race.decode_ratio, race.end_to_end_ratio, race.equal = 2.346, 2.0, equal
    race.difference = None if equal else Difference(3, 1, 2, 0.0123)
    html = race_html(race)
    assert "<b>2.35x</b> the decoding speed, <b>2.00x</b> end to end" in html
    assert ("The 6 tokens are equal." in html) is equal
    assert ("differ first at position 3. The model's logits are 0.012 apart there." in html) is not equal
    assert "each on its own clock" in html


def test_inside_a_run():
    run = finished()
    inside = inside_of(run)
    assert inside is not None
    assert inside.best == 1
    tree = ElementTree.fromstring(step_html(inside, 1))
    kinds = [group.get("class") for group in tree.iter(f"{SVG}g")]
    assert kinds[:5] == ["root", "kept", "kept", "rejected", "bonus"]
    assert step_html(inside, 0) == step_html(inside, 4) == step_html(None, 1) == ""
    assert "Passes by accepted drafts" in plots_html(inside)
    assert inside_of(finished("none")) is None


def test_plots_show_the_figures():
    root = ElementTree.fromstring(histogram([3, 0, 6]))
    bars = [float(bar.get("height")) for bar in root.iter("rect")]
    assert bars == [42.0, 0.0, 84.0]
    assert [title.text for title in root.iter("title")][2] == "6 passes accepted 2"
    assert histogram([]) == ""
    stats = Stats(prefill_seconds=0.1, draft_seconds=0.2, verify_seconds=0.6, commit_seconds=0.1)
    root = ElementTree.fromstring(time_split(stats))
    told = [element.text for element in root.iter("text")]
    assert told[0] == "Time: 1.00 s"
    assert "600 ms · 60%" in told
    widths = {bar.get("class"): float(bar.get("width")) for bar in root.iter("rect")}
    assert widths["verify"] == 170.0 == pytest.approx(3 * widths["draft"], abs=0.3)
