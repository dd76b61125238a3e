"""Event handlers of tabs, links, and the HTML of answers and races, without a browser."""

import json
import os
import re
from dataclasses import asdict, replace
from email.message import Message
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import pytest
from PIL import Image

from mmspec import UserError, plugins
from mmspec.compare import Difference
from mmspec.demos import views
from mmspec.demos.catalog import TEXTS, TRAINED_TEXTS, Catalog, drafter_of
from mmspec.demos.chat_request import ChatRequest, ChatState, Token, Turn
from mmspec.demos.page import Tab, linked
from mmspec.demos.racing import Race, StreamedAnswer, recording
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder
from mmspec.demos.views import claim_html, result_html, tokens_html
from mmspec.engine.stats import Stats, TreeRecord
from mmspec.pipeline import Piece
from mmspec.vision.embedded import samples


def judged(tokens, parents, path, bonus):
    probs, texts = [1.0 / 3] * len(tokens), [chr(token) for token in tokens]
    return TreeRecord(tokens, parents, path, bonus, probs, 0.5, texts=texts, bonus_text=chr(bonus))


STEPS = [
    judged([65, 66, 67, 90], [-1, 0, 1, 0], [0, 1, 2], 68),  # A -> B C, then D
    judged([68], [-1], [0], 69),  # nothing drafted: E
    judged([69, 91], [-1, 0], [0], 70),  # rejected: F
]


def text(ids):
    return "".join(map(chr, ids))


def piece(ids, *more, **named):
    return Piece(text(ids), list(ids), *more, parts=[("", chr(token)) for token in ids], **named)


def answered(drafter="msd", ids=(65, 66, 67, 68, 69, 70), seconds=2.0):
    answer = StreamedAnswer("tiny", drafter)
    stats = Stats(wall_seconds=seconds, time_to_first_token=0.5, prefill_seconds=0.5, verify_seconds=1.0)
    stats.num_generated_tokens = 1
    for drafted, depth, accepted, emitted in ((3, 2, 2, 3), (0, 0, 0, 1), (1, 1, 0, 1)):
        stats.record_step(drafted, depth, accepted, emitted)
    answer.seconds = seconds
    answer.append(piece(ids, "stop", stats, STEPS if drafter != "none" else []))
    return answer


class Echo(Service):
    """Records requests and answers each immediately."""

    def answer(self, request):
        self.requests.append(request)
        yield Race([answered("none")])

    def race(self, request, methods=None):
        self.requests.append(request)
        yield Race([answered("none"), answered("ngram")], equal=True)

    def opening(self, request):
        yield from self.race(request)


@pytest.fixture
def service(tmp_path):
    (tmp_path / "samples").mkdir()
    catalog = Catalog.of(open=False)
    made = Echo(None, replace(catalog, models=("llava", *catalog.models)), UploadFolder(tmp_path, 2**20))
    made.requests = []
    return made


@pytest.fixture
def tabs(service):
    with gr.Blocks():
        return {kind: Tab(service, kind, service.uploads.folder / "samples") for kind in ("image", "video", "text")}


@pytest.fixture
def send(tabs):
    """Press "Ask" or "Race" in the tab of a kind; returns the state and the properties of the components at the end."""

    def press(kind, prompt, model, uploads=(), kept=None, follow_up=False, button="ask", seed=0):
        media = [] if kind == "text" else [[(path, None) for path in uploads]]
        settings, shown = (model, "auto", 0.0, seed, 12, 8, *media), {}
        for updates in tabs[kind].answer(button == "race", kept or {}, follow_up, prompt, ["none", "ngram"], *settings):
            shown |= updates
        return seen(tabs[kind], shown)

    return press


def seen(tab, updates):
    controls = tab.controls
    states = [updates.get(one) for one in (controls.race, controls.ask, controls.stop)]
    return SimpleNamespace(
        kept=updates.get(controls.conversation),
        html=updates.get(controls.result),
        claim=updates.get(controls.claim),
        buttons=[state.interactive for state in states if state is not None],
        follow_up=getattr(updates.get(controls.follow_up), "interactive", None),
    )


IDLE, BUSY = [True, True, False], [False, False, True]


