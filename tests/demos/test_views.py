"""HTML of answers and races, and around the controls."""

from __future__ import annotations

import codecs
import json
import re
from email.message import Message
from html import unescape
from xml.etree import ElementTree

import pytest

from mmspec import plugins
from mmspec.compare import Difference
from mmspec.demos import views
from mmspec.demos.catalog import drafter_of, make_catalog
from mmspec.demos.chat_request import ChatRequest, Token
from mmspec.demos.racing import Race, StreamedAnswer, recording
from mmspec.demos.views import claim_html, histogram, result_html, time_split, tokens_html
from mmspec.engine.stats import Stats, TreeRecord
from mmspec.pipeline import Piece

SVG = "{http://www.w3.org/2000/svg}"


def judged(tokens, parents, path, bonus):
    return TreeRecord(tokens, parents, path, bonus, [1.0] * len(tokens), 0.5)


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
    answer.seconds = seconds
    answer.append(Piece(text(ids), list(ids), "stop", stats, STEPS if drafter != "none" else []), text)
    return answer


def test_token_origins():
    named = [("A", "first", 0), ("B", "accepted", 1), ("C", "accepted", 1), ("D", "bonus", 1), ("E", "plain", 2)]
    expected = [Token(*each) for each in (*named, ("F", "bonus", 3))]
    answer = StreamedAnswer("tiny", "msd")
    for count, ids in ((0, [65]), (1, [66, 67, 68]), (3, [69, 70])):
        answer.append(Piece(text(ids), ids, trees=STEPS[:count]), text)
    assert answer.tokens == finished().tokens == expected
    assert [token.origin for token in finished("none").tokens] == ["plain"] * 6


def test_character_of_several_tokens_is_shown_when_complete():
    answer = StreamedAnswer("tiny", "none")
    whole = "é".encode()
    reader = codecs.getincrementaldecoder("utf-8")()
    answer.append(Piece("é!", [*whole, 33]), lambda ids: reader.decode(bytes(ids)))
    assert [token.text for token in answer.tokens] == ["", "é", "!"]


def test_passes_of_one_piece_have_equal_shares_of_its_time():
    assert finished().pass_ends == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert (finished().passes, finished("none").passes) == (3, 5)
    answer = StreamedAnswer("tiny", "msd", seconds=1.0)
    answer.append(Piece("A", [65]), text)
    answer.seconds = 3.0
    answer.append(Piece("BCD", [66, 67, 68], trees=STEPS[:1]), text)
    assert answer.pass_ends == [1.0, 3.0]


def test_tokens_are_coloured_and_escaped():
    html = tokens_html([Token(" <b>", "first", 0), Token(" x", "accepted", 1), Token(" y", "accepted", 1)])
    first = '<span data-pass="0">&lt;b&gt;</span>'
    assert html == f'{first} <span class="mm-accepted" title="pass 1: drafted and accepted" data-pass="1">x y</span>'
    html = tokens_html([Token("a", "bonus", 2), Token("\n", "accepted", 3), Token("", "bonus", 3)])
    assert html == '<span class="mm-bonus" title="pass 2: bonus token, the model\'s own" data-pass="2">a</span>\n'


def test_answer_in_a_conversation():
    html = result_html([("Who?", "<i>me</i>")], "<script>", Race([finished()]))
    assert html.index("Who?") < html.index("<i>me</i>") < html.index("&lt;script&gt;")
    assert "<script>" not in html
    assert "6 tokens in 3 passes" in html
    assert "mm-limits" not in html
    assert result_html([], note="<oops>").count("&lt;oops&gt;") == 2  # shown, and announced
    assert "2 requests ahead" in result_html([], "Who?", Race([]), ahead=2)
    assert "stopped</span>" in result_html([], "And?", Race([finished()]), stopped=True)
    line = '<p class="mm-limits">shapes &amp; texts only</p>'
    assert result_html([], "And?", Race([finished()]), limits="shapes & texts only").count(line) == 1


def test_legend_names_only_the_colours_that_there_are():
    assert "mm-legend" not in result_html([], "And?", Race([finished("none")]))
    answer = finished()
    answer.tokens = [token for token in answer.tokens if token.origin != "bonus"]
    legend = re.search('<p class="mm-legend">.*?</p>', result_html([], "And?", Race([answer])))[0]
    assert ("drafted and accepted" in legend, "bonus" in legend) == (True, False)


