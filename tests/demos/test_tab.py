"""Tests of a tab's event handlers, without a browser."""

from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from PIL import Image

from mmspec import UserError, plugins
from mmspec.demos import page as page_module
from mmspec.demos.catalog import TEXTS, TRAINED_TEXTS, make_catalog
from mmspec.demos.chat_request import ChatState, Token, Upload
from mmspec.demos.page import build
from mmspec.demos.racing import Race, StreamedAnswer
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder
from mmspec.engine.stats import Stats
from mmspec.vision.embedded import samples


def said_yes(drafter, **complete):
    tokens = {"text": "yes", "token_ids": [1], "tokens": [Token("yes", "first", 0)], "pass_ends": [1.0], "seconds": 1.0}
    return StreamedAnswer("m", drafter, **tokens, **({"stats": Stats(), "finish_reason": "stop"} | complete))


class Echo(Service):
    """Records requests and answers each immediately."""

    def answer(self, request):
        self.requests.append(request)
        yield said_yes("none")

    def race(self, request, methods=None):
        self.requests.append(request)
        yield Race([said_yes("none"), said_yes("ngram")], equal=True)

    def opening(self, request):
        yield from self.race(request)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The tabs of a page by their kinds, and what answers them."""
    folder = tmp_path_factory.mktemp("uploads")
    (folder / "samples").mkdir()
    echo, tabs, init = Echo(None, make_catalog(open=False), UploadFolder(folder, 2**20)), {}, page_module.Tab.__init__

    def record(self, service, kind, *rest):
        tabs[kind] = self
        init(self, service, kind, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module.Tab, "__init__", record)
        build(echo, folder / "samples")
    return echo, tabs


@pytest.fixture
def service(built, monkeypatch):
    for name in ("catalog", "models", "answer"):  # which tests change
        monkeypatch.setattr(built[0], name, getattr(built[0], name))
    built[0].requests = []
    return built[0]


@pytest.fixture
def ask(built, service):
    """Press "Ask" or "Race" in the tab of a kind; returns the final conversation and HTML."""

    def press_button(kind, prompt, model, *media, conversation=None, follow_up=False, press="ask", seed=0):
        handler = getattr(built[1][kind], press)
        settings = (model, "auto", 0.0, seed, 12, 8, media)
        return list(handler(conversation or ChatState(), follow_up, prompt, ["none", "ngram"], *settings))[-1][:2]

    press_button.tabs = built[1]
    return press_button


def store_upload(service, path):
    """Copy a file to the upload folder."""
    stored = service.uploads.folder / "sha" / Path(path).name
    stored.parent.mkdir(exist_ok=True)
    stored.write_bytes(Path(path).read_bytes())
    return Upload(str(stored), stored.name)


def test_a_conversation_has_a_seed(ask, service):
    conversation, _ = ask("text", "Hello", "tiny-hybrid")
    conversation, _ = ask("text", "And?", "tiny-hybrid", conversation=conversation, follow_up=True)
    ask("text", "Hello", "tiny-hybrid")
    ask("text", "And?", "tiny-hybrid", conversation=conversation, follow_up=True, seed=7)
    seeds = [request.seed for request in service.requests]
    assert seeds[0] == seeds[1] == conversation.seed != 0
    assert seeds[2] not in (0, seeds[0])
    assert seeds[3] == 7


@pytest.mark.parametrize("press", ["ask", "race"])
def test_note_on_limits_for_a_visitors_own_input(ask, service, tmp_path, press):
    """Of embedded models, where the input is none of their examples."""
    Image.new("RGB", (20, 10), "red").save(tmp_path / "lake.png")
    own, sample = store_upload(service, tmp_path / "lake.png"), store_upload(service, samples() / "scene.png")
    fish, rings = (service.uploads.folder / "samples" / name for name in ("goldfish.jpg", "two-rings.png"))
    service.catalog = replace(service.catalog, models=("llava", *service.catalog.models))
    for kind, prompt, model, media, noted in (
        ("image", "Describe the image.", "tiny-llava", [own], True),
        ("image", "Describe the image.", "", [own], True),
        ("image", "Describe the image.", "tiny-llava", [store_upload(service, fish)], True),
        ("text", "Who was Ada Lovelace?", "tiny-hybrid", [], True),
        ("image", "How many objects are there?", "tiny-llava", [sample], False),
        ("image", "Describe the image.", "tiny-llava", [Upload(str(rings), "drawn.png")], False),
        ("image", "Describe the image.", "llava", [own], False),
        ("text", next(iter(TRAINED_TEXTS.values())), "tiny-hybrid", [], False),
    ):
        _, html = ask(kind, prompt, model, *media, press=press)
        assert html.count(plugins.limits(model or plugins.default_model()) or "mm-limits") == noted


@pytest.mark.parametrize("press", ["ask", "race"])
def test_names_outside_the_catalog_raise(ask, service, press):
    _, html = ask("text", "Hello", "/etc", press=press)
    offered = ", ".join(plugins.installed())
    assert f"Model must be one that this server offers: expected {offered}, got &#x27;/etc&#x27;" in html
    assert service.requests == []


@pytest.mark.parametrize("press", ["ask", "race"])
@pytest.mark.parametrize(("follow_up", "history"), [(False, []), (True, [("Hello", "yes")])])
def test_a_question_starts_a_conversation_unless_it_is_a_follow_up(ask, service, press, follow_up, history):
    conversation, _ = ask("text", "Hello", "tiny-hybrid", press=press)
    after, html = ask("text", "Hello", "tiny-hybrid", conversation=conversation, follow_up=follow_up, press=press)
    assert service.requests[1].history == history
    assert after.history == [*history, ("Hello", "yes")]
    assert html.count('class="mm-asked">Hello') == 1 + len(history)


@pytest.mark.parametrize("press", ["ask", "race"])
def test_a_running_request_is_not_joined_by_another(ask, service, monkeypatch, press):
    with monkeypatch.context() as patched:
        patched.setitem(ask.tabs["text"]._running, "busy", Event())
        ask("text", "Hello", "tiny-hybrid", conversation=ChatState(running="busy"), press=press)
    assert service.requests == []
    ask("text", "Hello", "tiny-hybrid", conversation=ChatState(running="of a server that is gone"), press=press)
    assert len(service.requests) == 1


def test_stopped_answer_is_kept_as_a_turn(ask, service):
    conversations = []

    def answer(request):
        while True:
            yield said_yes("none", stats=None)
            ask.tabs["text"].stop(conversations[-1])

    service.answer = answer
    for outputs in ask.tabs["text"].ask(ChatState(), False, "Hello", [], "tiny-hybrid", "auto", 0.0, 0, 12, 8):
        if isinstance(outputs[0], ChatState):
            conversations.append(outputs[0])
    assert conversations[-1].history == [("Hello", "yes")]
    assert conversations[-1].running == ""
    assert conversations[-1].turns[0].stopped
    assert ask.tabs["text"]._running == {}
    assert "stopped" in outputs[1]
    assert [button.interactive for button in outputs[3:]] == [True, True, False, True]


def refused(request, methods=None):
    raise UserError("not this one")
    yield


def test_the_headline_goes_with_its_race(ask, service, monkeypatch):
    tab, settings = ask.tabs["text"], ("Hello", ["none", "ngram"], "tiny-hybrid", "auto", 0.0, 0, 12, 8)

    def headlines(press):
        return [states[2] for states in press(ChatState(), False, *settings) if isinstance(states[2], str)]

    assert [("as fast" in one) for one in headlines(tab.race)] == [False, True]  # at its start, at its end
    asked, cleared = headlines(tab.ask), tab.clear()[2]
    monkeypatch.setattr(service, "race", refused)
    for heading in (*asked, *headlines(tab.race), cleared):
        assert "The model's own answer, sooner" in heading


def test_place_in_the_queue_is_shown(ask, service, monkeypatch):
    monkeypatch.setattr(service, "race", lambda *_: (Race([], ahead=ahead) for ahead in (2, 1)))
    states = list(ask.tabs["text"].race(ChatState(), False, "Hello", [], "tiny-hybrid", "auto", 0.0, 0, 12, 8))
    assert ["2 requests ahead" in states[1][1], "1 request ahead" in states[2][1]] == [True, True]
    assert "Stopped before the first token" in states[-1][1]


def test_opening_race_runs_when_a_tab_is_first_seen(ask, service):
    for kind, tab in ask.tabs.items():
        conversation, html, *_ = list(tab.opening(ChatState(), SimpleNamespace(query_params={})))[-1]
        prompt = service.requests[-1].prompt
        assert conversation.opened
        assert conversation.history == [(prompt, "yes")]
        assert f'class="mm-asked">{prompt}' in html
        assert "&quot;plays&quot;:true" in html
        assert service.requests[-1].kind == kind
        raced = len(service.requests)
        for before, query in ((conversation, {}), (tab.clear()[0], {}), (ChatState(), {"kind": "text"})):
            ((skipped, *_),) = tab.opening(before, SimpleNamespace(query_params=query))
            assert not isinstance(skipped, ChatState)
        assert len(service.requests) == raced
    _, html = ask("text", "Hello", "tiny-hybrid", press="race")
    assert "&quot;plays&quot;:false" in html  # only the opening replay plays by itself


def test_examples_suit_the_model(ask):
    tab = ask.tabs["text"]
    for model, texts in (("smollm2", TEXTS), ("tiny-hybrid", TRAINED_TEXTS)):
        *_, first, second, third = tab.select(model, "auto", [])
        assert [first.value, second.value, third.value] == list(texts)
        assert [tab.example(number, model)[0] for number in range(3)] == list(texts.values())
    for model, label in (("llava", "A goldfish"), ("smol-llava", "A goldfish"), ("tiny-llava", "Two rings")):
        examples = ask.tabs["image"].controls.examples(model)
        assert (len(examples), examples[0].label) == (4, label)
        for example in examples:
            with Image.open(example.value) as image:
                assert max(image.size) <= 640


def test_uploads_replace_an_example(ask, tmp_path):
    tab = ask.tabs["image"]
    (example,) = tab.controls.shown(tab.controls.examples("tiny-llava")[0].value)
    own = [Upload(str(tmp_path / name), name) for name in ("a.png", "b.png")]
    assert tab.uploaded([example, *own])[0] == own
    assert not isinstance(tab.uploaded(own)[0], list)  # unchanged


def test_note_on_several_images_for_a_model_trained_with_one(ask, service, tmp_path):
    service.catalog = replace(service.catalog, models=("llava", "tiny-llava"))
    two = [Upload(str(tmp_path / name), name) for name in ("a.png", "b.png")]
    for one_image, media, noted in ((True, two, True), (True, two[:1], False), (False, two, False)):
        service.models = SimpleNamespace(get=lambda name, one=one_image: SimpleNamespace(one_image=one))
        _, html = ask("image", "What?", "llava", *media)
        assert ("llava was trained with one picture in a question" in html) is noted


def test_lost_request_is_said_and_its_conversation_kept(ask):
    conversation, _ = ask("text", "Hello", "tiny-hybrid")
    resumed, html, _, *buttons = ask.tabs["text"].resume(replace(conversation, running="of a server that is gone"))
    assert resumed == conversation
    assert "The connection to the server was lost before the answer was complete" in html
    assert 'class="mm-asked">Hello' in html
    assert [button.interactive for button in buttons] == [True, True, False, True]