@pytest.mark.parametrize("button", ["ask", "race"])
@pytest.mark.parametrize("follow_up", [False, True])
def test_a_question_starts_a_conversation_unless_it_is_a_follow_up(send, service, button, follow_up):
    first = send("text", "Hello", "tiny-hybrid", button=button)
    assert (first.buttons, first.follow_up, first.kept["running"]) == (IDLE, True, "")
    again = send("text", " Hello ", "", kept=first.kept, follow_up=follow_up, button=button)
    history = [("Hello", "ABCDEF")] * follow_up
    assert [request.history for request in service.requests] == [[], history]
    assert ChatState.parse(again.kept).history == [*history, ("Hello", "ABCDEF")]
    assert again.html.count('class="mm-asked">Hello') == 1 + len(history)
    request = service.requests[0]
    assert (request.model, request.drafter, request.max_new_tokens, request.frames) == ("tiny-hybrid", "auto", 12, 8)
    seeds = [request.seed for request in service.requests]
    assert 0 not in seeds
    assert (seeds[0] == seeds[1]) == follow_up
    send("text", "And?", "tiny-hybrid", kept=first.kept, follow_up=True, seed=7)
    assert service.requests[-1].seed == 7
    assert ("as fast" in first.claim) == (button == "race")  # the headline goes with its race
    assert ("The model&#39;s own answer, sooner" in first.claim) == (button == "ask")


@pytest.mark.parametrize("button", ["ask", "race"])
def test_notes_on_inputs(send, service, tmp_path, button):
    """On limits of embedded models for inputs other than examples, and on several images for some models."""

    def stored(path):
        copy = service.uploads.folder / f"copy-{Path(path).name}"
        copy.write_bytes(Path(path).read_bytes())
        return str(copy)

    own, sample = str(tmp_path / "lake.png"), stored(samples() / "scene.png")
    Path(own).write_bytes(Path(sample).read_bytes()[::-1])  # of the same size and time
    drawn = (tmp_path / "samples" / "scene.png").stat()
    os.utime(own, ns=(drawn.st_atime_ns, drawn.st_mtime_ns))
    fish, rings = stored(tmp_path / "samples" / "goldfish.jpg"), str(tmp_path / "samples" / "two-rings.png")
    service.models = SimpleNamespace(get=lambda name: SimpleNamespace(one_image=name == "llava"))
    limits = {name: plugins.limits(name) for name in ("tiny-llava", "tiny-hybrid")}
    one_image = "llava was trained with one picture in a question"
    for kind, prompt, model, uploads, note in (
        ("image", "Describe the image.", "tiny-llava", [own], limits["tiny-llava"]),
        ("image", "Describe the image.", "tiny-llava", [sample, own], limits["tiny-llava"]),
        ("image", "Describe the image.", "tiny-llava", [fish], limits["tiny-llava"]),
        ("text", "Who was Ada Lovelace?", "", [], limits["tiny-hybrid"]),
        ("image", "How many objects are there?", "tiny-llava", [sample, rings], ""),
        ("text", next(iter(TRAINED_TEXTS.values())), "tiny-hybrid", [], ""),
        ("image", "Describe the image.", "llava", [own], ""),
        ("image", "Describe the image.", "llava", [own, own], one_image),
    ):
        if model == "" and service.catalog.default_model("text") != "tiny-hybrid":
            continue
        html = send(kind, prompt, model, uploads, button=button).html
        found = re.findall('<p class="mm-limits">(.*?)</p>', html)
        assert len(found) == bool(note)
        assert note in unescape("".join(found))
    gone = str(tmp_path / "gone.png")
    for upload, example in ((sample, '"example":"scene.png"'), (own, '"lanes"'), (gone, '"lanes"')):
        html = unescape(send("image", "What?", "tiny-llava", [upload], button=button).html)
        assert (example in html, '"example"' in html) == (True, upload == sample)


def test_errors_are_shown_and_the_conversation_stays(send, service, tabs, monkeypatch):
    kept = send("text", "Hello", "tiny-hybrid").kept
    offered = ", ".join(service.catalog.models)
    service.requests.clear()
    for arguments, message in (
        (("text", "Hello", "/etc"), f"Model must be one that this server offers: expected {offered}, got '/etc'."),
        (("text", "x" * 4001, ""), "prompt: String should have at most 4000 characters."),
    ):
        shown = send(*arguments, kept=kept, follow_up=True)
        assert message in unescape(shown.html)
        assert (ChatState.parse(shown.kept).history, shown.buttons) == ([("Hello", "ABCDEF")], IDLE)
    lost = seen(tabs["text"], tabs["text"].resume({**kept, "running": "of a server that is gone"}))
    assert lost.kept == kept
    assert "The connection to the server was lost before the answer was complete" in lost.html
    assert (lost.html.count('class="mm-asked">Hello'), lost.buttons, lost.follow_up) == (1, IDLE, True)
    cleared = seen(tabs["text"], tabs["text"].clear())
    assert (cleared.kept["turns"], cleared.kept["opened"], cleared.follow_up) == ([], True, False)
    assert "mm-empty" in cleared.html

    def refused(request, methods=None):
        raise UserError("not this one")
        yield

    monkeypatch.setattr(service, "race", refused)
    shown = send("text", "Hello", "tiny-hybrid", button="race")
    assert "Not this one." in shown.html
    assert "sooner" in shown.claim