@pytest.mark.parametrize(
    ("seconds", "equal", "heading"),
    [
        (4.0, True, "The same 6 tokens, 2.0x faster (median of 3 runs)"),
        (2.1, True, "The same 6 tokens, as fast (median of 3 runs)"),
        (1.91, True, "The same 6 tokens, as fast (median of 3 runs)"),
        (1.88, True, "The same 6 tokens, 1.1x slower (median of 3 runs)"),
        (1.0, True, "The same 6 tokens, 2.0x slower (median of 3 runs)"),
        (4.0, False, "The answers differ from token 4 on"),
    ],
)
def test_race(seconds, equal, heading):
    race = Race([finished("none", seconds=seconds), finished()])
    assert "Racing" in result_html([], "Who?", race)
    assert heading not in claim_html(race)
    race.runs = 3
    race.equal, race.difference = equal, None if equal else Difference(3, 1, 2, 0.0123)
    assert f"<h1>{heading}</h1>" in claim_html(race)
    html = result_html([], "Who?", race)
    assert "Complete runs: 3." in html
    assert ("the logit margin at the difference is 0.012" in html) is not equal
    rows = re.findall("<tr>(.*?)</tr>", html)
    assert len(rows) == 3
    assert rows[2].endswith(f"<td>{seconds / 2:.2f}x</td>")


def test_race_that_is_timed_further_and_one_that_was_stopped_meanwhile():
    race = Race([finished("none"), finished(seconds=1.0)], equal=True, runs=1)
    html = result_html([], "Who?", race)
    assert "equal tokens; timing 2 more runs…" in html
    assert "<tr>" not in html
    html = result_html([], "Who?", race, recorded={"lanes": []})
    assert "more runs" not in html
    assert "Complete runs: 1." in html
    assert "(one run)" in claim_html(race)


def test_bars_are_full_only_at_the_end():
    answer = StreamedAnswer("tiny", "none", limit=8)
    for count in range(1, 5):
        answer.append(Piece(text([65]), [65]), text)
        assert f"width:{12.5 * count}%" in result_html([], "Who?", Race([answer, answer]))
    answer.append(Piece("", [], "stop", Stats()), text)
    assert "width:100.0%" in result_html([], "Who?", Race([answer, answer]))


def test_recording():
    race = Race([finished("none"), finished("msd@chain")])
    recorded = recording(race.lanes, ChatRequest("text", "Who?", model="tiny", seed=3), None)
    html = result_html([], "Who?", race, recorded=recorded)
    read = json.loads(unescape(re.search('data-recording="(.*?)"', html)[1]))
    assert read["settings"]["methods"] == ["none", "msd@chain"]
    assert (read["settings"]["seed"], "example" in read["settings"]) == (3, False)
    plain, chain = read["lanes"]
    assert (plain["label"], chain["label"]) == ("Plain", "MSD, chain")
    assert (plain["emitted"], chain["emitted"]) == ([1] * 6, [1, 3, 1, 1])
    assert chain["trees"][0]["path"] == [0, 1, 2]
    assert chain["texts"]["90"] == "Z"
    assert plain["trees"] == []


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
    assert widths["verify"] == 150.0 == pytest.approx(3 * widths["draft"], abs=0.3)


def test_each_method_has_a_line_with_its_paper():
    catalog = make_catalog()
    for model in plugins.installed():
        methods = catalog.methods(model)
        lines = re.findall("<li>.*?</li>", views.methods_html(methods))
        drafters = {name for method in methods for name in drafter_of(method).split("+")}
        chain = any(method.endswith("@chain") for method in methods)
        assert len(lines) == len(drafters) + chain
        for line in lines:
            found = re.search(r'<a href="https://arxiv.org/abs/([0-9.]+)" .+?>arXiv (.+?)</a>', line)
            link, number, again = found.group(0, 1, 2)
            assert number == again
            assert "target" not in line.replace(link, "")


def test_addresses_that_the_package_states_are_linked(monkeypatch):
    stated = Message()
    stated["Project-URL"] = "Source, https://example.org/code"
    stated["Project-URL"] = "Documentation, https://example.org/docs"
    stated["Project-URL"] = "Funding, https://example.org/pay"
    monkeypatch.setattr(views, "metadata", lambda name: stated)
    assert re.findall('<a href="(.+?)">(.+?)</a>', views.links_html()) == [
        ("https://example.org/code", "Code"),
        ("https://example.org/docs", "Docs"),
        ("?view=api", "Use from Python"),
    ]
