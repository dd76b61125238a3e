"""What the page asks in a visitor's name, without a browser."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from demos import page as page_module
from demos.offer import offer
from demos.page import Talk, build
from demos.questions import Upload
from demos.runs import Race, Run
from demos.samples import TEXTS
from demos.service import Service
from demos.storage import Uploads
from mmspec import plugins
from mmspec.stats import Stats
from vision.embedded import samples

SETTINGS = ("auto", 0.0, 12, 8)  # drafter, temperature, longest answer, frames


class Echo(Service):
    """Keeps questions, and answers each at once."""

    def answer(self, question):
        self.questions.append(question)
        yield Run("m", "none", text="yes", stats=Stats(), finish_reason="stop")

    def race(self, question):
        self.questions.append(question)
        runs = [Run("m", "none", text="yes", stats=Stats(), finish_reason="stop") for _ in range(2)]
        yield Race(*runs, end_to_end_ratio=1.0, equal=True)


@pytest.fixture
def service(tmp_path):
    (tmp_path / "samples").mkdir()
    made = Echo(None, offer(open=False), Uploads(tmp_path, 2**20))
    made.questions = []
    return made


@pytest.fixture
def ask(service, monkeypatch):
    """Presses "Ask" or "Race" in the panel of a kind; returns the conversation and the HTML that are shown last."""
    panels, start = {}, page_module._Panel.__init__

    def keep(self, service, kind, folder):
        panels[kind] = self
        start(self, service, kind, folder)

    monkeypatch.setattr(page_module._Panel, "__init__", keep)
    build(service, service.uploads.folder / "samples")

    def asked(kind, prompt, model, *media, talk=None, press="_ask"):
        return list(getattr(panels[kind], press)(talk or Talk(), prompt, model, *SETTINGS, *media))[-1][:2]

    return asked


def sent(service, path):
    """An upload of a file that exists here."""
    stored = service.uploads.folder / "sha" / Path(path).name
    stored.parent.mkdir()
    stored.write_bytes(Path(path).read_bytes())
    return Upload(str(stored), stored.name)


def test_every_conversation_has_a_seed_of_its_own(ask, service):
    talk, _ = ask("text", "Hello", "tiny-hybrid")
    talk, _ = ask("text", "And?", "tiny-hybrid", talk=talk)
    ask("text", "Hello", "tiny-hybrid")
    seeds = [question.seed for question in service.questions]
    assert seeds[0] == seeds[1] == talk.seed != 0
    assert seeds[2] not in (0, seeds[0])


@pytest.mark.parametrize("press", ["_ask", "_race"])
def test_an_embedded_models_limits_are_told_once_for_a_visitors_own_input(ask, service, tmp_path, press):
    Image.new("RGB", (20, 10), "red").save(tmp_path / "lake.png")
    own = sent(service, tmp_path / "lake.png")
    for kind, prompt, model, media in (
        ("image", "Describe the image.", "tiny-llava", [own]),
        ("image", "Describe the image.", "", [own]),
        ("text", "Who was Ada Lovelace?", "tiny-hybrid", []),
    ):
        _, html = ask(kind, prompt, model, *media, press=press)
        assert html.count(plugins.limits(model or "tiny-llava")) == 1


@pytest.mark.parametrize("press", ["_ask", "_race"])
def test_samples_and_other_models_have_no_such_line(ask, service, tmp_path, press):
    Image.new("RGB", (20, 10), "red").save(tmp_path / "lake.png")
    sample = sent(service, samples() / "scene.png")
    drawn = Upload(str(next((service.uploads.folder / "samples").glob("*.png"))), "drawn.png")
    service.offer = replace(service.offer, models=("llava", "tiny-llava", "tiny-hybrid"))
    for kind, prompt, model, media in (
        ("image", "How many objects are there?", "tiny-llava", [sample]),
        ("image", "Describe the image.", "tiny-llava", [drawn]),
        ("image", "Describe the image.", "llava", [Upload(str(tmp_path / "lake.png"), "lake.png")]),
        ("text", next(iter(TEXTS.values())), "tiny-hybrid", []),
    ):
        _, html = ask(kind, prompt, model, *media, press=press)
        assert "mm-limits" not in html


@pytest.mark.parametrize("press", ["_ask", "_race"])
def test_names_outside_of_the_offer_are_refused(ask, service, press):
    _, html = ask("text", "Hello", "/etc", press=press)
    assert "model must be one that this server offers: expected tiny-hybrid, tiny-llava, got &#x27;/etc&#x27;" in html
    assert service.questions == []