def test_stopped_answer_is_kept_as_a_turn(tabs, service):
    tab, states, settings = tabs["text"], [], ("tiny-hybrid", "auto", 0.0, 0, 12, 8)
    controls = tab.controls

    def answer(request):
        partial = answered("none")
        partial.stats = None
        yield Race([StreamedAnswer("tiny", "none")], ahead=2)
        yield Race([partial])
        tab.stop(states[0].kept)
        yield Race([partial])
        raise AssertionError("it was stopped")

    service.answer = answer
    for updates in tab.answer(False, {}, False, "Hello", [], *settings):
        states.append(seen(tab, updates))
        if len(states) == 1:  # a running request is not joined by another
            (again,) = tab.answer(False, states[0].kept, False, "Hello", [], *settings)
            assert list(again) == [controls.result]
    assert (states[0].buttons, states[-1].buttons) == (BUSY, IDLE)
    assert "2 requests ahead" in states[1].html
    (turn,) = ChatState.parse(states[-1].kept).turns
    assert (turn.answer, turn.stopped, states[-1].kept["running"]) == ("ABCDEF", True, "")
    assert "stopped</span>" in states[-1].html
    assert "stopped</span>" in result_html([turn])
    service.answer = lambda request: iter([Race([StreamedAnswer("tiny", "none")])])
    *_, last = tab.answer(False, {}, False, "Hello", [], *settings)
    assert "Stopped before the first token." in seen(tab, last).html


def test_opening_race_runs_when_a_tab_is_first_seen(tabs, service, send):
    for kind, tab in tabs.items():
        *_, last = tab.opening({}, SimpleNamespace(query_params={}))
        shown, request = seen(tab, last), service.requests[-1]
        assert (request.kind, request.max_new_tokens) == (kind, 64)
        assert ChatState.parse(shown.kept).history == [(request.prompt, "ABCDEF")]
        assert '"plays":true' in unescape(shown.html)
        raced = len(service.requests)
        for before, query in ((shown.kept, {}), (tab.clear()[tab.controls.conversation], {}), ({}, {"kind": "text"})):
            (update,) = tab.opening(before, SimpleNamespace(query_params=query))
            assert list(update) == [tab.controls.result]
        assert len(service.requests) == raced
    assert '"plays":false' in unescape(send("text", "Hello", "tiny-hybrid", button="race").html)


def test_examples_and_methods_suit_the_model(tabs):
    tab, image = tabs["text"], tabs["image"]
    for model, prompts in (("smollm2", TEXTS), ("tiny-hybrid", TRAINED_TEXTS)):
        picker, about, methods, *buttons = tab.select(model, "auto", [])
        assert [button.value for button in buttons] == list(prompts)
        filled = [tab.example(number, model)[tab.controls.prompt] for number in range(3)]
        assert filled == list(prompts.values())
    assert [len(picker.value), "mm-about" in about, "arXiv" in methods] == [2, True, True]
    own = tab.select("tiny-hybrid", "/drafters/own", ["none", "/drafters/own", "gone"])[0]
    assert own.value == ["none", "/drafters/own"]
    assert "/drafters/own" in [name for _, name in own.choices]
    for model, label in (("llava", "A goldfish"), ("smol-llava", "A goldfish"), ("tiny-llava", "Two rings")):
        examples = image.controls.examples.of(model)
        assert (len(examples), examples[0].label) == (4, label)
        for example in examples:
            with Image.open(example.value) as opened:
                assert max(opened.size) <= 640
    (example,) = image.example(0, "tiny-llava")[image.controls.media[0]]
    uploads = [(path, None) for path in (example, "/tmp/a.png", "/tmp/b.png")]
    assert image.uploaded(uploads)[image.controls.media[0]] == ["/tmp/a.png", "/tmp/b.png"]
    assert image.preview(uploads) == ["/tmp/a.png", "/tmp/b.png"]  # in either order
    assert image.controls.media[0] not in image.uploaded(uploads[1:])  # unchanged
    assert image.preview(uploads[1:]) == image.preview(uploads[:1]) == gr.skip()


def test_links(tabs):
    selected = gr.Tabs()
    tab, query = tabs["image"], {"kind": "image", "prompt": "What?", "model": "tiny-llava", "temperature": "0.5"}
    query |= {"max_new_tokens": "64", "seed": "5", "methods": "none,flash%40chain,a,b,c", "example": "scene.png"}
    updates, settings = linked(tabs, selected, query), tab.controls.settings
    expected = {"model": "tiny-llava", "drafter": "auto", "temperature": 0.5, "seed": 5, "max_new_tokens": 64}
    expected |= {"frames": 8}
    assert {name: updates[component] for name, component in settings.items()} == expected
    assert (updates[tab.controls.prompt], updates[selected].selected) == ("What?", "image")
    assert updates[tab.controls.methods].value == ["none", "flash@chain", "a", "b"]  # at most four
    assert [Path(path).name for path in updates[tab.controls.media[0]]] == ["scene.png"]
    assert "those of the link" in updates[tab.controls.result]
    alone = linked(tabs, selected, {"kind": "text", "methods": "ngram"})
    assert alone[tabs["text"].controls.settings["drafter"]] == "ngram"
    assert list(linked(tabs, selected, {"other": "x"}).values()) == [gr.skip()]
    for query, message in (
        ({"kind": "sound"}, "Invalid link: kind must be 'image', 'video' or 'text': got 'sound'."),
        ({"kind": "text", "temperature": "hot"}, "Invalid link: temperature must be a number: got 'hot'."),
        ({"kind": "text", "max_new_tokens": "513"}, "Invalid link: max_new_tokens must be <= 512: got 513."),
    ):
        shown = linked(tabs, selected, query)
        assert message in unescape(shown[tab.controls.result])
        assert list(shown) == [tab.controls.result for tab in tabs.values()]


def test_origins_and_times_of_tokens():
    named = [("A", "first", 0), ("B", "accepted", 1), ("C", "accepted", 1), ("D", "bonus", 1), ("E", "plain", 2)]
    expected = [Token(*each) for each in (*named, ("F", "bonus", 3))]
    answer = StreamedAnswer("tiny", "msd")
    for count, ids, seconds, ends in ((0, [65], 1.0, [1.0]), (1, [66, 67, 68], 3.0, [1.0, 3.0]), (3, [69, 70], 4.0, 0)):
        answer.seconds = seconds
        answer.append(piece(ids, trees=STEPS[:count]))
        assert answer.pass_ends == (ends or [1.0, 3.0, 3.5, 4.0])  # passes of one piece share its time equally
    assert answer.tokens == answered().tokens == expected
    assert [token.origin for token in answered("none").tokens] == ["plain"] * 6
    assert (answered().passes, answered("none").passes) == (3, 5)
    whole = StreamedAnswer("tiny", "none")
    whole.append(Piece("é!?", [*"é".encode(), 33], parts=[("", ""), ("", "é"), ("", "!"), ("", "?")]))
    assert [token.text for token in whole.tokens] == ["", "é", "!"]


def test_tokens_are_coloured_and_escaped():
    html = tokens_html([Token(" <b>", "first", 0), Token(" x", "accepted", 1), Token(" y", "accepted", 1)])
    first = '<span data-pass="0">&lt;b&gt;</span>'
    assert html == f'{first} <span class="mm-accepted" title="pass 1: drafted and accepted" data-pass="1">x y</span>'
    html = tokens_html([Token("a", "bonus", 2), Token("\n", "accepted", 3), Token("", "bonus", 3)])
    assert html == '<span class="mm-bonus" title="pass 2: bonus token, the model&#39;s own" data-pass="2">a</span>\n'


def test_an_answer_while_it_grows():
    turn = Turn("Who?", [Token("<i>me</i>", "plain", 0)])
    html = result_html([turn], "<script>", Race([answered()]), limits="shapes & texts only")
    assert html.index("Who?") < html.index("&lt;i&gt;me") < html.index("&lt;script&gt;")
    assert "<script>" not in html
    limits = '<p class="mm-limits">shapes &amp; texts only</p>'
    for part in ("6 tokens in 3 passes", "1.7 tokens per pass", limits, "<h2>Answer</h2>"):
        assert html.count(part) == 1
    legend = re.search('<p class="mm-legend">.*?</p>', html, re.DOTALL)[0]
    assert ("drafted and accepted" in legend, "bonus" in legend, "not drafted" in legend) == (True, True, True)
    assert "mm-legend" not in result_html([], "And?", Race([answered("none")]))
    assert result_html([], note="<oops>").count("&lt;oops&gt;") == 2  # shown, and announced
    answer = StreamedAnswer("tiny", "none", limit=8, seconds=0.5)
    for count in range(1, 5):
        answer.append(piece([65]))
        html = result_html([], "Who?", Race([answer, answer]))
        assert f"width:{12.5 * count}%" in html
        assert f"<b>{2 * count}</b> tokens/s so far" in html
    answer.append(piece([], "length", Stats()))
    html = result_html([], "Who?", Race([answer, answer]))
    assert "width:100.0%" in html
    assert "tiny; the answer reached the length limit" in html


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
    race = Race([answered("none", seconds=seconds), answered()])
    assert "Racing" in result_html([], "Who?", race)
    assert heading not in claim_html(race)
    race.equal, race.difference = equal, None if equal else Difference(3, 1, 2, 0.0123)
    race.runs = 1
    timing = result_html([], "Who?", race)
    assert ("timing 2 more runs…" in timing) is equal
    assert "<tr>" not in timing
    stopped = result_html([], "Who?", race, recorded={"lanes": []})
    assert ("more runs" in stopped, "Complete runs: 1." in stopped) == (False, True)
    assert ("(one run)" in claim_html(race)) is equal
    race.runs = 3
    assert f"<h1>{heading}</h1>" in claim_html(race)
    html = result_html([], "Who?", race)
    assert "Complete runs: 3." in html
    assert ("the logit margin at the difference is 0.012" in html) is not equal
    rows = re.findall("<tr>(.*?)</tr>", html)
    assert len(rows) == 3
    assert rows[2].endswith(f"<td>{(seconds - 0.5) / 1.5:.2f}x</td><td>{seconds / 2:.2f}x</td>")
    assert "<td>6</td><td>3</td><td>1.7</td><td>3</td><td>500 ms</td><td>2.00 s</td>" in rows[2]
    assert "MSD in detail" in html
    bars = re.findall(r'<dt>(.*?)</dt><dd><i style="width:(\d+)%"></i>(.*?)</dd>', html)
    assert bars[:2] == [("0", "60", "2 passes"), ("2", "30", "1 pass")]
    assert bars[2:4] == [("read prompt", "30", "500 ms · 33%"), ("guess", "0", "0 ms · 0%")]
    assert "Time: 1.50 s" in html


def test_recording():
    race = Race([answered("none"), answered("msd@chain")])
    recorded = recording(race.lanes, ChatRequest("text", "Who?", model="tiny", seed=3), None)
    html = result_html([], "Who?", race, recorded=recorded)
    read = json.loads(unescape(re.search('data-recording="(.*?)"', html)[1]))
    options = {"temperature": 0.0, "max_new_tokens": 256, "seed": 3, "methods": ["none", "msd@chain"]}
    assert read["settings"] == {"kind": "text", "prompt": "Who?", "model": "tiny", **options}
    plain, chain = read["lanes"]
    assert (plain["label"], chain["label"], chain["text"]) == ("Plain", "MSD, chain", "ABCDEF")
    assert (plain["emitted"], chain["emitted"]) == ([1] * 6, [1, 3, 1, 1])
    assert (plain["trees"], plain["shares"], chain["ends"]) == ([], [0.0, 1.0], [0.5, 1.0, 1.5, 2.0])
    assert chain["trees"][0] == {**asdict(STEPS[0]), "probs": [0.3333] * 4}
    video = recording(race.lanes, ChatRequest("video", "Who?"), "clip.mp4")["settings"]
    assert (video["frames"], video["example"]) == (8, "clip.mp4")


def test_each_method_has_a_line_with_its_paper():
    catalog = Catalog.of()
    for model in plugins.installed():
        methods = catalog.methods(model)
        lines = re.findall("<li>.*?</li>", views.methods_html(methods))
        drafters = {name for method in methods for name in drafter_of(method).split("+")}
        assert len(lines) == len(drafters) + any(method.endswith("@chain") for method in methods)
        for line in lines:
            found = re.search(r'<a href="https://arxiv.org/abs/([0-9.]+)" .+?>arXiv (.+?)</a>', line)
            assert found[1] == found[2]
            assert "target" not in line.replace(found[0], "")


def test_addresses_that_the_package_states_are_linked(monkeypatch):
    stated = Message()
    for name in ("Source, https://a.org/code", "Documentation, https://a.org/docs", "Funding, https://a.org"):
        stated["Project-URL"] = name
    monkeypatch.setattr(views, "metadata", lambda name: stated)
    expected = [("https://a.org/code", "Code"), ("https://a.org/docs", "Docs"), ("?view=api", "Use from Python")]
    assert re.findall('<a href="(.+?)">(.+?)</a>', views.links_html()) == expected
